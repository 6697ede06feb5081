"""Arms of ``advice.py``: each opens a model in a separate process as the server would, and measures its runs.

``python loadtests/advice_arms.py`` starts such a process. It reads pickled requests from standard input and writes
pickled results to standard output. It waits between requests, so that two processes can be measured in turns.
"""

import gc
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

Arrays = Mapping[str, np.ndarray]
_MIN_RUNS: Final = 3
"""Minimum number of runs per block, except that of several sizes or sessions a single run of each suffices."""
_WARM_UP_S: Final = 0.02
"""Warm-up before each block: after a wait, a process is slower for its first milliseconds."""
_LIMIT_S: Final = 120


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of running a model.

    Attributes:
        options: Contents of ``model.yaml``, in addition to ``intra_op_threads: 1``.
        variant: Form of the model's file, a key of ``advice_files.VARIANTS``.
        environment: Environment variables of the process.
        rows: Rows of a run. With several sizes, a run executes all of them in order.
        pause_ms: Pause before each run.
        copies: Number of open sessions of the model. A run uses all of them, one after another.
        callers: Number of threads that run the model concurrently.
        opens: Number of preceding opens, to measure the time of opening.
        scale: Factor of floating-point inputs.
        is_bound: Whether inputs and outputs stay bound to their memory.
        has_global_threads: The server's option ``global_threads``.
        same_as_requested: Whether the shared arena grows by the requested size instead of by powers of two.
        beside_busy: Whether another process keeps a processor busy.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    variant: str = "source"
    environment: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[int] = (1,)
    pause_ms: float = 0
    copies: int = 1
    callers: int = 1
    opens: int = 0
    scale: float = 1
    is_bound: bool = False
    has_global_threads: bool = False
    same_as_requested: bool = False
    beside_busy: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """A model open in another process: its outputs for fixed inputs, and the time in ms to open it."""

    outputs: Sequence[np.ndarray]
    open_ms: float


@dataclass(frozen=True, slots=True)
class Block:
    """A series of runs: wall time of each in ms, CPU time per run in ms."""

    wall_ms: Sequence[float]
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class Kept:
    """Resources of the process after its runs: growth of anonymous memory in MiB since before opening, and threads."""

    mib: float
    threads: int


class ArmProcess:
    """The parent's handle of an arm's process."""

    def __init__(self, arm: Arm, model: Path) -> None:
        """Start the process. ``model`` is the folder ``REPOSITORY/name``."""
        environment = {"ORT_DISABLE_TELEMETRY": "1"} | dict(arm.environment)
        self._child = subprocess.Popen(
            [sys.executable, __file__], env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._arm, self._model = arm, model

    def open(self) -> Opened:
        """Open the model, and run it a few times."""
        opened: Opened = self._ask((self._arm, self._model))
        return opened

    def run(self, seconds: float) -> Block:
        """Run the model for about ``seconds``."""
        block: Block = self._ask(seconds)
        return block

    def end(self) -> Kept:
        """End the process. Returns the resources that it held."""
        kept: Kept = self._ask(None)
        self.close()
        return kept

    def close(self) -> None:
        """End the process at once. May be called twice."""
        self._child.kill()
        self._child.communicate()

    def _ask(self, request: object) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        pickle.dump(request, self._child.stdin)
        self._child.stdin.flush()
        try:
            return pickle.load(self._child.stdout)
        except EOFError:
            raise RuntimeError(f"an arm ended with status {self._child.wait(_LIMIT_S)}") from None


@contextmanager
def arms_of(arms: Sequence[Arm], models: Sequence[Path]) -> Iterator[list[ArmProcess]]:
    """Start the processes of all arms at the same time; they end with the block."""
    started: list[ArmProcess] = []
    try:
        for arm, model in zip(arms, models, strict=True):
            started.append(ArmProcess(arm, model))
        yield started
    finally:
        for one in started:
            one.close()


def _memory_mib() -> float:
    """Anonymous memory of this process in MiB. Mapped files are excluded, because sessions share them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def inputs_for(session: Any, rows: int, scale: float = 1) -> dict[str, np.ndarray]:
    """Inputs of a session that depend only on the number of rows: floats from N(0, scale), integers from 0 to 31."""
    random = np.random.default_rng(rows)
    arrays: dict[str, np.ndarray] = {}
    for one in session.get_inputs():
        shape = (rows, *(size if isinstance(size, int) else 16 for size in one.shape[1:]))
        if one.type == "tensor(float)":
            arrays[one.name] = random.standard_normal(shape, np.float32) * np.float32(scale)
        else:
            arrays[one.name] = random.integers(0, 32, shape)
    return arrays


class _Measured:
    """The model inside the arm's process."""

    def __init__(self, arm: Arm, path: Path) -> None:
        from ortserve.engine.runtime import Runtime

        self._arm = arm
        self._runtime = Runtime(global_threads=arm.has_global_threads)
        if arm.same_as_requested:
            self._share_arena_that_grows_as_requested()
        gc.collect()
        self._before_mib = _memory_mib()
        times = []
        for _ in range(arm.opens):
            began = time.perf_counter()
            session = self._open(path)
            times.append(time.perf_counter() - began)
            del session
            gc.collect()
        self._sessions = [self._open(path) for _ in range(arm.copies)]
        self._callers = ThreadPoolExecutor(arm.callers)
        self._runs = [self._runner(session, rows) for rows in arm.rows for session in self._sessions]
        outputs = self._sessions[0].run(None, inputs_for(self._sessions[0], max(arm.rows), arm.scale))
        self.opened = Opened([np.array(one) for one in outputs], float(np.median(times[1:])) * 1e3 if times else 0)
        self._timed_run()  # the first run allocates memory

    def _open(self, path: Path) -> Any:
        """Open the model as the server does, with its ``model.yaml``."""
        from ortserve.engine.providers import choose_provider
        from ortserve.engine.session import SessionOptions, open_session
        from ortserve.tools.opening import usual_threads
        from ortserve.tools.subject import find_model

        subject = find_model(str(path))
        options = subject.options
        if options.session.shared_arena:
            self._runtime.share_arena()
        choice = choose_provider(options.execution_providers)
        threads = options.intra_op_threads or usual_threads(choice, options.session)
        opening = SessionOptions(choice, threads, options.session, has_global_threads=self._runtime.has_global_threads)
        return open_session(subject.path, subject.name, opening)

    def _share_arena_that_grows_as_requested(self) -> None:
        """Replace the server's shared arena. The server has no such option, because the gain is small or negative."""
        import onnxruntime as ort

        memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"arena_extend_strategy": 1}))
        self._runtime._has_shared_arena = True

    def _runner(self, session: Any, rows: int) -> Callable[[], object]:
        from ortserve.engine.runs import run_options

        arrays = inputs_for(session, rows, self._arm.scale)
        names = [one.name for one in session.get_outputs()]
        if not self._arm.is_bound:
            options = run_options(self._settings())
            return lambda: session.run(names, arrays, options)
        binding = session.io_binding()
        for name, array in arrays.items():
            binding.bind_cpu_input(name, array)
        for name in names:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        for name, value in zip(names, binding.get_outputs(), strict=True):
            binding.bind_ortvalue_output(name, value)
        return lambda: session.run_with_iobinding(binding)

    def _settings(self) -> Any:
        from ortserve.config.model import ModelOptions

        return ModelOptions.model_validate(self._arm.options).session

    def _timed_run(self, _: int = 0) -> float:
        if self._arm.pause_ms:
            time.sleep(self._arm.pause_ms / 1e3)
        began = time.perf_counter()
        for run in self._runs:
            run()
        return time.perf_counter() - began

    def run(self, seconds: float) -> Block:
        """Run the model for about ``seconds``, after a warm-up."""
        warm_up = 0
        began_s = time.perf_counter()
        while time.perf_counter() < began_s + _WARM_UP_S:
            self._timed_run()
            warm_up += 1
        estimate_s = (time.perf_counter() - began_s) / warm_up
        times = max(1 if len(self._runs) > 1 else _MIN_RUNS, round(seconds / estimate_s))
        began_s, cpu_s = time.perf_counter(), time.process_time()
        if self._arm.callers > 1:
            list(self._callers.map(self._timed_run, range(times * self._arm.callers)))
            times *= self._arm.callers
            wall_s = [(time.perf_counter() - began_s) / times]
        else:
            wall_s = [self._timed_run() for _ in range(times)]
        return Block([one * 1e3 for one in wall_s], (time.process_time() - cpu_s) / times * 1e3)

    def kept(self) -> Kept:
        """The resources that this process holds now."""
        gc.collect()
        return Kept(_memory_mib() - self._before_mib, sum(1 for _ in Path("/proc/self/task").iterdir()))


def main() -> None:
    """Answer the parent's requests: first an arm with its model, then seconds to run, and at last None for ``Kept``."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # text that libraries print must not mix with answers
    import ortserve.tools.opening  # noqa: F401 - silences ONNX Runtime, and is loaded before memory is measured

    subject: _Measured | None = None
    while True:
        request = pickle.load(sys.stdin.buffer)
        answer: object
        if isinstance(request, tuple):
            subject = _Measured(*request)
            answer = subject.opened
        else:
            assert subject is not None
            answer = subject.kept() if request is None else subject.run(request)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    from advice_arms import main as main_of_module  # the module name under which the parent pickles its classes

    main_of_module()
