"""Sessions of an instance, and the ids of the graphs that they capture."""

import threading
import weakref
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_models import SIZES, batch_of, landed, numbered, on_device, run_script, stream_of_requests
from fakes.host_device import HostDevice, Pace
from models import builders
from ortserve.device.devices import DeviceProvider
from ortserve.device.graph_sessions import SETS, graph_id
from ortserve.device.protocol import BoundRun, MemoryInfo
from ortserve.engine.runs import NO_GRAPH
from ortserve.errors import DeviceLostError, invalid_input


class OneEach(HostDevice):
    """Counts the existing sessions, and records those that captured."""

    def __init__(self, **options: Any) -> None:
        super().__init__(one_graph_per_session=True, **options)
        self.sessions: list[weakref.ref[ort.InferenceSession]] = []
        self.ran_graphs: dict[int, set[int]] = {}

    def note(self, session: ort.InferenceSession) -> ort.InferenceSession:
        self.sessions.append(weakref.ref(session))
        return session

    @property
    def alive(self) -> int:
        return sum(session() is not None for session in self.sessions)

    def run(self, bound: BoundRun, stream: int) -> None:
        if bound.graph_id is not None:
            self.ran_graphs.setdefault(id(bound.session), set()).add(bound.graph_id)
        super().run(bound, stream)


@pytest.mark.parametrize("pace", Pace)
def test_each_graph_has_its_own_session(tmp_path: Path, pace: Pace) -> None:
    device = OneEach(pace=pace)
    path = builders.identity(tmp_path / "m.onnx")
    with on_device(path, device, captures=True, wrap=device.note) as made:
        assert made.prepared.replayed == SIZES
        assert len(device.sessions) == device.alive == 1 + SETS * len(SIZES)
        assert stream_of_requests(made, 300) == 0
        assert made.instance.counts.replayed == 300
        assert not made.instance.counts.plain
        assert len(device.ran_graphs) == SETS * len(SIZES)
        assert all(len(graphs) == 1 for graphs in device.ran_graphs.values())
    assert (device.alive, device.allocated_bytes, device.handles) == (0, 0, 0)


def test_session_that_replays_its_first_batch_for_all_is_detected(tmp_path: Path) -> None:
    """A provider is wrongly configured to hold a graph per id: none of its captures is used."""
    device = OneEach()
    use = DeviceProvider(lambda number: device)
    with on_device(builders.identity(tmp_path / "m.onnx"), device, captures=True, wrap=device.note, use=use) as made:
        assert len(device.sessions) == 1
        assert made.prepared.replayed == made.prepared.bound == ()
        assert "differs" in made.prepared.unbound_because
        assert stream_of_requests(made, 20) == 0


def test_runs_without_a_graph_use_the_session_without_graphs(tmp_path: Path) -> None:
    device = OneEach()
    with on_device(builders.identity(tmp_path / "m.onnx"), device, captures=True, wrap=device.note) as made:
        x = numbered(11, 1)
        (y,) = landed(made.start(batch_of((x,))))
        assert np.array_equal(y, x)
        assert made.instance.counts.plain == {"no_bucket": 1}
        assert id(device.sessions[0]()) not in device.ran_graphs


def test_sessions_of_unused_graphs_are_freed_at_once(tmp_path: Path) -> None:
    class CapturesFew(OneEach):
        """Captures no more than two rows."""

        def run(self, bound: BoundRun, stream: int) -> None:
            if bound.graph_id is not None and bound.graph_id >= SETS * 4:
                raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
            super().run(bound, stream)

    device = CapturesFew()
    with on_device(builders.identity(tmp_path / "m.onnx"), device, captures=True, wrap=device.note) as made:
        assert made.prepared.replayed == (1, 2)
        assert {rows: text.split(":")[0] for rows, text in made.prepared.not_replayed.items()} == {
            4: "its capture failed",
            8: "its capture failed",
        }
        assert device.alive == 1 + SETS * 2
        assert stream_of_requests(made, 50) == 0
        assert made.instance.counts.replayed
        assert made.instance.counts.bound
    assert (device.alive, device.handles) == (0, 0)


def test_failed_capture_is_ended_before_other_work(tmp_path: Path) -> None:
    """Nothing runs before on the stream, which all sessions of an instance share, as with TensorRT."""

    class GoesOn(OneEach):
        def run(self, bound: BoundRun, stream: int) -> None:
            if bound.graph_id is not None and bound.graph_id >= SETS * 4:
                self.leave_capturing(stream)
                raise RuntimeError("enqueue failed")
            super().run(bound, stream)

    device = GoesOn()
    with on_device(builders.identity(tmp_path / "m.onnx"), device, captures=True, wrap=device.note) as made:
        assert made.prepared.bound == SIZES
        assert made.prepared.replayed == (1, 2)
        assert stream_of_requests(made, 50) == 0


def test_memory_of_freed_sessions_is_in_no_account(tmp_path: Path) -> None:
    each = 100 * 2**20

    class Weighs(OneEach):
        """Each session takes memory, and no session of more than one row can be captured."""

        def memory(self) -> MemoryInfo:
            free = super().memory()
            return MemoryInfo(free.free_bytes - self.alive * each, free.total_bytes)

        def run(self, bound: BoundRun, stream: int) -> None:
            if bound.graph_id is not None and bound.graph_id >= SETS * 2:
                raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
            super().run(bound, stream)

    device = Weighs()
    with on_device(builders.identity(tmp_path / "m.onnx"), device, captures=True, wrap=device.note) as made:
        assert made.prepared.replayed == (1,)
        ((_, held),) = made.opened.ledger.totals().items()
        assert {purpose: held[purpose] for purpose in ("session", "graphs")} == {"session": each, "graphs": SETS * each}


def test_size_whose_graph_session_fails_to_open_runs_plainly(tmp_path: Path) -> None:
    device = OneEach()

    def refuse(session: ort.InferenceSession) -> ort.InferenceSession:
        if len(device.sessions) == 1 + SETS:
            raise invalid_input("the engine is of another GPU")
        return device.note(session)

    with on_device(builders.identity(tmp_path / "m.onnx"), device, captures=True, wrap=refuse) as made:
        assert made.prepared.replayed == (1,)
        assert set(made.prepared.not_replayed.values()) == {
            "its session cannot be opened: the engine is of another GPU"
        }
        assert made.instance.counts.not_captured == {"failed": 3}
        assert stream_of_requests(made, 50) == 0
    assert (device.alive, device.handles) == (0, 0)


def test_device_lost_while_opening_a_graph_session_fails_the_load(tmp_path: Path) -> None:
    device = OneEach()

    def lose(session: ort.InferenceSession) -> ort.InferenceSession:
        if device.sessions:
            raise DeviceLostError("host:0 is lost: CUDA failure 700")
        return device.note(session)

    with (
        pytest.raises(DeviceLostError, match="host:0 is lost"),
        on_device(builders.identity(tmp_path / "m.onnx"), device, captures=True, wrap=lose),
    ):
        pass
    assert device.allocated_bytes == 0


def test_opening_graph_sessions_does_not_block_other_work(tmp_path: Path) -> None:
    device = OneEach()
    entered: list[bool] = []

    def look(session: ort.InferenceSession) -> ort.InferenceSession:
        if device.sessions:
            lock = made_lock[0]
            entered.append(lock.try_acquire_shared())
            lock.release_shared()
        return device.note(session)

    made_lock: list[Any] = []
    path = builders.identity(tmp_path / "m.onnx")
    with on_device(path, device, captures=True, is_prepared=False, wrap=look) as made:
        made_lock.append(made.opened.capture_lock)
        made.instance.prepare(SIZES, lambda rows, seed: (numbered(rows, seed + 1),))
    assert entered == [True] * SETS * len(SIZES)


def test_hundred_loads_leave_no_memory_allocated(tmp_path: Path) -> None:
    device = OneEach()
    threads = threading.active_count()
    path = builders.identity(tmp_path / "m.onnx")
    for _ in range(100):
        with on_device(path, device, sizes=(2,), captures=True, wrap=device.note) as made:
            (y,) = landed(made.start(batch_of((numbered(2, 1),))))
            del y
        assert device.alive == 0
    assert (device.allocated_bytes, device.handles) == (0, 0)
    assert made.opened.ledger.totals() == {}
    assert threading.active_count() == threads


LOST_AT_THE_END: Final = """
import sys, weakref
from pathlib import Path
from device_models import on_device
from fakes.host_device import HostDevice

sessions = []
def note(session):
    sessions.append(weakref.ref(session))
    return session

device = HostDevice(one_graph_per_session=True)
with on_device(Path(sys.argv[1]), device, sizes=(2,), captures=True, wrap=note) as made:
    made.opened.lost = sys.argv[2]
print(*["kept" if session() is not None else "freed" for session in sessions])
"""
"""Loads, captures, optionally loses the device, unloads and ends."""


@pytest.mark.parametrize(
    ("lost", "freed"), [("CUDA failure 700", "freed kept kept"), ("", "freed freed freed")], ids=["lost", "well"]
)
def test_graph_sessions_on_a_lost_device_are_kept(tmp_path: Path, lost: str, freed: str) -> None:
    path = builders.identity(tmp_path / "m.onnx")
    assert run_script(LOST_AT_THE_END, path, lost) == freed


ROWS = st.integers(1, 65536)
SET = st.integers(0, SETS - 1)


@given(ROWS, SET, ROWS, SET)
def test_graph_id_encodes_rows_and_set(rows: int, index: int, others: int, other: int) -> None:
    assert (graph_id(rows, index) == graph_id(others, other)) == ((rows, index) == (others, other))


@given(ROWS, SET)
def test_graph_ids_differ_from_onnx_runtimes_own(rows: int, index: int) -> None:
    assert graph_id(rows, index) not in (0, NO_GRAPH)
    assert graph_id(rows, index) < 2**31
