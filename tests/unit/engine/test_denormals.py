"""Runs that flush denormal numbers to 0. The process's first session differs, so sessions run in separate processes.

As a script, this file is such a process.
"""

import json
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from ortserve.config.session import SessionSettings
from ortserve.core.batch import Batch, BatchResult
from ortserve.engine.denormals import FenvLayout, ThreadDenormals, fenv_layout, session_maker
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import ErrorKind, ServeError

LAYOUT: Final = fenv_layout(platform.machine(), platform.libc_ver()[0])
needs_layout: Final = pytest.mark.skipif(LAYOUT is None, reason="this machine cannot take denormals as 0")

ROWS: Final = (1, 500)
"""Rows of batches; the threads of a session share the larger one."""
RUNS: Final = 3
"""Runs of each session: the first is plain, later ones of small batches use bound buffers."""
AS_ZERO: Final = SessionSettings(denormal_as_zero=True)
SETTINGS: Final = {
    "with": AS_ZERO,
    "with, by its entry": SessionSettings(entries={"session.set_denormal_as_zero": 1}),
    "with, but for its entry": SessionSettings(denormal_as_zero=True, entries={"session.set_denormal_as_zero": 0}),
    "with, in parallel": SessionSettings(denormal_as_zero=True, execution_mode="parallel", inter_op_threads=2),
    "without": SessionSettings(),
    "without, in parallel": SessionSettings(execution_mode="parallel", inter_op_threads=2),
}
WITHOUT: Final = ("with, but for its entry", "without", "without, in parallel")


def write_squares(path: Path) -> Path:
    """Two branches: x FP32 [batch, 1024] → y and z FP32 [batch, 1024]: x², -x² and a constant's square."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 1024]) for name in "xyz"]
    tiny = helper.make_tensor("tiny", TensorProto.FLOAT, [1024], [1e-20] * 1024)
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["y"]),
        helper.make_node("Neg", ["x"], ["negative"]),
        helper.make_node("Mul", ["tiny", "tiny"], ["constant"]),
        helper.make_node("Mul", ["negative", "x"], ["product"]),
        helper.make_node("Sub", ["product", "constant"], ["z"]),
    ]
    graph = helper.make_graph(nodes, "g", tensors[:1], tensors[1:], initializer=[tiny])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def are_zero_here() -> bool:
    """Whether the calling thread treats denormals as 0."""
    return sys.float_info.min / 2 == 0


def shares_of_zeros(instance: Instance, *, on_worker: bool) -> list[float]:
    """The shares of zeros in the outputs of runs."""
    shares = set()
    for rows in ROWS:
        batch = Batch(((np.full((rows, 1024), 1e-20, np.float32),),), rows, rows)
        for _ in range(RUNS):
            outcome: BatchResult | Exception
            if on_worker:
                outcomes: queue.SimpleQueue[BatchResult | Exception] = queue.SimpleQueue()
                instance.start(batch, outcomes.put)
                outcome = outcomes.get(timeout=30)
            else:
                outcome = instance.run(batch)
            assert isinstance(outcome, BatchResult)
            shares |= {float((output == 0).mean()) for output in outcome.outputs}
    return sorted(shares)


def main(path: str, *named: str) -> None:
    """Open the model with each of these settings on one thread, then run all sessions. Prints the results."""
    instances: dict[str, Instance] = {}
    found: dict[str, Any] = {}

    def load() -> None:
        for name in named:
            for threads in (1, 2):
                session = open_session(Path(path), "m", SessionOptions(ProviderChoice(CPU), threads, SETTINGS[name]))
                signature = read_signature(session)
                instances[f"{name}: {threads}"] = Instance(
                    session, signature, name="m", intra_op_threads=threads, clock=time.monotonic_ns
                )
        found["loader"] = are_zero_here()

    loader = threading.Thread(target=load)
    loader.start()
    loader.join()
    for name, instance in instances.items():
        found[name] = [shares_of_zeros(instance, on_worker=on_worker) for on_worker in (False, True, False)]
        found[f"the caller after {name}"] = are_zero_here()
    sys.stdout.write(json.dumps(found))


@needs_layout
@pytest.mark.parametrize("named", [tuple(SETTINGS), tuple(reversed(SETTINGS))], ids=["with first", "without first"])
def test_denormals_are_flushed_in_all_threads_of_the_configured_model_only(
    tmp_path: Path, named: tuple[str, ...]
) -> None:
    path = write_squares(tmp_path / "model.onnx")
    ran = subprocess.run([sys.executable, "-P", __file__, path, *named], stdout=subprocess.PIPE, check=True, timeout=60)
    expected: dict[str, Any] = {"loader": False}
    for name in named:
        share = 0.0 if name in WITHOUT else 1.0
        for threads in (1, 2):
            expected |= {f"{name}: {threads}": [[share]] * 3, f"the caller after {name}: {threads}": False}
    assert json.loads(ran.stdout) == expected


@pytest.fixture
def denormals() -> ThreadDenormals:
    assert LAYOUT is not None
    return ThreadDenormals(LAYOUT)


@needs_layout
def test_denormals_are_flushed_only_in_the_thread_and_scope(denormals: ThreadDenormals) -> None:
    elsewhere: queue.SimpleQueue[bool] = queue.SimpleQueue()
    begin = threading.Event()

    def report() -> None:
        begin.wait()
        elsewhere.put(are_zero_here())

    other = threading.Thread(target=report)
    other.start()
    with denormals.as_zero():
        assert are_zero_here()
        assert not np.any(np.full(4, 1e-20, np.float32) ** 2)
        begin.set()
        assert not elsewhere.get(timeout=30)
        with denormals.as_zero():
            pass
        assert are_zero_here()
    assert not are_zero_here()
    other.join()


def run_arrays(session: ort.InferenceSession, x: np.ndarray) -> np.ndarray:
    (output,) = session.run(["y"], {"x": x})
    return np.asarray(output)


def run_ort_values(session: ort.InferenceSession, x: np.ndarray) -> np.ndarray:
    (output,) = session.run_with_ort_values(["y"], {"x": ort.OrtValue.ortvalue_from_numpy(x)})
    return np.asarray(output.numpy())


def run_binding(session: ort.InferenceSession, x: np.ndarray) -> np.ndarray:
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    (output,) = binding.copy_outputs_to_cpu()
    return np.asarray(output)


@needs_layout
@pytest.mark.parametrize("run", [run_arrays, run_ort_values, run_binding])
def test_every_run_flushes_denormals_and_restores_the_thread(
    tmp_path: Path, run: Callable[[ort.InferenceSession, np.ndarray], np.ndarray]
) -> None:
    make = session_maker(AS_ZERO, has_global_threads=False)
    session = make(str(write_squares(tmp_path / "model.onnx")), providers=[CPU])
    assert not run(session, np.full((1, 1024), 1e-20, np.float32)).any()
    assert not are_zero_here()
    with pytest.raises(Exception, match="invalid dimensions"):
        run(session, np.zeros((1, 3), np.float32))
    assert not are_zero_here()


@needs_layout
def test_thread_is_restored_when_a_model_fails_to_open(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    make = session_maker(AS_ZERO, has_global_threads=False)
    with pytest.raises(Exception, match="failed"):
        make(str(tmp_path / "model.onnx"), providers=[CPU])
    assert not are_zero_here()


def test_session_without_the_setting_is_a_plain_session() -> None:
    assert session_maker(SessionSettings(), has_global_threads=True) is ort.InferenceSession


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("with", "session.denormal_as_zero"),
        ("with, by its entry", "session.entries: session.set_denormal_as_zero"),
    ],
)
def test_shared_threads_reject_the_denormal_setting(tmp_path: Path, name: str, key: str) -> None:
    options = SessionOptions(ProviderChoice(CPU), 2, SETTINGS[name], has_global_threads=True)
    with pytest.raises(ServeError, match=f"^{key}: expected false, because the server uses global_threads$") as caught:
        open_session(write_squares(tmp_path / "model.onnx"), "m", options)
    assert caught.value.kind is ErrorKind.INVALID_INPUT


@pytest.mark.parametrize(
    ("machine", "libc", "expected"),
    [
        ("x86_64", "glibc", FenvLayout(words=8, word=7, bits=0x8040)),
        ("aarch64", "glibc", FenvLayout(words=2, word=0, bits=0x1000000)),
        ("x86_64", "", None),
        ("ppc64le", "glibc", None),
        ("arm64", "", None),
    ],
)
def test_layout_is_known_for_machines_with_glibc(machine: str, libc: str, expected: FenvLayout | None) -> None:
    assert fenv_layout(machine, libc) == expected


@pytest.mark.parametrize(
    ("machine", "libc", "expected_error"),
    [
        ("ppc64le", "glibc", "this is ppc64le with glibc"),
        ("x86_64", "", "this is x86_64 with another C library"),
    ],
)
def test_unsupported_machine_is_an_error(
    monkeypatch: pytest.MonkeyPatch, machine: str, libc: str, expected_error: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))
    assert session_maker(SessionSettings(), has_global_threads=False) is ort.InferenceSession
    with pytest.raises(ServeError, match=expected_error) as caught:
        session_maker(AS_ZERO, has_global_threads=False)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert "expected false, because it needs x86_64 or aarch64 with glibc" in caught.value.message


if __name__ == "__main__":
    main(*sys.argv[1:])
