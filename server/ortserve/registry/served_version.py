"""The interface of a version that answers requests, for the service and for ensembles.

A version serves a model file, or is an ensemble of models.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

from ortserve._pb import model_config_pb2 as pb
from ortserve.batching.kept_sequences import Members
from ortserve.batching.sequences import SequenceRuns
from ortserve.batching.statistics import Learned
from ortserve.config.model import ModelOptions
from ortserve.core.batch import Arrays
from ortserve.core.inflight import NO_SCHEDULING, InflightRequest, Scheduling, Terms
from ortserve.core.request import RequestedOutput
from ortserve.core.sequence import SequenceId, SequencePart
from ortserve.core.signature import ModelSignature
from ortserve.registry.recording import Recording
from ortserve.registry.repository.configuration import Configuration
from ortserve.registry.rollout import Rollout
from ortserve.telemetry.logs import RejectionLog
from ortserve.telemetry.series import ModelMetrics


class ServedVersion(ABC):
    """A version that answers requests: its signature, and ``submit``. Loop thread only."""

    def __init__(
        self,
        signature: ModelSignature,
        output_labels: Mapping[str, Sequence[str]],
        metrics: ModelMetrics,
        configuration: Configuration,
        *,
        properties: Mapping[str, str],
        is_cached: bool,
        recording: Recording | None = None,
        sequences: SequenceRuns | None = None,
        takes_sequences: bool = False,
    ) -> None:
        """Begin with no holders.

        ``metrics`` also name the model and the version. ``output_labels`` are the names of an output's elements, by the
        name of the output. If ``is_cached``, a repeated request may be answered without a run. ``takes_sequences`` says
        whether the version has ``sequences`` of its own, or is an ensemble with a member that has.
        """
        self.name: Final[str] = metrics.name
        self.version: Final[str] = metrics.version
        self.signature: Final[ModelSignature] = signature
        self.output_labels: Final[Mapping[str, Sequence[str]]] = output_labels
        self.metrics: Final[ModelMetrics] = metrics
        self.rejections: Final[RejectionLog] = RejectionLog(metrics.name, metrics.version)
        self.properties: Mapping[str, str] = properties
        """Properties for the metadata. The mapping is replaced as a whole when a property changes."""
        self.recording: Final[Recording | None] = recording
        self.sequences: Final[SequenceRuns | None] = sequences
        self.takes_sequences: Final[bool] = takes_sequences
        """Whether requests are submitted by ``submit_part`` instead of ``submit``."""
        self.options: Final[ModelOptions] = configuration.options
        self.declared: Final[pb.ModelConfig] = configuration.declared
        """Fields of the version's ``config.pbtxt``; empty without such a file."""
        self.is_cached: Final[bool] = is_cached
        self.rollout: Rollout | None = None
        """Tries another version in place of this one; usually None."""
        self._holders = 0
        self._released: asyncio.Event | None = None

    @property
    @abstractmethod
    def platform(self) -> str:
        """The platform in the model's metadata."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether any admitted request is not settled yet."""

    @property
    def kept(self) -> Members:
        """What keeps sequences of the version, or of the members of an ensemble, from expiring."""
        return () if self.sequences is None else (self.sequences.kept,)

    @property
    def has_sequences(self) -> bool:
        """Whether any sequence has begun and not ended. States of sequences exist in memory only."""
        return self.sequences is not None and not self.sequences.is_empty

    def device_bytes(self) -> Mapping[str, int]:
        """Memory that the version holds, by name of the device. An ensemble does not count its members."""
        return {}

    @property
    @abstractmethod
    def max_rows(self) -> int:
        """Maximum number of rows that run together."""

    @property
    def max_queue_rows(self) -> int:
        """Maximum number of rows that wait, also in a member of an ensemble."""
        return self.options.max_queue_rows

    @property
    def queued_rows(self) -> int:
        """Number of rows that wait in the version itself; those in the queues of members do not count."""
        return 0

    @abstractmethod
    def terms(
        self,
        received_ns: int,
        timeout_ns: int | None = None,
        scheduling: Scheduling = NO_SCHEDULING,
        outputs: Sequence[RequestedOutput] = (),
    ) -> Terms:
        """Compute the terms of a request from its parameters, and from the model's options where it sets none.

        Args:
            received_ns: When the timeouts start (monotonic).
            timeout_ns: Time limit of the answer; None for the model's ``slo_s``, if it is set.
            scheduling: Scheduling parameters of the request.
            outputs: Requested outputs; empty for all.
        """

    @abstractmethod
    def submit(self, request: InflightRequest, terms: Terms) -> None:
        """Start a request. It is settled with outputs that ``cut_back`` converts.

        Args:
            request: The request. Its inputs match the signature, in the same order, with absent tensors for omitted
                optional inputs. This call may convert them.
            terms: Result of ``terms``.

        Raises:
            ServeError: The request is rejected.
        """

    @abstractmethod
    def submit_part(self, request: InflightRequest, terms: Terms, part: SequencePart) -> None:
        """Start a request to a version that takes sequences, as ``submit`` does for other versions.

        Args:
            request: The request, as for ``submit``.
            terms: Result of ``terms``.
            part: The sequence of the request, and its place in it.

        Raises:
            ServeError: The request is rejected, also if it does not match the state of its sequence.
        """

    def end_sequence(self, sequence_id: SequenceId, computed_ns: int | None = None) -> None:
        """End a sequence, if it exists, because a request of it did not reach ``submit_part`` or cannot be repeated.

        ``computed_ns`` is as in ``SequenceRuns.end``.
        """
        if self.sequences is not None:
            self.sequences.end(sequence_id, computed_ns)

    def is_pipelined(self, sequence_id: SequenceId) -> bool:
        """Whether a client has sent a request of a sequence before the answer of an earlier one."""
        return self.sequences is not None and self.sequences.is_pipelined(sequence_id)

    @abstractmethod
    def cut_back(self, outputs: Arrays, inputs: Arrays) -> Arrays:
        """Convert the outputs of a request to the form that clients expect.

        Args:
            outputs: Outputs with which the request was settled.
            inputs: Inputs of the request, as ``submit`` converted them.
        """

    @abstractmethod
    def learned(self) -> Learned:
        """The batcher's measurements and decisions. Raises ServeError: unsupported, for a version without a batcher."""

    async def close(self) -> None:
        """Drain the version, then free it."""
        await self.drain()
        await asyncio.to_thread(self.free)

    @abstractmethod
    async def drain(self) -> None:
        """Wait until no ensemble holds the version, and answer all admitted requests."""

    @abstractmethod
    def free(self) -> None:
        """Free the memory of a drained version, which blocks. Any thread."""

    @property
    def is_held(self) -> bool:
        """Whether an ensemble holds the version open."""
        return self._holders > 0

    def hold(self) -> None:
        """Keep the version open until ``release``, for an ensemble that submits requests to it."""
        self._holders += 1

    def release(self) -> None:
        """End a ``hold``."""
        self._holders -= 1
        if not self._holders and self._released is not None:
            self._released.set()

    async def wait_until_released(self) -> None:
        """Wait until no ensemble holds the version."""
        if self._holders:
            self._released = asyncio.Event()
            await self._released.wait()
