"""Every node test of the ONNX package on one real server, over both protocols, and the proof about its rows."""

import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from apart import UnavailableError
from onnx_node_cases import NodeCase, fetch_node_cases, read_node_cases
from onnx_node_verdicts import PAGE, Verdict, judging, render
from ortserve.core.batch import Arrays, Batch
from ortserve.core.signature import ModelSignature
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import ServeError
from ortserve.model_file.reading import read_model
from ortserve.registry.load.batch_sizes import RunBounds, WorkerRuns
from ortserve.registry.load.inputs import InputGenerator
from ortserve.registry.load.progress import Progress
from ortserve.registry.load.row_trial import why_rows_depend
from ortserve.registry.load.warmup import WarmUpPlan, warm_up

pytestmark = pytest.mark.timeout(240)  # a server for all cases; about 20 s on two idle cores


@pytest.fixture(scope="module")
def cases() -> list[NodeCase]:
    try:
        return read_node_cases(fetch_node_cases())
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def verdicts(cases: list[NodeCase], tmp_path_factory: pytest.TempPathFactory) -> list[Verdict]:
    with judging(cases, tmp_path_factory.mktemp("nodes")) as judge:
        return judge()


def test_server_answers_equal_onnx_runtime_on_both_protocols(verdicts: list[Verdict]) -> None:
    failures = [f"{verdict.name}: {failure}" for verdict in verdicts for failure in verdict.failures]
    assert not failures, "\n".join(failures)


def test_page_states_the_result_of_each_case(verdicts: list[Verdict]) -> None:
    assert len(verdicts) == 1765
    assert PAGE.read_text() == render(verdicts), "run: python tests/support/onnx_node_verdicts.py"


def test_cases_are_fetched_once(cases: list[NodeCase], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx_node_cases._fetch_wheel", lambda folder: pytest.fail("fetched again"))
    assert Path(fetch_node_cases()) == cases[0].model.parents[1]


def test_rows_found_independent_are_so_for_the_stored_inputs(cases: list[NodeCase], tmp_path: Path) -> None:
    batched = 0
    for case in cases:
        stored = [value for value in case.inputs.values() if isinstance(value, np.ndarray)]
        if len(stored) == len(case.inputs) and free_batch_axis(case, tmp_path / "model.onnx"):
            batched += check_rows(tmp_path / "model.onnx", case.name, tuple(map(np.ascontiguousarray, stored)))
    assert batched > 400  # about 500; fewer where the machine is too busy for the trial


def free_batch_axis(case: NodeCase, path: Path) -> bool:
    """Write the model with axis 0 of all inputs and outputs free, under one name; False if they share no size."""
    values = [*case.inputs.values(), *case.outputs.values()]
    rows = {len(value) if isinstance(value, np.ndarray) and value.ndim else 0 for value in values}
    if not case.inputs or len(rows) > 1 or max(rows) < 2:
        return False
    model = onnx.load(case.model)
    del model.graph.value_info[:]  # their sizes no longer hold
    for info in (*model.graph.input, *model.graph.output):
        if not info.type.tensor_type.shape.dim:
            return False
        info.type.tensor_type.shape.dim[0].dim_param = "batch"
    path.write_bytes(model.SerializeToString())
    return True


def check_rows(path: Path, name: str, stored: Arrays) -> bool:
    """Whether rows were found independent. If so, they must be independent for the stored inputs too."""
    try:
        session = open_session(path, name, SessionOptions(ProviderChoice(CPU), 1))
        signature = read_signature(session, read_model(path))
    except ServeError:
        return False
    if not signature.is_batched:
        return False
    instance = Instance(session, signature, name=name, intra_op_threads=1, clock=time.monotonic_ns)
    try:
        worker = WorkerRuns(instance, RunBounds(Progress(time.monotonic_ns)))
        found = warm_up(worker, InputGenerator(signature, None), WarmUpPlan(budget_s=1e-3, max_rows=1))
        if found.rows_depend or found.rejection or [array.dtype for array in stored] != numpy_types(signature):
            return False
        together = instance.run(as_batch(stored)).outputs
        alone = [
            instance.run(as_batch(tuple(array[row : row + 1] for array in stored))).outputs
            for row in range(len(stored[0]))
        ]
        assert why_rows_depend(signature, together, alone) == "", name
        return True
    finally:
        instance.close()


def numpy_types(signature: ModelSignature) -> list[np.dtype]:
    return [spec.datatype.numpy for spec in signature.inputs]


def as_batch(inputs: Arrays) -> Batch:
    return Batch(tuple((array,) for array in inputs), len(inputs[0]), len(inputs[0]))
