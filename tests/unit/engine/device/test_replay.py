"""Why a graph is not to be captured, by what is known before it is tried."""

import pytest

from ortserve.config.session import SessionSettings
from ortserve.engine.device.replay import why_no_replay

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("operators", "settings", "told"),
    [
        ({CUDA: {"MatMul", "Relu"}}, SessionSettings(), ""),
        ({CUDA: {"MatMul"}, CPU: {"Unique"}}, SessionSettings(), f"not all of it is on {CUDA}: {CPU} runs Unique"),
        ({CUDA: {"MatMul", "Reshape"}, CPU: {"Shape", "Gather", "Concat"}}, SessionSettings(), ""),
        (
            {CUDA: {"MatMul"}, CPU: {"Shape"}, "Other": {"Relu"}},
            SessionSettings(),
            f"not all of it is on {CUDA}: {CPU} runs Shape; Other runs Relu",
        ),
        ({CUDA: {"MatMul", "Loop"}}, SessionSettings(), "which nodes run is decided while it runs, by Loop"),
        (
            {CUDA: {"MatMul"}, CPU: {"If", "Scan"}},
            SessionSettings(),
            "which nodes run is decided while it runs, by If, Scan",
        ),
        (
            {CUDA: {"MatMul"}},
            SessionSettings(shrink_arenas=("gpu:0",)),
            "session.shrink_arenas gives back memory that captured graphs go on using",
        ),
        ({CUDA: {"MatMul"}}, SessionSettings(shrink_arenas=("cpu:0",)), ""),
    ],
)
def test_a_model_is_captured_or_it_is_said_why_not(
    operators: dict[str, set[str]], settings: SessionSettings, told: str
) -> None:
    assert why_no_replay(CUDA, {name: frozenset(kinds) for name, kinds in operators.items()}, settings) == told
