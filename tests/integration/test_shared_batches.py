"""No answer depends on the other requests of its batch: models of real exporters, with 16 concurrent clients."""

import asyncio
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc.aio as triton

from ortserve.core.dtypes import DataType
from ortserve.core.tensor import agree
from ortserve.engine.ort_errors import ORT_ERRORS
from ortserve.rows import Outcome
from rows.brute_force import Arrays, join
from rows.exported import CORPUS, PACKAGES, Exported, committed, packaged
from servers import ServerProcess, serving, wire_datatype

CALLERS: Final = 16
REQUESTS: Final = 96
REQUESTS_OF_LARGE: Final = 24
"""Number of requests to models of packages."""
SEEDS: Final = 4
DECLARED_FIXED: Final = {"lightgbm_classifier"}
"""Models that declare one row in an output that has several; ONNX Runtime would warn in each batch."""
MODELS: Final = [*committed(), *(packaged(Path(PACKAGES)) if PACKAGES else [])]


def served_name(model: Exported) -> str:
    return model.name.replace("/", "_").removesuffix(".onnx")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of all models, without configuration."""
    repository = tmp_path_factory.mktemp("corpus")
    for model in MODELS:
        folder = repository / served_name(model) / "1"
        folder.mkdir(parents=True)
        shutil.copy(model.path, folder / "model.onnx")
        for beside in model.path.parent.glob(f"{model.path.name}*.data"):
            shutil.copy(beside, folder)
    with serving(repository, "--warmup-s", "0.3", "--intra-op-threads", "1") as process:
        yield process


@dataclass
class Request:
    """A request, and ONNX Runtime's answer to it alone."""

    inputs: Arrays
    expected: Arrays


def as_tensor(output: np.ndarray | list[dict[int | str, float]]) -> np.ndarray:
    """An output of ONNX Runtime as an array; for a list of maps, the values in the order of their keys."""
    if isinstance(output, np.ndarray):
        return output
    return np.array([[value for _, value in sorted(row.items())] for row in output], np.float32)


def make_requests(model: Exported, outputs: Sequence[str]) -> list[Request]:
    """Requests of one to three rows that the model accepts; with different seeds, inputs without rows may differ."""
    session = ort.InferenceSession(model.path, providers=["CPUExecutionProvider"])
    rows = [model.rows(seed) for seed in range(SEEDS)]
    requests: dict[tuple[int, tuple[int, ...]], Request] = {}
    made = []
    for number in range(REQUESTS if model.path.parent == CORPUS else REQUESTS_OF_LARGE):
        seed = number % SEEDS
        first, count = number % len(rows[seed]), 1 + number // SEEDS % 3
        chosen = tuple((first + step) % len(rows[seed]) for step in range(count))
        key = seed, chosen
        if key not in requests:
            inputs = join([rows[seed][row] for row in chosen], model.row_axes)
            try:
                answer = session.run(list(outputs), inputs)
            except ORT_ERRORS:
                assert count > 1, "each row alone is a request"
                continue
            requests[key] = Request(inputs, dict(zip(outputs, map(as_tensor, answer), strict=True)))
        made.append(requests[key])
    return made


async def ask_all(server: ServerProcess, name: str, requests: Sequence[Request]) -> list[Mapping[str, np.ndarray]]:
    """Send all requests, 16 at a time. Returns the answers."""
    places = asyncio.Semaphore(CALLERS)

    async def ask(client: triton.InferenceServerClient, request: Request) -> Mapping[str, np.ndarray]:
        inputs = []
        for key, array in request.inputs.items():
            tensor = triton.InferInput(key, array.shape, wire_datatype(array))
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        async with places:
            answer = await client.infer(name, inputs)
        return {key: answer.as_numpy(key) for key in request.expected}

    async with triton.InferenceServerClient(server.grpc) as client:
        return await asyncio.gather(*(ask(client, request) for request in requests))


@pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])
async def test_every_answer_is_that_of_onnx_runtime_to_the_request_alone(
    server: ServerProcess, model: Exported
) -> None:
    name = served_name(model)
    is_proven = model.verdict.outcome is Outcome.PROVEN
    shares_batches = is_proven and model.path.parent == CORPUS and model.name not in DECLARED_FIXED
    async with triton.InferenceServerClient(server.grpc) as client:
        metadata = await client.get_model_metadata(name)
        requests = make_requests(model, [output.name for output in metadata.outputs])
        for _ in range(10):  # on a busy machine the requests may arrive one by one
            answers = await ask_all(server, name, requests)
            statistics = (await client.get_inference_statistics(name)).model_stats[0]
            if not shares_batches or statistics.execution_count < statistics.inference_count:
                break
    datatypes = {output.name: DataType(output.datatype) for output in metadata.outputs}
    for request, answer in zip(requests, answers, strict=True):
        for key, array in answer.items():
            expected = request.expected[key]
            assert array.shape == expected.shape
            if datatypes[key] is DataType.BYTES:
                assert [each.decode() for each in array.flat] == [str(each) for each in expected.flat]
            else:
                assert agree(array, expected, datatypes[key]), key
    if shares_batches:
        assert statistics.execution_count < statistics.inference_count
