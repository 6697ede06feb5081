"""Making a model's buffers before it serves: each batch size is tried on them, captured if it is to be, tried again.

Nothing is believed: a size is run on bound buffers only if that gave what a plain run gives, and replayed only if the
replay did, out of buffers that held wrong values before, with wrong values in the other set.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from ortserve.core.batch import Arrays, Batch
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import agree
from ortserve.engine.device.binding import DeviceBinding
from ortserve.engine.device.buffers import BufferSet
from ortserve.engine.device.counts import DeviceCounts
from ortserve.engine.device.failures import DEVICE_ERRORS, says_lost
from ortserve.engine.device.gate import CaptureGate
from ortserve.engine.device.protocol import BoundRun
from ortserve.engine.ort_errors import without_paths
from ortserve.engine.row_layout import RowLayout, layouts_of
from ortserve.errors import DeviceLostError, ServeError

CAPTURING_RUNS: Final = 4
"""ONNX Runtime before 1.26 runs twice, then captures; later ones do all of that in the first run. One more than either
needs: a capture must not be left to a run that does not have the gate for itself."""
MAX_GRAPHS: Final = 32
"""Sizes of one instance that are captured, the smallest first: those gain most, and each graph keeps memory."""

RunPlainly: TypeAlias = Callable[[Arrays], Sequence[np.ndarray]]
MakeInputs: TypeAlias = Callable[[int, int], Arrays]
"""Inputs by rows and seed."""
OnStep: TypeAlias = Callable[[str], None]
"""Told in words what begins."""
MakeBinding: TypeAlias = Callable[[Sequence[RowLayout], int], DeviceBinding]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What became of a model's batch sizes.

    Attributes:
        bound: Sizes that are run on buffers of the device.
        replayed: Of these, the ones whose graphs are replayed.
        unbound_because: In words, where no size is bound.
        not_replayed: For sizes that were to be captured and are not, why, in words.
        graph_bytes: By how much the captures made the device's free memory less, failed ones too but for what their
            sessions gave back.
    """

    bound: tuple[int, ...] = ()
    replayed: tuple[int, ...] = ()
    unbound_because: str = ""
    not_replayed: Mapping[int, str] = field(default_factory=dict)
    graph_bytes: int = 0


class Preparation:
    """Tries the batch sizes of one instance, on its worker. Others may use their GPUs but while a graph is captured."""

    def __init__(
        self,
        signature: ModelSignature,
        run_plainly: RunPlainly,
        make_inputs: MakeInputs,
        make_binding: MakeBinding,
        counts: DeviceCounts,
        gate: CaptureGate,
        free_bytes: Callable[[], int],
        on_step: OnStep,
    ) -> None:
        """``make_binding`` makes the buffers, for outputs of these rows and so many of them.

        ``free_bytes`` asks the device how much memory nobody has.
        """
        self._signature = signature
        self._run_plainly = run_plainly
        self._make_inputs = make_inputs
        self._make_binding = make_binding
        self._counts = counts
        self._gate = gate
        self._free_bytes = free_bytes
        self._on_step = on_step
        self._graph_bytes = 0
        self._captured_sizes = 0

    def prepare(self, sizes: Sequence[int], *, captures: bool) -> tuple[DeviceBinding | None, Prepared]:
        """Make buffers and try all sizes on them.

        Returns:
            The binding, which takes the sizes that it was seen to compute, and what became of them; None and why.

        Raises:
            Exception: One of ``DEVICE_ERRORS``, where a plain run fails, or there is no memory for the buffers.
        """
        most = max(sizes)
        self._on_step(f"making buffers for batches of up to {most} rows")
        with self._gate.shared():
            outputs = self._run_plainly(self._make_inputs(most, 0))
            if problem := self._why_not_by_rows(outputs, most):
                return None, Prepared(unbound_because=problem)
            binding = self._make_binding(layouts_of(outputs), most)
        bound = tuple(sorted(set(sizes)))
        not_replayed: dict[int, str] = {}
        try:
            for rows in bound:
                self._on_step(f"trying batches of {rows} rows in buffers")
                with self._gate.shared():
                    if problem := self._try_size(binding, rows):
                        binding.close()
                        return None, Prepared(unbound_because=problem)
                if captures and (problem := self._capture_size(binding, rows)):
                    self._give_up(binding, rows, problem, not_replayed)
            replayed = tuple(rows for rows in bound if rows not in not_replayed) if captures else ()
            for rows in replayed:  # once more, as what was captured since may have moved something that it uses
                self._on_step(f"replaying batches of {rows} rows")
                if problem := self._replay_size(binding, rows):
                    self._give_up(binding, rows, problem, not_replayed)
            replayed = tuple(rows for rows in replayed if rows not in not_replayed)
            for rows in bound:
                binding.admit(rows, is_graph=rows in replayed)
            self._counts.captured += len(replayed) * len(binding.sets)
        except BaseException:
            with self._gate.shared():
                binding.close()
            raise
        return binding, Prepared(bound, replayed, not_replayed=not_replayed, graph_bytes=self._graph_bytes)

    def _give_up(self, binding: DeviceBinding, rows: int, problem: str, not_replayed: dict[int, str]) -> None:
        """Replay no batches of so many rows, for this problem."""
        not_replayed[rows] = problem
        with self._gate.shared():
            before = self._free_bytes()
            binding.forget_graphs(rows)
            self._graph_bytes = max(0, self._graph_bytes - max(0, self._free_bytes() - before))

    def _why_not_by_rows(self, outputs: Sequence[np.ndarray], rows: int) -> str:
        for spec, output in zip(self._signature.outputs, outputs, strict=True):
            if output.ndim == 0 or len(output) != rows or not output.size:
                return f"output '{spec.name}' has shape {list(output.shape)} for {rows} rows"
        return ""

    def _try_size(self, binding: DeviceBinding, rows: int) -> str:
        """Why a size cannot be run on bound buffers; empty where it was seen to."""
        inputs = self._make_inputs(rows, rows)
        expected = self._run_plainly(inputs)
        for buffers in binding.sets:
            try:
                bound = binding.bind(rows, buffers, is_graph=False)
                problem = self._compare(binding, bound, buffers, inputs, expected)
            except DEVICE_ERRORS as error:
                if says_lost(error):  # and is not to be believed again, whatever a plain run gives
                    raise
                # The plain run went well: its shapes depend on more than the rows. One that fails, too, is raised.
                self._run_plainly(inputs)
                problem = f"it fails on bound buffers: {without_paths(str(error))}"
            if problem:
                return problem
        return ""

    def _capture_size(self, binding: DeviceBinding, rows: int) -> str:
        """Capture a size in all sets. Returns why it is not replayed; empty where it was seen to be right."""
        if self._captured_sizes == MAX_GRAPHS:
            self._counts.count_not_captured("over_limit")
            return f"{MAX_GRAPHS} sizes are captured already"
        self._on_step(f"capturing the graph of batches of {rows} rows")
        inputs = self._make_inputs(rows, rows)
        try:
            for buffers in binding.sets:
                with self._gate.shared():  # it may open a session, for which nobody need stand still
                    before = self._free_bytes()
                    bound = binding.bind(rows, buffers, is_graph=True, is_waited_for=True)
                    self._graph_bytes += max(0, before - self._free_bytes())
                with self._gate.alone():
                    before = self._free_bytes()
                    binding.capture(bound, buffers, inputs, CAPTURING_RUNS)
                    self._graph_bytes += max(0, before - self._free_bytes())
                if problem := self._replay(binding, rows, buffers):
                    return problem
        except DEVICE_ERRORS as error:
            return self._why_failed(error, "its capture failed", rows)
        except DeviceLostError:
            raise
        except ServeError as error:
            self._counts.count_not_captured("failed")
            return f"its session cannot be opened: {error.message}"
        self._captured_sizes += 1
        return ""

    def _replay_size(self, binding: DeviceBinding, rows: int) -> str:
        """Replay a captured size in all sets. Returns why it shall not be; empty where it is right."""
        try:
            return next((problem for buffers in binding.sets if (problem := self._replay(binding, rows, buffers))), "")
        except DEVICE_ERRORS as error:
            return self._why_failed(error, "its replay failed", rows)

    def _replay(self, binding: DeviceBinding, rows: int, buffers: BufferSet) -> str:
        bound = binding.bind(rows, buffers, is_graph=True)
        for seed in (rows, rows + 1):  # in turns, so that no answer of a set is the one before
            inputs = self._make_inputs(rows, seed)
            with self._gate.shared():
                problem = self._compare(binding, bound, buffers, inputs, self._run_plainly(inputs))
            if problem:
                self._counts.count_not_captured("wrong_answer")
                return problem
        return ""

    def _why_failed(self, error: Exception, what: str, rows: int) -> str:
        """In words, where the device can still be used; raises where it cannot, and the model is not served."""
        if says_lost(error):
            raise error
        self._counts.count_not_captured("failed")
        with self._gate.shared():
            self._run_plainly(self._make_inputs(rows, rows))
        return f"{what}: {without_paths(str(error))}"

    def _compare(
        self,
        binding: DeviceBinding,
        bound: BoundRun,
        buffers: BufferSet,
        inputs: Arrays,
        expected: Sequence[np.ndarray],
    ) -> str:
        """Run with nothing right anywhere beforehand, and say what came out wrong."""
        for poisoned in binding.sets:
            binding.poison(poisoned, expected)
        rows = len(inputs[0])
        batch = Batch(tuple((array,) for array in inputs), rows, rows)
        outputs = binding.finish(binding.begin(batch, buffers, bound)).outputs
        for spec, output, right in zip(self._signature.outputs, outputs, expected, strict=True):
            if right.shape != output.shape or right.dtype != output.dtype:
                return f"output '{spec.name}' has shape {list(right.shape)} for {rows} rows"
            if not agree(output, right, spec.datatype):
                how = "replayed" if bound.graph_id is not None else "on bound buffers"
                return f"output '{spec.name}' of {rows} rows is another one {how}"
        return ""
