"""Which execution provider runs which node, as the real ONNX Runtime tells."""

from pathlib import Path

import pytest

from models import builders
from ortserve.engine.placement import check_placement, describe_placement, read_placement
from ortserve.engine.providers import CPU, ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import ErrorKind, ServeError

CUDA = "CUDAExecutionProvider"


def test_nodes_are_counted_by_the_provider_that_runs_them(tmp_path: Path) -> None:
    session = open_session(builders.mlp(tmp_path / "model.onnx"), "m", SessionOptions(ProviderChoice(CPU), 1))
    assert read_placement(session) == {CPU: 4}


def test_provider_must_take_a_node_where_there_are_some() -> None:
    check_placement(CUDA, {CUDA: 1, CPU: 40})
    check_placement(CUDA, {})
    with pytest.raises(ServeError) as caught:
        check_placement(CUDA, {CPU: 40, "OpenVINOExecutionProvider": 2})
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == (
        "execution_providers: CUDAExecutionProvider takes none of the model's nodes; "
        "CPUExecutionProvider takes 40, OpenVINOExecutionProvider takes 2"
    )


def test_placement_in_words() -> None:
    assert describe_placement({CUDA: 31, CPU: 2}) == "CUDAExecutionProvider: 31, CPUExecutionProvider: 2"
