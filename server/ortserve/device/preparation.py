"""Prepares a model's buffers before the model serves: each batch size is tested on them, captured, and tested again.

A size runs on bound buffers only if its result equals that of a plain run. It is replayed only if the replay's result
does, too. Before each test, all buffer sets are filled with wrong values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from ortserve.config.session import SessionSettings
from ortserve.core.batch import Arrays, Batch
from ortserve.core.tensor import agree
from ortserve.device.accounting import DeviceCounts
from ortserve.device.binding import DeviceBinding, InstanceParts
from ortserve.device.buffers import BufferSet
from ortserve.device.capture_lock import StillHeldError
from ortserve.device.protocol import DEVICE_ERRORS, BoundRun, is_lost_error
from ortserve.engine.ort_errors import without_paths
from ortserve.engine.output_buffers import RowLayout, layouts_of
from ortserve.engine.provider_options import CPU
from ortserve.errors import DeviceLostError, ServeError

CAPTURING_RUNS: Final = 4
"""Runs under the exclusive lock that capture a graph. ONNX Runtime before 1.26 captures in the third run, later
versions in the first. The fourth run is a reserve, because a run without the exclusive lock must never capture."""
MAX_GRAPHS: Final = 32
"""Maximum number of captured sizes of an instance, because each graph holds memory. The smallest sizes are captured
first, because they gain most."""

RunPlainly: TypeAlias = Callable[[Arrays], Sequence[np.ndarray]]
MakeInputs: TypeAlias = Callable[[int, int], Arrays]
"""Creates inputs from a number of rows and a seed."""
OnStep: TypeAlias = Callable[[str], None]
"""Called with a description of each step that begins."""
MakeBinding: TypeAlias = Callable[[Sequence[RowLayout], int], DeviceBinding]


NO_BUFFERS: Final = "no_buffers"
TRIAL_FAILED: Final = "trial_refused"
"""Reasons of ``NoReplay``, as the metrics name them."""

_CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})
_SHAPE_OPERATORS: Final = frozenset(
    {
        *("Shape", "Size", "Gather", "Slice", "Concat", "Split", "Squeeze", "Unsqueeze", "Reshape", "Cast", "Identity"),
        *("Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Floor", "Ceil", "Min", "Max", "ReduceProd", "ReduceSum"),
        *("Equal", "Less", "Greater", "Not", "And", "Or", "Where", "Range", "ConstantOfShape", "Constant", "Expand"),
    }
)
"""Operators that compute shapes. ONNX Runtime assigns such nodes to the CPU, and still captures a graph if their only
inputs are shapes. Their results stay right for every replay, because the number of rows is the same."""


@dataclass(frozen=True, slots=True)
class NoReplay:
    """The reason why no graph of a model is captured: ``reason`` as the metrics name it, ``because`` in words."""

    reason: str
    because: str


def why_no_replay(
    provider: str, operators: Mapping[str, frozenset[str]], settings: SessionSettings, *, shapes_elsewhere: bool = True
) -> NoReplay | None:
    """The reason, known before a capture, why the graph of a model cannot be captured; None if a capture may work.

    If ``shapes_elsewhere``, the provider captures although the CPU computes shapes.
    """
    everything = frozenset().union(*operators.values())
    if control := sorted(everything & _CONTROL_FLOW):
        return NoReplay("control_flow", f"which nodes run is decided during the run, by {', '.join(control)}")
    elsewhere = {name: kinds for name, kinds in operators.items() if name != provider}
    if elsewhere and not (shapes_elsewhere and elsewhere.keys() == {CPU} and elsewhere[CPU] <= _SHAPE_OPERATORS):
        others = "; ".join(f"{name} runs {', '.join(sorted(kinds))}" for name, kinds in sorted(elsewhere.items()))
        return NoReplay("other_provider", f"not all of it is on {provider}: {others}")
    if any(arena.startswith("gpu:") for arena in settings.shrink_arenas):
        because = "session.shrink_arenas releases memory that captured graphs still use"
        return NoReplay("shrinks_arena", because)
    return None


@dataclass(frozen=True, slots=True)
class PreparedBuffers:
    """The result of the preparation.

    Attributes:
        bound: Sizes that run on buffers of the device.
        replayed: The sizes in ``bound`` whose graphs are replayed.
        unbound_because: The reason why no size is bound; empty otherwise.
        not_replayed: The reason why a size is not replayed, by size, if captures were requested.
        graph_bytes: The drop of the device's free memory over all captures, less the memory freed after failed ones.
    """

    bound: tuple[int, ...] = ()
    replayed: tuple[int, ...] = ()
    unbound_because: str = ""
    not_replayed: Mapping[int, str] = field(default_factory=dict)
    graph_bytes: int = 0


class Preparation:
    """Tests and captures the batch sizes of an instance, on the worker. Only captures exclude other GPU work."""

    def __init__(
        self,
        parts: InstanceParts,
        *,
        run_plainly: RunPlainly,
        make_inputs: MakeInputs,
        make_binding: MakeBinding,
        counts: DeviceCounts,
        on_step: OnStep,
    ) -> None:
        """Store the arguments.

        ``make_binding`` allocates the buffers, given the layouts of output rows and the largest number of rows.
        """
        self._signature = parts.signature
        self._device = parts.streams.device
        self._capture_lock = parts.streams.opened.capture_lock
        self._run_plainly = run_plainly
        self._make_inputs = make_inputs
        self._make_binding = make_binding
        self._counts = counts
        self._on_step = on_step
        self._graph_bytes = 0
        self._captured_sizes = 0
        self._no_capture_because = ""
        """Why no further size is captured; empty otherwise."""

    def prepare(self, sizes: Sequence[int], *, captures: bool) -> tuple[DeviceBinding | None, PreparedBuffers]:
        """Allocate buffers and test all sizes on them.

        Returns:
            The binding, in which all sizes are enabled, and the result. If one size fails on the buffers, None and the
            reason.

        Raises:
            Exception: One of ``DEVICE_ERRORS``, if a plain run fails or the device has no memory for the buffers.
        """
        most = max(sizes)
        self._on_step(f"making buffers for batches of up to {most} rows")
        with self._capture_lock.shared():
            outputs = self._run_plainly(self._make_inputs(most, 0))
            if problem := self._why_not_by_rows(outputs, most):
                return None, PreparedBuffers(unbound_because=problem)
            binding = self._make_binding(layouts_of(outputs), most)
        bound = tuple(sorted(set(sizes)))
        not_replayed: dict[int, str] = {}
        try:
            for rows in bound:
                self._on_step(f"trying batches of {rows} rows in buffers")
                with self._capture_lock.shared():
                    if problem := self._try_size(binding, rows):
                        binding.close()
                        return None, PreparedBuffers(unbound_because=problem)
                if captures and (problem := self._capture_size(binding, rows)):
                    self._skip_replay(binding, rows, problem, not_replayed)
            replayed = tuple(rows for rows in bound if rows not in not_replayed) if captures else ()
            for rows in replayed:  # test again: later captures may have moved memory that a graph uses
                self._on_step(f"replaying batches of {rows} rows")
                if problem := self._replay_size(binding, rows):
                    self._skip_replay(binding, rows, problem, not_replayed)
            replayed = tuple(rows for rows in replayed if rows not in not_replayed)
            for rows in bound:
                binding.enable(rows, is_graph=rows in replayed)
            self._counts.captured += len(replayed) * len(binding.sets)
        except BaseException:
            with self._capture_lock.shared():
                binding.close()
            raise
        return binding, PreparedBuffers(bound, replayed, not_replayed=not_replayed, graph_bytes=self._graph_bytes)

    def _free_bytes(self) -> int:
        return self._device.memory().free_bytes

    def _skip_replay(self, binding: DeviceBinding, rows: int, problem: str, not_replayed: dict[int, str]) -> None:
        """Record why batches of ``rows`` rows are not replayed, and free their sessions."""
        not_replayed[rows] = problem
        with self._capture_lock.shared():
            before = self._free_bytes()
            binding.forget_graphs(rows)
            self._graph_bytes = max(0, self._graph_bytes - max(0, self._free_bytes() - before))

    def _why_not_by_rows(self, outputs: Sequence[np.ndarray], rows: int) -> str:
        for spec, output in zip(self._signature.outputs, outputs, strict=True):
            if output.ndim == 0 or len(output) != rows or not output.size:
                return f"output '{spec.name}' has shape {list(output.shape)} for {rows} rows"
        return ""

    def _try_size(self, binding: DeviceBinding, rows: int) -> str:
        """Test a size on bound buffers. Returns why it cannot run on them; empty if its results were right."""
        inputs = self._make_inputs(rows, rows)
        expected = self._run_plainly(inputs)
        for buffers in binding.sets:
            try:
                bound = binding.bind(rows, buffers, is_graph=False)
                problem = self._compare(binding, bound, buffers, inputs, expected)
            except DEVICE_ERRORS as error:
                if is_lost_error(error):  # later results cannot be trusted, even if a plain run succeeds
                    raise
                # The plain run before succeeded, so shapes may depend on more than the rows. If a plain run fails now,
                # its error is raised.
                self._run_plainly(inputs)
                problem = f"it fails on bound buffers: {without_paths(str(error))}"
            if problem:
                return problem
        return ""

    def _capture_size(self, binding: DeviceBinding, rows: int) -> str:
        """Capture a size in all sets. Returns the reason why it is not replayed; empty if its results were right."""
        if self._captured_sizes == MAX_GRAPHS:
            self._counts.not_captured["over_limit"] += 1
            return f"{MAX_GRAPHS} sizes are already captured"
        if self._no_capture_because:  # each further attempt would delay the other models again
            self._counts.not_captured["failed"] += 1
            return self._no_capture_because
        self._on_step(f"capturing the graph of batches of {rows} rows")
        inputs = self._make_inputs(rows, rows)
        try:
            for buffers in binding.sets:
                with self._capture_lock.shared():  # ``bind`` may open a session, which does not exclude other work
                    before = self._free_bytes()
                    bound = binding.bind(rows, buffers, is_graph=True, is_waited_for=True)
                    self._graph_bytes += max(0, before - self._free_bytes())
                with self._capture_lock.exclusive():
                    before = self._free_bytes()
                    binding.capture(bound, buffers, inputs, CAPTURING_RUNS)
                    self._graph_bytes += max(0, before - self._free_bytes())
                if problem := self._replay(binding, rows, buffers):
                    return problem
        except DEVICE_ERRORS as error:
            return self._why_failed(error, "its capture failed", rows)
        except StillHeldError as error:
            self._counts.not_captured["failed"] += 1
            self._no_capture_because = f"no graph could be captured: {error}"
            return self._no_capture_because
        except DeviceLostError:
            raise
        except ServeError as error:
            self._counts.not_captured["failed"] += 1
            return f"its session cannot be opened: {error.message}"
        self._captured_sizes += 1
        return ""

    def _replay_size(self, binding: DeviceBinding, rows: int) -> str:
        """Replay a captured size in all sets. Returns why it must not be replayed; empty if all results were right."""
        try:
            return next((problem for buffers in binding.sets if (problem := self._replay(binding, rows, buffers))), "")
        except DEVICE_ERRORS as error:
            return self._why_failed(error, "its replay failed", rows)

    def _replay(self, binding: DeviceBinding, rows: int, buffers: BufferSet) -> str:
        bound = binding.bind(rows, buffers, is_graph=True)
        for seed in (rows, rows + 1):  # alternate, so that two results of a set in a row always differ
            inputs = self._make_inputs(rows, seed)
            with self._capture_lock.shared():
                problem = self._compare(binding, bound, buffers, inputs, self._run_plainly(inputs))
            if problem:
                self._counts.not_captured["wrong_answer"] += 1
                return problem
        return ""

    def _why_failed(self, error: Exception, what: str, rows: int) -> str:
        """The reason in words. Raises an error if the device is lost or a plain run fails: the model must not serve."""
        if is_lost_error(error):
            raise error
        self._counts.not_captured["failed"] += 1
        with self._capture_lock.shared():
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
        """Fill all sets with wrong values, then run. Returns the difference from ``expected``; empty if equal."""
        for poisoned in binding.sets:
            binding.poison(poisoned, expected)
        rows = len(inputs[0])
        batch = Batch(tuple((array,) for array in inputs), rows, rows)
        outputs = binding.finish(binding.enqueue(batch, buffers, bound)).outputs
        for spec, output, right in zip(self._signature.outputs, outputs, expected, strict=True):
            if right.shape != output.shape or right.dtype != output.dtype:
                return f"output '{spec.name}' has shape {list(right.shape)} for {rows} rows"
            if not agree(output, right, spec.datatype):
                how = "when replayed" if bound.graph_id is not None else "on bound buffers"
                return f"output '{spec.name}' of {rows} rows differs {how}"
        return ""
