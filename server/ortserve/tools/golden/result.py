"""What ``ortserve golden --json`` prints."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenResult:
    """The golden samples of a version.

    Attributes:
        schema: Of this result.
        action: ``record`` or ``check``.
        model: The name of the model.
        version: Its number.
        folder: Of the samples.
        samples: Their number; null if they were not counted.
        inputs: Where the recorded inputs come from; empty for a check.
        outputs: Where the expected outputs come from; empty for a check.
        agreement: How the version agrees with the samples; empty for an ensemble that was recorded from a server.
    """

    schema: str = "ortserve.golden/1"
    action: str
    model: str
    version: int
    folder: str
    samples: int | None = None
    inputs: str = ""
    outputs: str = ""
    agreement: str = ""
