"""Operators that crash on empty tensors inside a model, or do not write their outputs then.

``python tests/support/empty_operands.py [OPERATOR ...]`` runs the ONNX node tests of these or all operators with
tensors that are empty along one axis, or along all axes of one size. Each tensor becomes empty in a Slice in front of
the operator, because the memory of an empty tensor inside a model differs from that of an empty input. Child processes
fill their heap with two patterns; ``GLIBC_TUNABLES=glibc.malloc.tcache_count=0`` turns off the cache that glibc leaves
as it is.
"""

import ctypes
import os
import pickle
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from onnx_node_cases import fetch_node_cases, read_node_cases

Arrays: TypeAlias = dict[str, np.ndarray]

_PATTERNS: Final = (0x55, 0xAB)
"""Memory is filled with their complements: a negative and a positive number, which differ in sums that saturate."""
_M_PERTURB: Final = -6
"""The number of the option of glibc's mallopt that fills memory."""
_MAX_SECONDS: Final = 10
_MAX_CPU_SECONDS: Final = 1
"""A Conv with an empty kernel does not return."""
_WHOLE: Final = {"from": np.array([0]), "to": np.array([2**40])}
"""Bounds of slices."""
_RANDOM: Final = frozenset({"Bernoulli", "Dropout", "Multinomial", "RandomNormalLike", "RandomUniformLike"})


def main() -> None:
    """Print each operator with its number of failures by kind."""
    found: Counter[tuple[str, str]] = Counter()
    for case in read_node_cases(fetch_node_cases()):
        given = {name: value for name, value in case.inputs.items() if isinstance(value, np.ndarray) and value.ndim}
        model = onnx.load(case.model)
        operators = {node.op_type for node in model.graph.node}
        wanted = not sys.argv[1:] or not operators.isdisjoint(sys.argv[1:])
        if not wanted or len(given) < len(case.inputs) or len(operators) > 1 or operators & _RANDOM:
            continue
        sliced = _behind_slices(model)
        for feeds in _empty(given):
            if kind := outcome(sliced, feeds | _WHOLE):
                found[next(iter(operators)), kind] += 1
    for (operator, kind), count in sorted(found.items()):
        print(f"{operator}: {kind} ({count})")


def _behind_slices(model: onnx.ModelProto) -> bytes:
    graph = model.graph
    del graph.value_info[:]
    slices = []
    for declared in (*graph.input, *graph.output):
        for dim in declared.type.tensor_type.shape.dim:
            dim.Clear()
    for declared in graph.input:
        slices.append(helper.make_node("Slice", [f"{declared.name}/whole", "from", "to"], [declared.name]))
        declared.name += "/whole"
    nodes = [*slices, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.input.extend(helper.make_tensor_value_info(name, TensorProto.INT64, [1]) for name in ("from", "to"))
    return bytes(model.SerializeToString())


def _empty(given: Mapping[str, np.ndarray]) -> Iterator[Arrays]:
    """Yield the inputs with one axis empty, and with all axes of one size empty."""
    axes = [(name, axis, size) for name, array in given.items() for axis, size in enumerate(array.shape) if size]
    chosen = [{(name, axis)} for name, axis, _ in axes]
    chosen += [{(name, axis) for name, axis, size in axes if size == one} for one in {size for *_, size in axes}]
    for empty in chosen:
        shapes = {n: [0 if (n, axis) in empty else size for axis, size in enumerate(a.shape)] for n, a in given.items()}
        yield {
            f"{name}/whole": given[name].reshape(-1)[: np.prod(shape)].reshape(shape) for name, shape in shapes.items()
        }


def outcome(model: bytes, feeds: Arrays) -> str:
    """How a run in a child process went wrong: ``unwritten``, or the name of the signal that ended the process.

    Empty if nothing went wrong, or if ONNX Runtime rejected the tensors.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_SECONDS, _MAX_CPU_SECONDS + 1))
            signal.alarm(_MAX_SECONDS)
            os.write(writer, pickle.dumps(_is_written(model, feeds)))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return "" if not answer or pickle.loads(answer) else "unwritten"


def _is_written(model: bytes, feeds: Arrays) -> bool:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    options.enable_cpu_mem_arena = False
    libc = ctypes.CDLL(None)
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        outputs = []
        for pattern in _PATTERNS:
            libc.mallopt(_M_PERTURB, pattern)
            outputs.append([np.asarray(output) for output in session.run(None, feeds)])
    except Exception:
        return True
    return all(one.dtype == object or one.tobytes() == other.tobytes() for one, other in zip(*outputs, strict=True))


if __name__ == "__main__":
    main()
