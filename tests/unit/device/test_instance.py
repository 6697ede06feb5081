"""Instances on a device of host memory: correct rows at every pace, no mixed rows, all memory released."""

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort
import pytest

from device_models import (
    SIZES,
    OnDevice,
    batch_of,
    bucket_for,
    landed,
    numbered,
    on_device,
    provider_of,
    run_script,
    stream_of_requests,
    wait_for_capture,
)
from fakes.host_device import CAPTURING_RUNS, HostDevice, Pace
from models import builders, interfaces
from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.device import capture_lock, preparation
from ortserve.device.binding import _WAITED_EVERY
from ortserve.device.devices import Devices, OpenDevice
from ortserve.device.graph_sessions import SETS, graph_id
from ortserve.device.protocol import BoundRun, MemoryInfo
from ortserve.engine.output_buffers import OutputBuffers, RowLayout
from ortserve.engine.provider_options import CPU
from ortserve.errors import DeviceLostError, ErrorKind, OutOfMemoryError, ServeError

TYPES = [kind for kind in DataType if kind is not DataType.BYTES]


@pytest.mark.parametrize("captures", [False, True], ids=["bound", "replayed"])
@pytest.mark.parametrize("pace", Pace)
def test_two_batches_in_flight_never_mix_their_rows(tmp_path: Path, pace: Pace, captures: bool) -> None:
    with on_device(builders.identity(tmp_path / "m.onnx"), HostDevice(pace=pace), captures=captures) as made:
        assert stream_of_requests(made, 300) == 0
        counts = made.instance.counts
        assert (counts.replayed if captures else counts.bound) == 300
        assert not counts.plain


class Forgetful(HostDevice):
    """A device on which one stream never waits for another."""

    def __init__(self, position: int) -> None:
        super().__init__(pace=Pace.LATE)
        self._position = position
        self._waits = 0
        self.forgets = False

    def make_wait(self, stream: int, event: int) -> None:
        self._waits += 1
        if not (self.forgets and self._waits % 2 == self._position):
            super().make_wait(stream, event)


@pytest.mark.parametrize("position", [0, 1], ids=["outputs before they are computed", "computing before the inputs"])
def test_each_event_is_needed(tmp_path: Path, position: int) -> None:
    device = Forgetful(position)
    with on_device(builders.identity(tmp_path / "m.onnx"), device) as made:
        device._waits = 0
        device.forgets = True
        assert stream_of_requests(made, 20) > 0


def test_size_whose_bound_run_is_wrong_is_not_bound(tmp_path: Path) -> None:
    device = Forgetful(1)
    device.forgets = True
    with on_device(builders.identity(tmp_path / "m.onnx"), device) as made:
        assert made.prepared.bound == ()
        assert made.prepared.unbound_because == "output 'y' of 1 rows differs on bound buffers"
        assert device.allocated_bytes == 0
        assert made.opened.ledger.totals() == {}
        (y,) = landed(made.start(batch_of((numbered(3, 1),))))
        assert np.array_equal(y, numbered(3, 1))
        assert made.instance.counts.plain == {"unbound": 1}


@pytest.mark.parametrize("captures", [False, True], ids=["bound", "replayed"])
@pytest.mark.parametrize("datatype", TYPES, ids=lambda kind: kind.value)
def test_every_datatype_and_size_equals_the_plain_run(tmp_path: Path, datatype: DataType, captures: bool) -> None:
    with on_device(builders.identity(tmp_path / "m.onnx", datatype), HostDevice(), captures=captures) as made:
        assert made.prepared.bound == SIZES
        for rows in range(1, SIZES[-1] + 1):
            x = (np.arange(rows * 4).reshape(rows, 4) % 2).astype(datatype.numpy)
            (y,) = landed(made.start(batch_of((x,), bucket=bucket_for(rows))))
            assert y.dtype == x.dtype
            assert np.array_equal(y, made.plainly((x,))[0])


def test_several_inputs_and_outputs_keep_their_order(tmp_path: Path) -> None:
    with on_device(builders.two_outputs(tmp_path / "m.onnx"), HostDevice(pace=Pace.LATE)) as made:
        parts = [tuple(_drawn(made, rows, seed=rows)) for rows in (1, 2, 3)]
        outputs = landed(made.start(batch_of(*parts, bucket=8)))
        whole = tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        for output, expected in zip(outputs, made.plainly(whole), strict=True):
            np.testing.assert_allclose(output, expected, rtol=1e-5)


def test_scores_of_maps_use_device_buffers(tmp_path: Path) -> None:
    with on_device(interfaces.zipmap_classifier(tmp_path / "m.onnx", (4, 9, 2)), HostDevice(pace=Pace.LATE)) as made:
        assert made.prepared.bound == SIZES
        parts = [tuple(_drawn(made, rows, seed=rows)) for rows in (1, 2, 3)]
        label, scores = landed(made.start(batch_of(*parts, bucket=8)))
        whole = tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        expected_label, expected_scores = made.plainly(whole)
        assert label.tolist() == expected_label.tolist()
        np.testing.assert_allclose(scores, expected_scores, rtol=1e-5)


def test_batch_that_fits_no_bucket_runs_plainly_and_is_counted(tmp_path: Path) -> None:
    with on_device(builders.identity(tmp_path / "m.onnx"), HostDevice(), captures=True) as made:
        for rows in (3, 9):
            (y,) = landed(made.start(batch_of((numbered(rows, rows),))))
            assert np.array_equal(y, numbered(rows, rows))
        assert made.instance.counts.plain == {"no_bucket": 2}
        with pytest.raises(ServeError, match="Got invalid dimensions"):
            landed(made.start(batch_of((np.zeros((2, 5), np.float32),))))
        assert made.instance.counts.plain == {"no_bucket": 2, "other_shape": 1}
        assert made.instance.counts.replayed == 0


def test_plain_run_that_is_terminated_before_it_begins_does_not_run(tmp_path: Path) -> None:
    with on_device(builders.identity(tmp_path / "m.onnx"), HostDevice()) as made:
        batches = [batch_of((numbered(3, index),)) for index in range(3)]
        with made.opened.capture_lock.exclusive():  # like the capture of another model, which blocks both
            before, terminated = [made.start(batch) for batch in batches[:2]]
            made.instance.terminate(batches[1])
        assert np.array_equal(landed(before)[0], numbered(3, 0))
        with pytest.raises(ServeError, match="the run was terminated before it began"):
            landed(terminated)
        assert np.array_equal(landed(made.start(batches[2]))[0], numbered(3, 2))


def test_termination_ends_only_its_own_plain_run(tmp_path: Path) -> None:
    with on_device(builders.repeats(tmp_path / "m.onnx"), HostDevice(), is_prepared=False) as made:
        endless, short = batch_of((np.array([2**62]),)), batch_of((np.array([3]),))
        running, waiting = made.start(endless), made.start(short)
        made.instance.terminate(short)
        with pytest.raises(TimeoutError):
            running.result(timeout=0.2)
        made.instance.terminate(endless)
        with pytest.raises(ServeError, match="terminate flag"):
            landed(running)
        with pytest.raises(ServeError, match="the run was terminated before it began"):
            landed(waiting)
        assert landed(made.start(short))[0] == 3


def test_graph_is_run_only_with_the_binding_of_its_rows_and_set(tmp_path: Path) -> None:
    seen: list[BoundRun] = []

    class Watched(HostDevice):
        def run(self, bound: BoundRun, stream: int) -> None:
            seen.append(bound)
            super().run(bound, stream)

    with on_device(builders.identity(tmp_path / "m.onnx"), Watched(), captures=True) as made:
        seen.clear()
        assert stream_of_requests(made, 200) == 0
        binding = made.instance.binding
        assert binding is not None
        known = {(rows, index): run for (rows, index), run in binding._runs.items()}
        assert {run.graph_id for run in seen} <= {graph_id(rows, index) for rows, index in known}
        for run in seen:
            ((rows, index),) = [key for key, value in known.items() if value is run]
            assert run.graph_id == graph_id(rows, index)


def test_a_replay_ignores_the_binding_it_is_given(tmp_path: Path) -> None:
    """A behaviour of ONNX Runtime that the host device copies; because of it, ids are made of rows and set."""
    device = HostDevice()
    with on_device(builders.identity(tmp_path / "m.onnx"), device, captures=True) as made:
        binding = made.instance.binding
        assert binding is not None
        first, second = binding.sets
        of_first = binding._runs[2, 0]
        wrong = BoundRun(of_first.session, binding._runs[2, 1].binding, of_first.options, of_first.graph_id)
        batch = batch_of((numbered(2, 5),))
        binding.poison(first, [numbered(2, 7)])
        binding.poison(second, [numbered(2, 7)])
        outputs = binding.finish(binding.enqueue(batch, second, wrong)).outputs
        assert not np.array_equal(outputs[0], numbered(2, 5))


class NeverRight(HostDevice):
    """A device whose replays use the binding of the capture, which belongs to another batch."""

    def _choose_binding(self, bound: BoundRun) -> ort.IOBinding:
        captured = super()._choose_binding(bound)
        if bound.graph_id is None or captured is not bound.binding:
            return captured
        return self._graphs[bound.session][bound.graph_id].captured or captured

    def run(self, bound: BoundRun, stream: int) -> None:
        if bound.graph_id is None:
            super().run(bound, stream)


def test_capture_whose_replay_is_wrong_is_not_used(tmp_path: Path) -> None:
    with on_device(builders.identity(tmp_path / "m.onnx"), NeverRight(), captures=True) as made:
        assert made.prepared.bound == SIZES
        assert made.prepared.replayed == ()
        assert made.prepared.not_replayed[1] == "output 'y' of 1 rows differs when replayed"
        assert stream_of_requests(made, 20) == 0
        assert made.instance.counts.not_captured == {"wrong_answer": len(SIZES)}
        assert made.instance.counts.replayed == 0


def test_failed_capture_is_not_used_and_the_others_are(tmp_path: Path) -> None:
    class NotTwo(HostDevice):
        def run(self, bound: BoundRun, stream: int) -> None:
            if bound.graph_id in (graph_id(2, 0), graph_id(2, 1)):
                raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
            super().run(bound, stream)

    with on_device(builders.identity(tmp_path / "m.onnx"), NotTwo(), captures=True) as made:
        assert made.prepared.bound == SIZES
        assert made.prepared.replayed == (1, 4, 8)
        assert "its capture failed: CUDA failure 900" in made.prepared.not_replayed[2]
        assert stream_of_requests(made, 40) == 0
        assert made.instance.counts.replayed
        assert made.instance.counts.bound


class Watching(HostDevice):
    """Records the beginning of the first input at each capture and replay."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def run(self, bound: BoundRun, stream: int) -> None:
        for rows in SIZES:
            for number in range(SETS):
                if bound.graph_id == graph_id(rows, number):
                    self.seen.append(list(self._memory.values())[number][:8].tobytes())
        super().run(bound, stream)


def test_capture_runs_on_inputs_that_the_model_accepts(tmp_path: Path) -> None:
    device = Watching()
    with on_device(builders.identity(tmp_path / "m.onnx", DataType.INT64), device, captures=True) as made:
        assert made.prepared.replayed == SIZES
        assert len(device.seen) >= len(SIZES) * SETS * CAPTURING_RUNS
        assert b"\xff" * 8 not in device.seen


class Pinning(HostDevice):
    """A device whose host pins no more memory while ``refuses`` holds an error text."""

    refuses = ""

    def allocate_host(self, nbytes: int) -> np.ndarray:
        if self.refuses:
            raise RuntimeError(self.refuses)
        return super().allocate_host(nbytes)


def test_exhausted_pinned_memory_fails_no_batch(tmp_path: Path) -> None:
    device = Pinning()
    with on_device(builders.identity(tmp_path / "m.onnx"), device) as made:
        device.refuses = "cudaErrorMemoryAllocation: out of memory"
        kept = [landed(made.start(batch_of((numbered(3, number),), bucket=4)))[0] for number in range(20)]
        for number, rows in enumerate(kept):
            assert np.array_equal(rows, numbered(3, number))
        device.refuses = "cudaErrorIllegalAddress: an illegal memory access was encountered"
        with pytest.raises(DeviceLostError):
            landed(made.start(batch_of((numbered(3, 0),), bucket=4)))


def test_capture_that_breaks_an_older_graph_disables_that_graph(tmp_path: Path) -> None:
    class Forgetful(HostDevice):
        def run(self, bound: BoundRun, stream: int) -> None:
            if bound.graph_id != graph_id(2, 1) or graph_id(8, 1) not in self.captured:
                super().run(bound, stream)

    with on_device(builders.identity(tmp_path / "m.onnx"), Forgetful(), captures=True) as made:
        assert made.prepared.bound == SIZES
        assert made.prepared.replayed == (1, 4, 8)
        assert made.prepared.not_replayed == {2: "output 'y' of 2 rows differs when replayed"}
        assert made.instance.counts.captured == 6
        assert stream_of_requests(made, 50) == 0
        assert made.instance.counts.replayed
        assert made.instance.counts.bound


def test_captured_sizes_stay_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "MAX_GRAPHS", 2)
    with on_device(builders.identity(tmp_path / "m.onnx"), HostDevice(), captures=True) as made:
        assert made.prepared.replayed == (1, 2)
        assert made.prepared.not_replayed == dict.fromkeys((4, 8), "2 sizes are already captured")
        assert made.instance.counts.not_captured == {"over_limit": 2}
        assert made.instance.counts.captured == 2 * SETS


def test_runs_between_replays_are_awaited_as_often_as_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recording(HostDevice):
        runs: Final[list[BoundRun]] = []

        def run(self, bound: BoundRun, stream: int) -> None:
            self.runs.append(bound)
            super().run(bound, stream)

    monkeypatch.setattr(preparation, "MAX_GRAPHS", 1)
    device = Recording()
    with on_device(builders.identity(tmp_path / "m.onnx"), device, captures=True) as made:
        assert made.prepared.replayed == (1,)
        device.runs.clear()
        for number in range(2 * _WAITED_EVERY):
            for rows in (2, 1):  # so that each second batch is a replay
                landed(made.start(batch_of((numbered(rows, number),))))
    bound = [run for run in device.runs if run.graph_id is None]
    assert (len(device.runs), len(bound)) == (4 * _WAITED_EVERY, 2 * _WAITED_EVERY)
    awaited = [number for number, run in enumerate(bound, 1) if not returns_early(run.options)]
    assert awaited == [_WAITED_EVERY, 2 * _WAITED_EVERY]


def returns_early(options: ort.RunOptions) -> bool:
    """Whether a run returns before its end."""
    try:
        return bool(options.get_run_config_entry("disable_synchronize_execution_providers") == "1")
    except RuntimeError:  # there is no such entry
        return False


@pytest.mark.parametrize("is_whole", [True, False])
def test_runs_return_early_only_where_all_nodes_are_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    entries: list[tuple[str, str]] = []

    class Noted(ort.RunOptions):  # type: ignore[misc]
        def add_run_config_entry(self, key: str, value: str) -> None:
            entries.append((key, value))
            super().add_run_config_entry(key, value)

    with on_device(builders.identity(tmp_path / "m.onnx"), HostDevice(), captures=True) as made:
        binding = made.instance.binding
        assert binding is not None
        binding._parts = replace(binding._parts, is_whole=is_whole)
        monkeypatch.setattr(ort, "RunOptions", Noted)
        binding.bind(4, binding.sets[1], is_graph=True)
        binding.bind(4, binding.sets[1], is_graph=False)
        binding.bind(4, binding.sets[1], is_graph=True, is_waited_for=True)
    early = [("disable_synchronize_execution_providers", "1")] if is_whole else []
    graph = ("gpu_graph_id", str(graph_id(4, 1)))
    assert entries == [graph, *early, ("gpu_graph_id", "-1"), *early, graph]


def test_captures_hold_the_gate_exclusively(tmp_path: Path) -> None:
    alone: list[bool] = []
    opened: list[OpenDevice] = []

    class Watched(HostDevice):
        def run(self, bound: BoundRun, stream: int) -> None:
            if bound.graph_id is not None and bound.graph_id not in self.captured:
                alone.append(opened[0].capture_lock._is_exclusive)
            super().run(bound, stream)

    with on_device(builders.identity(tmp_path / "m.onnx"), Watched(), captures=True, is_prepared=False) as made:
        opened.append(made.opened)
        made.instance.prepare((2,), lambda rows, seed: (numbered(rows, seed),))
        assert alone == [True] * CAPTURING_RUNS * SETS


def test_run_that_never_ends_keeps_models_from_capturing_and_not_from_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_lock, "_ATTEMPTS_S", (0.1, 0.1))
    with on_device(builders.identity(tmp_path / "m.onnx"), HostDevice(), captures=True, is_prepared=False) as made:
        made.opened.capture_lock.acquire_shared()  # by the instance of another model, which was abandoned
        doing: list[str] = []
        prepared = made.instance.prepare((2, 4), lambda rows, seed: (numbered(rows, seed),), doing.append)
        assert (prepared.bound, prepared.replayed) == ((2, 4), ())
        because = "no graph could be captured: other work on the GPU did not end for 0.4 s"
        assert prepared.not_replayed == {2: because, 4: because}
        assert doing.count("capturing the graph of batches of 4 rows") == 0
        (answer,) = landed(made.start(batch_of((numbered(2, 1),))))
        np.testing.assert_array_equal(answer, numbered(2, 1))
        made.opened.capture_lock.release_shared()


def test_batch_behind_a_capture_runs_after_it(tmp_path: Path) -> None:
    with on_device(builders.identity(tmp_path / "m.onnx"), HostDevice()) as made:
        lock, order = made.opened.capture_lock, list[str]()
        lock.acquire_shared()

        def capture() -> None:
            with lock.exclusive():
                order.append("capture")

        waiting = threading.Thread(target=capture)
        waiting.start()
        wait_for_capture(lock)
        late = made.start(batch_of((numbered(2, 1),)))  # after the capture
        late.add_done_callback(lambda _: order.append("batch"))
        with pytest.raises(TimeoutError):
            late.result(0.1)
        lock.release_shared()
        waiting.join(10)
        landed(late)
        assert order == ["capture", "batch"]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (builders.fixed_batch, "requests run one at a time: "),
        (builders.sequence_output, "requests run one at a time: output 'y' is a sequence of tensors"),
        (builders.unnamed_dims, "the number of rows does not fix the shapes of its inputs"),
        (lambda path: builders.identity(path, DataType.BYTES), "strings stay on the host"),
    ],
)
def test_model_with_other_free_shapes_has_no_buffers(tmp_path: Path, build: Any, expected: str) -> None:
    with on_device(build(tmp_path / "m.onnx"), HostDevice()) as made:
        assert made.prepared.unbound_because.startswith(expected)


class Failing:
    """A session that fails on demand."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self.error = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def _check(self) -> None:
        if self.error:
            raise RuntimeError(self.error)

    def run(self, *args: Any) -> Any:
        self._check()
        return self._session.run(*args)

    def run_with_iobinding(self, *args: Any) -> Any:
        self._check()
        return self._session.run_with_iobinding(*args)


def failing_on_device(path: Path, device: HostDevice) -> tuple[AbstractContextManager[OnDevice], list[Failing]]:
    sessions: list[Failing] = []

    def wrap(session: ort.InferenceSession) -> Any:
        sessions.append(Failing(session))
        return sessions[0]

    return on_device(path, device, wrap=wrap), sessions


@pytest.mark.parametrize("pace", Pace)
def test_run_without_memory_fails_and_the_next_succeeds(tmp_path: Path, pace: Pace) -> None:
    opening, sessions = failing_on_device(builders.identity(tmp_path / "m.onnx"), HostDevice(pace=pace))
    with opening as made:
        for rows in (2, 9):
            sessions[0].error = "BFCArena: Failed to allocate memory for requested buffer of size 99"
            with pytest.raises(OutOfMemoryError) as failed:
                landed(made.start(batch_of((numbered(rows, 1),))))
            assert failed.value.kind is ErrorKind.INTERNAL
            sessions[0].error = ""
            assert stream_of_requests(made, 10) == 0
        assert not made.instance.lost


def test_failed_batch_releases_everything(tmp_path: Path) -> None:
    opening, sessions = failing_on_device(builders.identity(tmp_path / "m.onnx"), HostDevice())
    with opening as made:
        gc.disable()
        try:
            for error in ("bad", "CUDA failure 700", ""):  # the last run fails because the device is already lost
                sessions[0].error = error
                sent = numbered(2, 1)
                freed = weakref.ref(sent)
                future = made.start(batch_of((sent,)))
                assert isinstance(future.result(30), ServeError)
                del sent, future
                made.instance.call(lambda: None)  # waits for the worker
                assert freed() is None, error
        finally:
            gc.enable()


@pytest.mark.parametrize("pace", Pace)
def test_lost_device_is_lost_for_all_instances(tmp_path: Path, pace: Pace) -> None:
    opening, sessions = failing_on_device(builders.identity(tmp_path / "m.onnx"), HostDevice(pace=pace))
    with opening as made:
        sessions[0].error = "CUDA failure 700: an illegal memory access was encountered"
        with pytest.raises(DeviceLostError, match="host:0 is lost: CUDA failure 700") as failed:
            landed(made.start(batch_of((numbered(2, 1),))))
        assert failed.value.kind is ErrorKind.NOT_READY
        sessions[0].error = ""
        with pytest.raises(DeviceLostError):  # never retried, although it would seem to work
            landed(made.start(batch_of((numbered(2, 1),))))
        assert (
            made.opened.lost == made.instance.lost == "host:0 is lost: CUDA failure 700: an illegal memory access "
            "was encountered"
        )


class FailsPlainly:
    """A session whose plain runs fail once an error is set."""

    def __init__(self, session: ort.InferenceSession, errors: list[str]) -> None:
        self._session = session
        self._errors = errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, *args: Any) -> Any:
        if self._errors:
            raise RuntimeError(self._errors[0])
        return self._session.run(*args)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("CUDA failure 901: it goes on", ServeError), ("CUDA failure 2: out of memory", OutOfMemoryError)],
)
def test_model_that_stops_working_with_its_buffers_is_not_served(
    tmp_path: Path, text: str, kind: type[ServeError]
) -> None:
    """All resources are released although garbage collection is off and the error is still referenced."""
    sessions: list[weakref.ref[Any]] = []
    errors: list[str] = []

    class Fails(HostDevice):
        def run(self, bound: BoundRun, stream: int) -> None:
            errors.append(text)
            raise RuntimeError(text)

    def wrap(session: ort.InferenceSession) -> Any:
        wrapped = FailsPlainly(session, errors)
        sessions.append(weakref.ref(wrapped))
        return wrapped

    device = Fails()
    gc.disable()
    try:
        with (
            pytest.raises(kind, match=text.rpartition(" ")[2]),
            on_device(builders.identity(tmp_path / "m.onnx"), device, wrap=wrap),
        ):
            pass
        assert [session() for session in sessions] == [None]
        assert device.handles == 0
    finally:
        gc.enable()


def test_arenas_are_shrunk_after_runs_on_buffers_and_not_after_replays(tmp_path: Path) -> None:
    key = "memory.enable_memory_arena_shrinkage"
    with on_device(builders.identity(tmp_path / "m.onnx"), HostDevice(), shrink_arenas=("cpu:0",)) as made:
        binding = made.instance.binding
        assert binding is not None
        assert binding.bind(2, binding.sets[0], is_graph=False).options.get_run_config_entry(key) == "cpu:0"
        with pytest.raises(RuntimeError):
            binding.bind(2, binding.sets[0], is_graph=True).options.get_run_config_entry(key)


def test_streams_of_a_session_that_still_exists_are_leaked(tmp_path: Path) -> None:
    path = builders.identity(tmp_path / "m.onnx")
    device = HostDevice()
    held: list[ort.InferenceSession] = []

    def hold(session: ort.InferenceSession) -> ort.InferenceSession:
        held.append(session)
        return session

    with on_device(path, device, wrap=hold):
        pass
    assert device.handles == 3  # its streams, but no event
    device = HostDevice()
    with on_device(path, device):
        pass
    assert device.handles == 0


LOST_AT_THE_END: Final = """
import sys, weakref
from pathlib import Path
from device_models import on_device
from fakes.host_device import HostDevice

with on_device(Path(sys.argv[1]), HostDevice(), captures=True) as made:
    session = weakref.ref(made.instance._batches._parts.sessions.own)
    made.opened.lost = sys.argv[2]
print("kept" if session() is not None else "freed")
"""
"""Loads, captures, optionally loses the device, unloads and ends."""


@pytest.mark.parametrize(("lost", "expected"), [("CUDA failure 700", "kept"), ("", "freed")])
def test_session_with_graphs_on_a_lost_device_is_kept(tmp_path: Path, lost: str, expected: str) -> None:
    path = builders.identity(tmp_path / "m.onnx")
    assert run_script(LOST_AT_THE_END, path, lost) == expected


def test_buffers_past_the_memory_are_rejected_before_allocation(tmp_path: Path) -> None:
    device = HostDevice(total_bytes=1000)
    with (
        pytest.raises(ServeError, match=r"'m/1' needs at least 1.0 KiB on host:0 \(buffers 1.0 KiB\), but 1000 B are"),
        on_device(builders.identity(tmp_path / "m.onnx"), device),
    ):
        pass
    assert device.allocated_bytes == 0
    assert device.handles == 0


def test_device_whose_buffers_fail_runs_plainly(tmp_path: Path) -> None:
    class Unlike(HostDevice):
        def make_event(self, *, is_timed: bool = False) -> int:
            raise RuntimeError("cudaErrorNotSupported: operation not supported")

    device = Unlike()
    with on_device(builders.identity(tmp_path / "m.onnx"), device) as made:
        assert "they could not be created" in made.prepared.unbound_because
        assert "cudaErrorNotSupported" in made.prepared.unbound_because
        assert device.allocated_bytes == 0
        assert np.array_equal(landed(made.start(batch_of((numbered(2, 1),))))[0], numbered(2, 1))
        assert made.instance.counts.plain == {"unbound": 1}


def test_session_without_buffers_is_accounted(tmp_path: Path) -> None:
    device = HostDevice()

    def weigh(session: ort.InferenceSession) -> ort.InferenceSession:
        device.allocate(3000)
        return session

    path = builders.identity(tmp_path / "m.onnx", DataType.BYTES)
    with on_device(path, device, wrap=weigh) as made:
        assert made.opened.ledger.totals() == {"m/1": {"session": 3000}}


def test_lost_device_frees_all_host_resources(tmp_path: Path) -> None:
    class Lost(HostDevice):
        """Fails every call that frees a resource."""

        is_lost = False

        def destroy_event(self, event: int) -> None:
            super().destroy_event(event)
            self.fail()

        def free(self, address: int) -> None:
            super().free(address)
            self.fail()

        def fail(self) -> None:
            if self.is_lost:
                raise RuntimeError("CUDA failure 719: unspecified launch failure")

    device = Lost()
    sessions: list[weakref.ref[ort.InferenceSession]] = []

    def know(session: ort.InferenceSession) -> ort.InferenceSession:
        sessions.append(weakref.ref(session))
        return session

    with on_device(builders.identity(tmp_path / "m.onnx"), device, wrap=know) as made:
        landed(made.start(batch_of((numbered(2, 1),))))
        device.is_lost = True
    assert sessions[0]() is None
    assert device.allocated_bytes == 0
    assert device.handles == 0
    assert made.opened.ledger.totals() == {}


def test_device_lost_after_all_trials_fails_the_load_and_frees_memory(tmp_path: Path) -> None:
    class LostAtLast(HostDevice):
        runs = 0

        def run(self, bound: BoundRun, stream: int) -> None:
            super().run(bound, stream)
            self.runs += 1

        def memory(self) -> MemoryInfo:
            if self.runs == SETS * len(SIZES):
                raise RuntimeError("CUDA failure 719: unspecified launch failure")
            return super().memory()

    device = LostAtLast()
    with (
        pytest.raises(DeviceLostError, match="host:0 is lost: CUDA failure 719"),
        on_device(builders.identity(tmp_path / "m.onnx"), device),
    ):
        pass
    assert device.allocated_bytes == 0
    assert device.handles == 0


@pytest.mark.parametrize("graph", [False, True], ids=["in buffers", "in a capture"])
def test_device_lost_during_trials_stays_lost(tmp_path: Path, graph: bool) -> None:
    class LostOnce(HostDevice):
        is_lost = False

        def run(self, bound: BoundRun, stream: int) -> None:
            if not self.is_lost and (bound.graph_id is not None) is graph:
                self.is_lost = True
                raise RuntimeError("CUDA failure 700: an illegal memory access was encountered")
            super().run(bound, stream)

    device = LostOnce()
    with (
        pytest.raises(DeviceLostError, match="host:0 is lost: CUDA failure 700"),
        on_device(builders.identity(tmp_path / "m.onnx"), device, captures=True),
    ):
        pass
    assert device.allocated_bytes == 0


def test_graphs_of_sizes_that_run_plainly_are_not_counted(tmp_path: Path) -> None:
    class WrongAtLast(HostDevice):
        """A session that does not write its output for 8 rows."""

        def run(self, bound: BoundRun, stream: int) -> None:
            if bound.binding.get_outputs()[0].shape()[0] != 8:
                super().run(bound, stream)

    with on_device(builders.identity(tmp_path / "m.onnx"), WrongAtLast(), captures=True) as made:
        assert made.prepared.bound == ()
        assert made.instance.counts.captured == 0


def test_host_memory_is_accounted_apart_from_the_device(tmp_path: Path) -> None:
    device = HostDevice()
    row = 4 * 4
    with on_device(builders.identity(tmp_path / "m.onnx"), device) as made:
        ledger = made.opened.ledger

        def answers(owner: str = "m/1") -> int:
            return ledger.pinned().get(owner, {}).get("answers", 0)

        assert ledger.totals() == {"m/1": {"buffers": 1024}}
        assert ledger.pinned()["m/1"]["staging"] == SETS * 256
        kept = [landed(made.start(batch_of((numbered(2, number),)))) for number in range(3)]
        made.instance.call(lambda: None)
        assert answers() == 3 * (64 + SIZES[-1] * row)
        assert sum(ledger.pinned()["m/1"].values()) == sum(device._host.values())
        assert ledger.totals() == {"m/1": {"buffers": 1024}}
    made.opened.reclaim()
    assert (answers(), answers("unloaded")) == (0, 3 * (64 + SIZES[-1] * row))
    assert answers("unloaded") == sum(device._host.values())
    kept.clear()
    made.opened.reclaim()
    assert ledger.pinned() == {}
    assert device.handles == 0


def test_failed_host_allocation_is_in_no_account(tmp_path: Path) -> None:
    device = Forgetful(1)
    device.forgets = True
    with on_device(builders.identity(tmp_path / "m.onnx"), device) as made:
        assert made.prepared.bound == ()
        made.opened.reclaim()
        assert made.opened.ledger.pinned() == {}


def test_answer_memory_is_freed_once_among_instances(tmp_path: Path) -> None:
    device = HostDevice()
    opened = Devices({CPU: provider_of(CPU, device)}).open(CPU, 0)
    assert isinstance(opened, OpenDevice)
    layouts = [RowLayout(np.dtype(np.float32), (4,))]

    def retire_and_reclaim(_: int) -> None:
        for _ in range(50):
            opened.retire(OutputBuffers(layouts, 2, device.allocate_host))
            opened.reclaim()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(retire_and_reclaim, range(8)))
    finally:
        sys.setswitchinterval(before)
    opened.reclaim()
    assert device.handles == 0


def test_hundred_loads_leave_no_memory_allocated(tmp_path: Path) -> None:
    device = HostDevice()
    threads = threading.active_count()
    path = builders.identity(tmp_path / "m.onnx")
    for _ in range(100):
        with on_device(path, device, sizes=(2,), captures=True) as made:
            (y,) = landed(made.start(batch_of((numbered(2, 1),))))
            del y
    assert device.allocated_bytes == 0
    assert device.handles == 0
    assert made.opened.ledger.totals() == {}
    assert threading.active_count() == threads


def test_memory_of_captures_is_accounted(tmp_path: Path) -> None:
    class Keeping(HostDevice):
        """A device whose graphs hold memory."""

        def run(self, bound: BoundRun, stream: int) -> None:
            before = len(self.captured)
            super().run(bound, stream)
            if len(self.captured) > before:
                self.kept.append(self.allocate(1000))

        kept: list[int]

    device = Keeping()
    device.kept = []
    with on_device(builders.identity(tmp_path / "m.onnx"), device, sizes=(1, 2), captures=True) as made:
        assert made.prepared.graph_bytes == 4000
        assert made.opened.ledger.totals() == {"m/1": {"buffers": 1024, "graphs": 4000}}


def test_answers_outlive_their_instance_and_the_next_frees_them(tmp_path: Path) -> None:
    device = HostDevice()
    with on_device(builders.identity(tmp_path / "m.onnx"), device) as made:
        (y,) = landed(made.start(batch_of((numbered(2, 1),))))
    kept = y[1:]
    del y
    opened = made.opened
    opened.reclaim()
    assert device.handles == 1
    assert np.array_equal(kept, numbered(2, 1)[1:])
    del kept
    gc.collect()
    opened.reclaim()
    assert device.handles == 0


def test_kept_answers_make_later_ones_use_separate_memory(tmp_path: Path) -> None:
    with on_device(builders.identity(tmp_path / "m.onnx"), HostDevice()) as made:
        kept = [landed(made.start(batch_of((numbered(2, number),)))) for number in range(20)]
        for number, (y,) in enumerate(kept):
            assert np.array_equal(y, numbered(2, number))


def _drawn(made: OnDevice, rows: int, seed: int) -> Arrays:
    generator = np.random.default_rng(seed)
    return tuple(
        (100 * generator.standard_normal((rows, *spec.shape[1:]))).astype(spec.datatype.numpy)
        for spec in made.signature.inputs
    )
