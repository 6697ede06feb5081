"""A version that answers requests, as the service and other versions see it: a model, or an ensemble of models."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

from ortserve._pb import model_config_pb2 as pb
from ortserve.batching.sequences import SequenceRuns
from ortserve.batching.statistics import Learned
from ortserve.config.model import ModelOptions
from ortserve.core.batch import Arrays
from ortserve.core.inflight import InflightRequest
from ortserve.core.request import RequestedOutput
from ortserve.core.sequence import SequenceId, SequencePart
from ortserve.core.signature import ModelSignature
from ortserve.core.terms import NO_SCHEDULING, Scheduling, Terms
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
        labels: Mapping[str, Sequence[str]],
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

        Args:
            signature: Of requests and responses.
            labels: Names of the elements of an output, by its name; outputs without labels are not in it.
            metrics: Of the version, with its names.
            configuration: Of its load.
            properties: Shown in the metadata.
            is_cached: Whether equal requests may be answered without a run.
            recording: Of its requests; None if none are recorded.
            sequences: Runs its requests in the order of their sequences; None for others.
            takes_sequences: Whether it has sequences, or is an ensemble with a member that has.
        """
        self.name: Final[str] = metrics.name
        self.version: Final[str] = metrics.version
        self.signature: Final[ModelSignature] = signature
        self.labels: Final[Mapping[str, Sequence[str]]] = labels
        self.metrics: Final[ModelMetrics] = metrics
        self.rejections: Final[RejectionLog] = RejectionLog(metrics.name, metrics.version)
        self.properties: Mapping[str, str] = properties
        """Replaced as a whole when one of them changes."""
        self.recording: Final[Recording | None] = recording
        self.sequences: Final[SequenceRuns | None] = sequences
        self.takes_sequences: Final[bool] = takes_sequences
        """Whether requests come to ``submit_part`` instead of ``submit``."""
        self.options: Final[ModelOptions] = configuration.options
        self.declared: Final[pb.ModelConfig] = configuration.declared
        """Its ``config.pbtxt``; empty without one."""
        self.is_cached: Final[bool] = is_cached
        self.rollout: Rollout | None = None
        """Tries another version in the place of this one; None for nearly all versions."""
        self._holders = 0
        self._released: asyncio.Event | None = None

    @property
    @abstractmethod
    def platform(self) -> str:
        """The kind of model, as the metadata name it."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether requests were admitted that are not settled."""

    @property
    def has_sequences(self) -> bool:
        """Whether sequences have begun and not ended; their states are in memory only."""
        return self.sequences is not None and not self.sequences.is_empty

    def device_bytes(self) -> Mapping[str, int]:
        """Memory that it holds, by the name of the device; without that of an ensemble's members."""
        return {}

    @property
    @abstractmethod
    def max_rows(self) -> int:
        """Most rows that run together."""

    @property
    def queued_rows(self) -> int:
        """Rows that wait for a run; 0 for a version without a queue of its own."""
        return 0

    @abstractmethod
    def terms(
        self,
        received_ns: int,
        timeout_ns: int | None = None,
        scheduling: Scheduling = NO_SCHEDULING,
        outputs: Sequence[RequestedOutput] = (),
    ) -> Terms:
        """The terms of a request: its parameters, and the model's options for parameters that it does not set.

        Args:
            received_ns: Start of the timeouts (monotonic).
            timeout_ns: Time limit of the answer; None for the model's ``slo_s``, if it has one.
            scheduling: Parameters of the request.
            outputs: The only ones that are used; empty for all.
        """

    @abstractmethod
    def submit(self, request: InflightRequest, terms: Terms) -> None:
        """Start a request. It is settled with outputs for ``cut_back``.

        Args:
            request: Its inputs match the signature and have its order, with absent ones for omitted optional inputs.
                This call may convert them.
            terms: From ``terms``.

        Raises:
            ServeError: The request is rejected.
        """

    @abstractmethod
    def submit_part(self, request: InflightRequest, terms: Terms, part: SequencePart) -> None:
        """Start a request of a version that takes sequences, as ``submit`` does.

        Args:
            request: As for ``submit``.
            terms: From ``terms``.
            part: Its part in a sequence.

        Raises:
            ServeError: As ``submit``; also if the request does not fit its sequence.
        """

    def end_sequence(self, sequence_id: SequenceId) -> None:
        """End a sequence, if there is one: a request of it did not come to ``submit_part``, or cannot be repeated."""
        if self.sequences is not None:
            self.sequences.end(sequence_id)

    def is_pipelined(self, sequence_id: SequenceId) -> bool:
        """Whether a client has sent a request of a sequence before the answer of an earlier one."""
        return self.sequences is not None and self.sequences.is_pipelined(sequence_id)

    @abstractmethod
    def cut_back(self, outputs: Arrays, inputs: Arrays) -> Arrays:
        """Convert the outputs of a request to the form of clients.

        Args:
            outputs: With which the request was settled.
            inputs: Of the request, as ``submit`` converted them.
        """

    @abstractmethod
    def learned(self) -> Learned:
        """The measurements and decisions of the batcher. Raises ServeError: unsupported, for a version without one."""

    @abstractmethod
    async def close(self) -> None:
        """Answer all admitted requests, then free the version. Waits for its holders first."""

    @property
    def is_held(self) -> bool:
        """Whether an ensemble holds the version open."""
        return self._holders > 0

    def hold(self) -> None:
        """Keep the version open for an ensemble that submits requests to it, until ``release``."""
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
