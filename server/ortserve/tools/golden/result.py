"""The result of ``ortserve golden``, as ``--json`` prints it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenResult:
    """The golden samples of a version.

    Attributes:
        schema: Name and number of this schema.
        action: ``record`` or ``check``.
        model: The name of the model.
        version: The number of the version.
        folder: Folder of the samples.
        samples: The number of samples; null if they were not counted.
        inputs: A description of the recorded inputs; empty for a check.
        outputs: The source of the expected outputs; empty for a check.
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
