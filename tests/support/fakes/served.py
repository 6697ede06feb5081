"""A version without a model, as a member of ensembles. Skips the importing test file if the package is compiled."""

import pytest

from interpreted import WHY
from ortserve.batching.sequences import SequenceRuns
from ortserve.batching.statistics import Learned
from ortserve.config.model import LoadOptions, make_model_options
from ortserve.core.batch import Arrays
from ortserve.core.compiled import IS_COMPILED
from ortserve.core.signature import ModelSignature
from ortserve.registry.repository.configuration import Configuration
from ortserve.registry.served_version import ServedVersion
from ortserve.telemetry.series import ModelMetrics

if IS_COMPILED:
    pytest.skip(WHY, allow_module_level=True)


class FakeVersion(ServedVersion):
    """A version whose subclass receives and settles the requests."""

    def __init__(
        self,
        name: str,
        signature: ModelSignature,
        sequences: SequenceRuns | None = None,
        *,
        takes_sequences: bool = False,
    ) -> None:
        """``takes_sequences`` without ``sequences`` is for a subclass that answers requests of sequences itself."""
        super().__init__(
            signature,
            {},
            ModelMetrics(name, "1"),
            Configuration(make_model_options({}, LoadOptions(), name)),
            properties={},
            is_cached=False,
            sequences=sequences,
            takes_sequences=takes_sequences or sequences is not None,
        )

    @property
    def platform(self) -> str:
        return "fake"

    @property
    def max_rows(self) -> int:
        return 8

    def cut_back(self, outputs: Arrays, inputs: Arrays) -> Arrays:
        return outputs

    def learned(self) -> Learned:
        raise NotImplementedError

    async def drain(self) -> None:
        await self.wait_until_released()
        if self.sequences is not None:
            await self.sequences.close()

    def free(self) -> None:
        """Do nothing: there is no session."""
