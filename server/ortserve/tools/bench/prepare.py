"""Prepares targets: inputs, encoded requests and expected outputs."""

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from ortserve.clock import monotonic_ns
from ortserve.core.batch import Arrays
from ortserve.core.conversion import Reshape
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import Tensor, agree, describe_difference, is_absent
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.load.inputs import InputGenerator
from ortserve.registry.load.interface import Interface, resolve_interface
from ortserve.tools.address import Address
from ortserve.tools.bench.result import OutputCheck
from ortserve.tools.bench.shared_memory import share_requests
from ortserve.tools.bench.target import ModelPlan, Plan, ServerPlan
from ortserve.tools.client import Client
from ortserve.tools.control import Control
from ortserve.tools.encoding import (
    Encoded,
    Outputs,
    decode_grpc,
    decode_rest,
    encode_shared,
    tensors_of,
)
from ortserve.tools.inputs import Inputs, SyntheticInputs, make_inputs, take_inputs
from ortserve.tools.opening import OpenModel, naming_failures, open_model
from ortserve.tools.subject import find_model

_PREPARE_S: Final = 10.0
"""Least time limit of calls before the load, and of the tries of all of them together."""
_REPEATED_S: Final = 5.0
"""Time after which no more inputs are run, so that slow targets are prepared with fewer different inputs."""
_TRIES: Final = 132
"""All tries of a call fail with a probability of one in a million if nine of ten requests fail."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A target that is ready to be measured.

    Attributes:
        target: The target as given.
        way: The protocol, or the kind of run.
        server: Name and version of the server; empty for a model in this process.
        batch: Rows of a request.
        plan: The plan of the generators' targets.
        origin: A description of the inputs.
        expected: The expected outputs of each of the inputs; empty if answers cannot be compared.
        expected_from: The source of these outputs, or why there are none.
        read: Decodes an answer, given its ticket number and body. Raises ServeError.
        control: Calls to the server; None for a model in this process.
    """

    target: str
    way: str
    server: str
    batch: int
    plan: Plan
    origin: str
    expected: Sequence[Outputs]
    expected_from: str
    read: Callable[[int, Any], Outputs]
    control: Control | None = None

    def check(self, bodies: Sequence[tuple[int, Any]]) -> OutputCheck | None:
        """Compare answers with the expected outputs. Returns None without answers. ``bodies`` are as in ``Chunk``."""
        if not self.expected:
            return OutputCheck(0, 0, self.expected_from, "")
        problems = []
        for number, body in bodies:
            try:
                problems.append(difference(self.expected[number % len(self.expected)], self.read(number, body)))
            except ServeError as error:
                problems.append(error.message)
        different = [problem for problem in problems if problem]
        return OutputCheck(len(bodies), len(different), self.expected_from, (different or [""])[0]) if bodies else None


def difference(expected: Outputs, got: Outputs) -> str:
    """The first difference from the expected outputs beyond the tolerance of their datatype; empty if there is none."""
    if missing := expected.keys() - got.keys():
        return f"the answer has no output '{min(missing)}'"
    for name, wanted in expected.items():
        came = got[name]
        if came.array.shape != wanted.array.shape or came.datatype is not wanted.datatype:
            texts = [f"{one.datatype.value}{list(one.array.shape)}" for one in (wanted, came)]
            return f"output '{name}': expected {texts[0]}, got {texts[1]}"
        if not agree(came.array, wanted.array, wanted.datatype, is_scaled=True):
            return f"output '{name}': {describe_difference(came.array, wanted.array, wanted.datatype)}"
    return ""


def repeated(
    run: Callable[[Arrays], Outputs], arrays: Sequence[Arrays], source: str
) -> tuple[Sequence[Outputs], Sequence[Outputs], str]:
    """Run each of the inputs twice, to find out whether equal inputs give equal outputs.

    If runs are slow, only as many inputs as run within ``_REPEATED_S``, at least one.

    Returns:
        The outputs of these inputs; the expected outputs, which are the same, or none if equal inputs give different
        outputs; and the source of the expected outputs, or why there are none.
    """
    outputs: list[Outputs] = []
    end_ns = monotonic_ns() + _REPEATED_S * 1e9
    for one in arrays:
        outputs.append(run(one))
        if monotonic_ns() > end_ns:
            break
    for first, one in zip(outputs, arrays, strict=False):
        if problem := difference(first, run(one)):
            return outputs, (), f"nothing, because {source} differ for equal inputs: {problem}"
    return outputs, outputs, source


def prepare_model(target: str, way: str, batch: int, given: Namespace) -> Prepared:
    """Prepare a model that runs in the generator's process.

    Raises:
        ServeError: The model, its inputs or the batch are wrong.
    """
    subject = find_model(target)
    if way == "batcher" and (what := subject.joint_requests):
        raise invalid_input(
            f"{target}: a model with {what} has no way 'batcher' here: measure its sessions, or a server"
        )
    model = open_model(subject, provider=given.provider, threads=given.threads)
    run = model.runner().run
    inputs, arrays = _inputs(model.signature, target, batch, given, lambda one: run(model.for_model(one)))
    outputs, expected, source = repeated(partial(bare_run, model), arrays, "bare runs")
    signature = model.signature
    if given.compare_outputs:
        outputs, expected, source = _compare_with(given.compare_outputs, signature, arrays, outputs, target)
    arrays = arrays[: len(outputs)]
    if way == "batcher":
        interface = resolve_interface(model.subject.options, signature)
        signature = interface.client
        arrays = tuple(as_clients_send(model, interface, one) for one in arrays)
        expected = [as_clients_see(interface, one) for one in expected]
    return Prepared(
        target=target,
        way=way,
        server="",
        batch=batch,
        plan=ModelPlan(subject, way, given.provider, given.threads, inputs=arrays, rows=batch),
        origin=inputs.origin,
        expected=expected,
        expected_from=source,
        read=lambda _, outputs: _named(signature, outputs),
    )


def prepare_server(address: Address, protocol: str, batch: int, given: Namespace, stack: ExitStack) -> Prepared:
    """Prepare a model on a server. Sends each request twice, and registers shared memory until the stack ends.

    Raises:
        ServeError: The server cannot be reached, is of another kind, or rejects the requests.
    """
    model, _, version = given.model.partition("/")
    limit_s = max(given.timeout_s, _PREPARE_S)  # a shorter limit is for the load alone, which counts late answers
    end_ns = monotonic_ns() + int(limit_s * 1e9)
    control = Control(address, model, version, limit_s)
    server, signature = control.describe()
    if given.sequences is None and control.has_sequences():
        raise invalid_input(
            f"--sequences: expected the requests of each sequence, as '{model}' has sequences, got none"
        )
    base = int.from_bytes(os.urandom(5)) << 20  # sequence ids differ between measurements
    length = given.sequences or 0

    def encode(tensors: Sequence[Tensor], sequence: int = 0, *, is_start: bool = True, is_end: bool = True) -> Encoded:
        part = {"sequence_id": base + sequence, "sequence_start": is_start, "sequence_end": is_end}
        return control.encode(tensors, part if length else None, is_binary=protocol != "rest")

    def ask(one: Arrays) -> Outputs:
        send = partial(control.infer, encode(tensors_of(signature, one)))
        return _retried(send, end_ns) if given.allow_errors else send()

    try:
        inputs, arrays = _inputs(signature, model, batch, given, ask)
        answers, expected, source = repeated(ask, arrays, "the server's answers to single requests")
    except _NoAnswerError as error:
        if protocol == "shm":  # answers tell the sizes of the outputs
            raise
        inputs, arrays = _inputs(signature, model, batch, given, None)
        answers, expected, source = (), (), f"nothing, because a request before the load failed: {error.message}"
    read: Callable[[int, Any], Outputs] = _decode
    origin = inputs.origin
    if length:
        origin = f"{origin}; in sequences of {length} requests"
        expected, source = (), "nothing, because answers depend on earlier requests of a sequence"
    if given.compare_outputs and answers:
        answers, expected, source = _compare_with(given.compare_outputs, signature, arrays, answers, address.url)
    tensors = [tensors_of(signature, one) for one in (arrays[: len(answers)] if answers else arrays)]
    if protocol == "shm":
        memory = stack.enter_context(share_requests(control, tensors, answers))
        requests = [encode_shared(model, version, *pair, is_grpc=address.is_grpc) for pair in memory.places]
        read = memory.read
    elif length:
        requests = [
            encode(tensors[caller % len(tensors)], 1 + caller, is_start=is_start, is_end=is_end)
            for caller in range(max(given.concurrency or [1]))
            for is_start, is_end in ((True, length == 1), (False, False), (length == 1, True))
        ]
    else:
        requests = list(map(encode, tensors))
    plan = ServerPlan(
        address=address,
        requests=tuple(_message(control, request) for request in requests),
        is_stream=protocol == "grpc-stream",
        max_connections=given.connections,
        sequence_length=length,
    )
    return Prepared(
        target=address.url,
        way=protocol,
        server=server,
        batch=batch,
        plan=plan,
        origin=origin,
        expected=expected,
        expected_from=source,
        read=read,
        control=control,
    )


def _compare_with(
    name: str, signature: ModelSignature, arrays: Sequence[Arrays], answers: Sequence[Outputs], target: str
) -> tuple[Sequence[Outputs], Sequence[Outputs], str]:
    """Run the model of ``--compare-outputs`` on the inputs of a target's answers.

    Returns:
        As ``repeated``: the answers for whose inputs there was time, the expected outputs, and their source.

    Raises:
        ServeError: The model has other inputs, cannot be run, or gives other outputs than the target.
    """
    reference = open_model(find_model(name))
    names, expects = ([spec.name for spec in one.inputs] for one in (signature, reference.signature))
    if sorted(names) != sorted(expects):
        problem = f"expected a model with the inputs {', '.join(names)}, got {', '.join(expects)}"
        raise invalid_input(f"--compare-outputs {name}: {problem}")
    ordered = [tuple(one[names.index(own)] for own in expects) for one in arrays[: len(answers)]]
    outputs, right, source = repeated(partial(bare_run, reference), ordered, name)
    answers = answers[: len(outputs)]
    expected = [_common(*pair) for pair in zip(right, answers, strict=True)] if right else ()
    for wanted, came in zip(expected, answers, strict=False):
        if problem := difference(wanted, came):
            raise ServeError(ErrorKind.INTERNAL, f"{target}: not the outputs of {source}: {problem}")
    return answers, expected, source


def _decode(_: int, body: tuple[bytes, int | None] | bytes) -> Outputs:
    """As ``Prepared.read``: of gRPC's message, or of the bytes of a REST answer and the size of the JSON in them."""
    return decode_grpc(body) if isinstance(body, bytes) else decode_rest(*body)


class _NoAnswerError(ServeError):
    """All tries of a call failed, on a server on which requests may fail."""


def _retried(call: Callable[[], Outputs], end_ns: int) -> Outputs:
    """Make a call on which a server may fail. Tries begin until ``end_ns``. What the model rejects is not repeated."""
    for left in reversed(range(_TRIES)):
        try:
            return call()
        except ServeError as error:
            if error.kind is ErrorKind.REJECTED_BY_MODEL:
                raise
            if not left or monotonic_ns() > end_ns:
                raise _NoAnswerError(error.kind, error.message) from None
    raise AssertionError


def _inputs(
    signature: ModelSignature, name: str, batch: int, given: Namespace, run: Callable[[Arrays], Any] | None
) -> tuple[Inputs, tuple[Arrays, ...]]:
    """The source of inputs, and the inputs of each request. ``run`` is as in ``make_inputs``."""
    if batch > 1 and not signature.is_batched:
        raise invalid_input(f"--batch: expected 1 for '{name}', got {batch}: {signature.unbatched_because}")
    inputs: Inputs = (
        make_inputs(signature, given.inputs, run)
        if given.free_dim is None or given.inputs
        else SyntheticInputs(InputGenerator(signature, None, free_dim=given.free_dim))
    )
    return inputs, take_inputs(inputs, batch)


def as_clients_send(model: OpenModel, interface: Interface, arrays: Arrays) -> Arrays:
    """Convert inputs with their rows on axis 0 to the order and shapes of requests."""
    names = [spec.name for spec in model.signature.inputs]
    own = dict(zip(names, model.for_model(arrays), strict=True))
    pairs = zip(interface.model.inputs, interface.client.inputs, strict=True)
    return tuple(_reshaped(own[spec.name], spec, seen) for spec, seen in pairs)


def as_clients_see(interface: Interface, outputs: Outputs) -> Outputs:
    """Convert the outputs of a bare run to the shapes of answers."""
    pairs = zip(interface.model.outputs, interface.client.outputs, strict=True)
    arrays = {spec.name: _reshaped(outputs[spec.name].array, spec, seen) for spec, seen in pairs}
    return {name: Tensor(name, outputs[name].datatype, array) for name, array in arrays.items()}


def _reshaped(array: np.ndarray, own: TensorSpec, seen: TensorSpec) -> np.ndarray:
    if own.shape == seen.shape or is_absent(array):
        return array
    return Reshape(own.shape[own.leading :], seen.shape[seen.leading :], own.leading).apply(array)


def bare_run(model: OpenModel, arrays: Arrays) -> Outputs:
    """Run inputs with their rows on axis 0. Raises ServeError as ``naming_failures``."""
    with naming_failures(model.subject.path):
        return _named(model.signature, model.runner().run(model.for_model(arrays)))


def _named(signature: ModelSignature, outputs: Sequence[np.ndarray]) -> Outputs:
    pairs = zip(signature.outputs, outputs, strict=True)
    return {spec.name: Tensor(spec.name, spec.datatype, output) for spec, output in pairs}


def _common(outputs: Outputs, answer: Outputs) -> Outputs:
    """The outputs that the answer has, too, as a server may serve only some; all if it has none of them."""
    return {name: tensor for name, tensor in outputs.items() if name in answer} or outputs


def _message(control: Control, request: Encoded) -> bytes:
    """The bytes to send over the connection."""
    address, size = control.address, len(request.body)
    if address.is_grpc:
        return b"\0" + size.to_bytes(4, "big") + request.body
    return Client(address).prepare(f"{control.path}/infer", request.body, request.headers)
