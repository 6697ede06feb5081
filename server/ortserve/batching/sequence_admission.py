"""Admission of requests of sequences: rejects requests that fit no sequence, and those that exceed a limit.

``sequences`` calls it before it begins a sequence or queues a request, and reports states and waiting requests to it.
"""

from typing import Final

from ortserve.batching.sequence_table import Turn
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import InflightRequest
from ortserve.core.sequence import SequenceId, SequencePart, SequenceTensors
from ortserve.errors import ErrorKind, SequenceError, ServeError


class SequenceLimits:
    """Limits of a model: the number of sequences, bytes of their states, and rows and bytes of waiting requests."""

    __slots__ = ("queue_bytes", "queue_rows", "sequences", "state_bytes")

    def __init__(self, sequences: int, state_bytes: int, queue_rows: int, queue_bytes: int) -> None:
        self.sequences: Final = sequences
        self.state_bytes: Final = state_bytes
        self.queue_rows: Final = queue_rows
        self.queue_bytes: Final = queue_bytes


class SequenceAdmission:
    """Checks requests of sequences, and counts states and waiting requests.

    Loop thread only, except for reading the counts.

    Attributes:
        state_bytes: Bytes of the states of all sequences.
        waiting_rows: Number of requests whose turn has not come; each has one row.
    """

    def __init__(self, model: str, tensors: SequenceTensors, limits: SequenceLimits) -> None:
        """``model`` is its name, for errors; ``tensors`` are its hidden tensors."""
        self.state_bytes = 0
        self.waiting_rows = 0
        self._waiting_bytes = 0
        self._model: Final = model
        self._tensors: Final = tensors
        self._limits: Final = limits

    def check(self, request: InflightRequest, part: SequencePart) -> None:
        """Check the sequence parameters of a request.

        Raises:
            ServeError: SequenceError for a request without an id or with several rows; invalid_input for an id of
                another datatype than the model expects.
        """
        if not part.id:
            raise SequenceError(
                ErrorKind.INVALID_INPUT,
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID",
            )
        if request.rows != 1:
            raise SequenceError(
                ErrorKind.INVALID_INPUT,
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence "
                "batcher",
            )
        expected = self._tensors.id_datatype
        if expected is not None and isinstance(part.id, str) is not (expected is DataType.BYTES):
            got = "BYTES" if isinstance(part.id, str) else "UINT64"
            raise ServeError(
                ErrorKind.INVALID_INPUT,
                f"sequence batching control 'CORRID' data-type is '{got}', but model '{self._model}' expects "
                f"'{expected.value}'",
            )

    def not_started(self, sequence_id: SequenceId) -> SequenceError:
        """The error for a request of a sequence that has not begun, or has ended."""
        return SequenceError(
            ErrorKind.INVALID_INPUT,
            f"inference request for sequence {sequence_id} to model '{self._model}' must specify the START flag on the "
            "first request of the sequence",
        )

    def check_room(self, sequences: int) -> None:
        """Check that a sequence may begin in addition to ``sequences`` others.

        Raises:
            ServeError: overloaded.
        """
        limits = self._limits
        if sequences >= limits.sequences:
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"model '{self._model}' serves {sequences} sequences already, the limit is max_sequences",
                retry_after_s=1,
            )
        if self.state_bytes + self._tensors.initial_bytes > limits.state_bytes:
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"the states of model '{self._model}' take {self.state_bytes} bytes, so max_state_bytes "
                f"{limits.state_bytes} has no room for another sequence",
                retry_after_s=1,
            )

    def has_outgrown(self, state_bytes: int) -> bool:
        """Whether a sequence with a state of ``state_bytes`` must end, because all states exceed their limit."""
        return self.state_bytes > self._limits.state_bytes and state_bytes > self._tensors.initial_bytes

    def why_full(self, nbytes: int) -> str:
        """Why a request of ``nbytes`` must not wait; empty if it may. It always may if no other request waits."""
        limits = self._limits
        if not self.waiting_rows or (
            self.waiting_rows < limits.queue_rows and self._waiting_bytes + nbytes <= limits.queue_bytes
        ):
            return ""
        return (
            f"Exceeds maximum queue size: {self.waiting_rows} requests with {self._waiting_bytes} bytes wait for their "
            f"sequences, the limits are max_queue_rows {limits.queue_rows} and max_queue_bytes {limits.queue_bytes}"
        )

    def enter(self, turn: Turn) -> None:
        """Count a request that begins to wait."""
        self.waiting_rows += 1
        self._waiting_bytes += turn.nbytes

    def leave(self, turn: Turn) -> None:
        """Count a request that no longer waits."""
        self.waiting_rows -= 1
        self._waiting_bytes -= turn.nbytes
