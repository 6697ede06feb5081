"""What to measure, made ready: inputs, requests as bytes, the outputs to expect, and shared memory."""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from ortserve.codecs.binary_tensor import decode_binary_tensor, encode_binary_tensor
from ortserve.core.batch import Arrays
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import Tensor, agree, describe_difference
from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.load.inputs import InputGenerator
from ortserve.tools.bench.encoding import (
    Encoded,
    Place,
    decode_grpc,
    decode_rest,
    encode_grpc,
    encode_places,
    encode_rest,
    nbytes,
    tensors_of,
)
from ortserve.tools.bench.plans import GrpcPlan, HttpPlan, ModelPlan, Plan
from ortserve.tools.bench.result import OutputCheck
from ortserve.tools.bench.server import Address, Control, connect, model_path
from ortserve.tools.inputs import Inputs, SyntheticInputs, choose_inputs, make_inputs
from ortserve.tools.opening import OpenModel, open_model
from ortserve.tools.subject import find_model

_MOST_INPUTS: Final = 16
_MOST_BYTES: Final = 64 * 2**20
"""Of all prepared inputs of a target."""

Outputs = Mapping[str, Tensor]
Read = Callable[[int, Any], Outputs]
"""Reads an answer that was looked at, by its number. Raises ServeError."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the arguments say about requests, for all targets."""

    model: str = ""
    version: str = ""
    inputs: Path | None = None
    free_dim: int | None = None
    timeout_s: float = 10.0
    most_connections: int = 512
    provider: str | None = None
    threads: int | None = None
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A target that is ready to be measured.

    Attributes:
        target: As given.
        way: The protocol or kind of run.
        server: Its name and version; empty in this process.
        batch: Rows of a request.
        model: Its name on the server; empty in this process.
        version: Of the model; empty for the server's choice.
        plan: For the generators.
        origin: Of the inputs.
        expected: Outputs of each of the inputs, and where they come from.
        read: Reads an answer.
        control: Calls to the server; None in this process.
        address: Of the server; None in this process.
    """

    target: str
    way: str
    server: str
    batch: int
    model: str
    version: str
    plan: Plan
    origin: str
    expected: Sequence[Outputs]
    expected_from: str
    read: Read
    control: Control | None = None
    address: Address | None = None

    @property
    def key(self) -> str:
        """Equal for equal plans."""
        return f"{self.target} {self.way} {self.batch}"

    def check(self, bodies: Sequence[tuple[int, Any]]) -> OutputCheck | None:
        """Compare answers with what was expected; None if there are none."""
        different, example = 0, ""
        for number, body in bodies:
            try:
                problem = difference(self.expected[number % len(self.expected)], self.read(number, body))
            except ServeError as error:
                problem = error.message
            if problem:
                different += 1
                example = example or problem
        return OutputCheck(len(bodies), different, self.expected_from, example) if bodies else None


def difference(expected: Outputs, got: Outputs) -> str:
    """How outputs differ from the expected ones beyond the tolerance of their datatype; empty if they do not."""
    if missing := expected.keys() - got.keys():
        return f"the answer has no output '{min(missing)}'"
    for name, wanted in expected.items():
        came = got[name]
        if came.array.shape != wanted.array.shape or came.datatype is not wanted.datatype:
            return (
                f"output '{name}': expected {wanted.datatype.value}{list(wanted.array.shape)}, "
                f"got {came.datatype.value}{list(came.array.shape)}"
            )
        if not agree(came.array, wanted.array, wanted.datatype, is_scaled=True):
            return f"output '{name}': {describe_difference(came.array, wanted.array, wanted.datatype)}"
    return ""


def prepare_model(target: str, way: str, batch: int, options: Options) -> Prepared:
    """A model in the generator's process.

    Raises:
        ServeError: The model, its inputs or the batch are wrong.
    """
    model = open_model(find_model(target), provider=options.provider, threads=options.threads)
    signature = model.signature
    _check_batch(signature, batch, target)
    if options.free_dim is None:
        inputs = choose_inputs(model, options.inputs)
    else:
        inputs = SyntheticInputs(replace(InputGenerator(signature, None), free_dim=options.free_dim))
    arrays = _take(inputs, batch)

    def read(_: int, outputs: Sequence[np.ndarray]) -> Outputs:
        pairs = zip(signature.outputs, outputs, strict=True)
        return {spec.name: Tensor(spec.name, spec.datatype, output) for spec, output in pairs}

    plan = ModelPlan(target, way, options.provider, options.threads, arrays, batch)
    expected = _bare_runs(model, arrays)
    return Prepared(target, way, "", batch, "", "", plan, inputs.origin, expected, "bare runs", read)


@contextmanager
def prepare_server(address: Address, protocol: str, batch: int, options: Options) -> Iterator[Prepared]:
    """A model on a server. Sends each of the requests once. Registers shared memory while the block runs.

    Raises:
        ServeError: The server cannot be reached, is of another kind, or rejects the requests.
    """
    model, version = options.model, options.version
    control = connect(address, options.timeout_s)
    described = control.describe(model, version)
    signature = described.signature
    _check_batch(signature, batch, model)

    def encode(tensors: Sequence[Tensor]) -> Encoded:
        if address.is_grpc:
            return encode_grpc(model, version, tensors)
        return encode_rest(tensors, is_binary=protocol != "rest")

    def ask(arrays: Arrays) -> Outputs:
        request = encode(tensors_of(signature, arrays))
        body, json_size = control.infer(model, version, request.headers, request.body)
        return decode_grpc(body) if address.is_grpc else decode_rest(body, json_size)

    if options.free_dim is None:
        inputs = make_inputs(signature, options.inputs, ask)
    else:
        inputs = SyntheticInputs(replace(InputGenerator(signature, None), free_dim=options.free_dim))
    arrays = _take(inputs, batch)
    answers = [ask(one) for one in arrays]
    expected, source = answers, "lone answers of the server"
    if options.reference:
        runs = _bare_runs(open_model(find_model(options.reference)), arrays)
        expected, source = [_common(run, answer) for run, answer in zip(runs, answers, strict=True)], options.reference
        for wanted, came in zip(expected, answers, strict=True):
            if problem := difference(wanted, came):
                raise ServeError(
                    ErrorKind.INTERNAL, f"{address.url}: not the outputs of {options.reference}: {problem}"
                )
    all_tensors = [tensors_of(signature, one) for one in arrays]
    with contextlib.ExitStack() as stack:
        if protocol == "shm":
            region = stack.enter_context(_shared(control, all_tensors, answers))
            requests = [region.encode(model, version, index, is_grpc=address.is_grpc) for index in range(len(arrays))]
            read: Read = lambda number, _: region.outputs(number % len(arrays))  # noqa: E731
        else:
            requests = [encode(tensors) for tensors in all_tensors]
            read = (lambda _, body: decode_grpc(body)) if address.is_grpc else (lambda _, body: decode_rest(*body))
        plan = _plan(address, protocol, requests, options)
        about = (address.url, protocol, described.server, batch, model, version)
        yield Prepared(*about, plan, inputs.origin, expected, source, read, control, address)


def _common(outputs: Outputs, answer: Outputs) -> Outputs:
    """The outputs that a server has, too: it may serve some only. All, if it has none of them."""
    return {name: tensor for name, tensor in outputs.items() if name in answer} or outputs


def _bare_runs(model: OpenModel, inputs: Sequence[Arrays]) -> list[Outputs]:
    """The outputs of a model by bare runs, for each of the inputs."""
    runner, specs = model.runner(), model.signature.outputs
    results: list[Outputs] = []
    for arrays in inputs:
        try:
            outputs = runner.run(model.for_model(arrays))
        except ORT_ERRORS as error:
            message = f"{model.subject.path}: {without_paths(str(error))}"
            raise ServeError(ErrorKind.REJECTED_BY_MODEL, message) from None
        pairs = zip(specs, outputs, strict=True)
        results.append({spec.name: Tensor(spec.name, spec.datatype, output) for spec, output in pairs})
    return results


def _plan(address: Address, protocol: str, requests: Sequence[Encoded], options: Options) -> Plan:
    ca = str(address.ca) if address.ca else None
    if address.is_grpc:
        bodies = tuple(request.body for request in requests)
        metadata = tuple(address.headers.items())
        return GrpcPlan(
            address.authority,
            address.is_tls,
            ca,
            metadata,
            bodies,
            protocol == "grpc-stream",
            options.timeout_s,
            options.most_connections,
        )
    path = f"{model_path(options.model, options.version)}/infer"
    whole = []
    for request in requests:
        headers = {"host": address.authority, **address.headers, **request.headers}
        headers["content-length"] = str(len(request.body))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        whole.append(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + request.body)
    return HttpPlan(address.host, address.port, address.is_tls, ca, tuple(whole), options.most_connections)


def _check_batch(signature: ModelSignature, batch: int, name: str) -> None:
    if batch > 1 and not signature.is_batched:
        raise invalid_input(f"--batch: expected 1 for '{name}', got {batch}: {signature.unbatched_because}")


def _take(inputs: Inputs, batch: int) -> tuple[Arrays, ...]:
    """Different inputs, as many as fit the memory."""
    first = inputs.take(batch, 0)
    count = max(1, min(_MOST_INPUTS, _MOST_BYTES // max(1, sum(array.nbytes for array in first))))
    return (first, *(inputs.take(batch, number) for number in range(1, count)))


@dataclass(slots=True)
class _Region:
    """One object of shared memory with the inputs and outputs of all requests.

    Requests that are under way at the same time with the same inputs write the same outputs to the same place.
    """

    memory: mmap.mmap
    tensors: Sequence[Sequence[Tensor]]
    answers: Sequence[Outputs]
    inputs: list[dict[str, Place]] = field(default_factory=list)
    places: list[dict[str, Place]] = field(default_factory=list)

    def encode(self, model: str, version: str, index: int, *, is_grpc: bool) -> Encoded:
        return encode_places(
            model, version, self.tensors[index], self.inputs[index], self.places[index], is_grpc=is_grpc
        )

    def outputs(self, index: int) -> Outputs:
        return {
            name: Tensor(
                name,
                one.datatype,
                decode_binary_tensor(self._read(name, index), one.datatype, one.array.shape, name, ""),
            )
            for name, one in self.answers[index].items()
        }

    def _read(self, name: str, index: int) -> bytes:
        place = self.places[index][name]
        return self.memory[place.offset : place.offset + place.nbytes]


@contextmanager
def _shared(control: Control, tensors: Sequence[Sequence[Tensor]], answers: Sequence[Outputs]) -> Iterator[_Region]:
    name = f"ortserve_bench_{os.getpid()}"
    path = Path("/dev/shm") / name  # noqa: S108 - where POSIX shared memory is on Linux
    all_parts = [[*inputs, *outputs.values()] for inputs, outputs in zip(tensors, answers, strict=True)]
    sizes = [-(-nbytes(tensor) // 64) * 64 or 64 for parts in all_parts for tensor in parts]
    offsets = iter([0, *accumulate(sizes)])
    try:
        with path.open("x+b") as file:
            file.truncate(sum(sizes))
            memory = mmap.mmap(file.fileno(), sum(sizes))
    except OSError as error:
        raise ServeError(ErrorKind.UNSUPPORTED, f"{path}: no shared memory: {error.strerror}") from None
    region = _Region(memory, tensors, answers)
    try:
        for inputs, outputs in zip(tensors, answers, strict=True):
            region.inputs.append({one.name: Place(name, next(offsets), nbytes(one)) for one in inputs})
            region.places.append({one.name: Place(name, next(offsets), nbytes(one)) for one in outputs.values()})
            for one in inputs:
                place = region.inputs[-1][one.name]
                data = bytes(encode_binary_tensor(one.array, one.datatype))
                memory[place.offset : place.offset + place.nbytes] = data
        control.register(name, f"/{name}", sum(sizes))
        try:
            yield region
        finally:
            with contextlib.suppress(ServeError):
                control.unregister(name)
    finally:
        path.unlink(missing_ok=True)


def prepare(
    target: str, address: Address | None, way: str, batch: int, options: Options
) -> AbstractContextManager[Prepared]:
    """A server's model, or one in this process if there is no address."""
    if address is not None:
        return prepare_server(address, way, batch, options)
    return cast("AbstractContextManager[Prepared]", contextlib.nullcontext(prepare_model(target, way, batch, options)))
