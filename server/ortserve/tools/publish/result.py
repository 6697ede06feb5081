"""What ``ortserve publish --json`` prints."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishResult:
    """A new version of a model.

    Attributes:
        schema: Of this result.
        model: The name of the model in the repository.
        version: The number of the new version.
        folder: Of the version.
        digest: SHA-256 over the model file and its external data.
        nbytes: Size of the model file and its external data.
        provenance: Where the version came from, as the server shows it in the model's metadata.
        notes: What may not be expected, such as a version policy that does not serve it.
    """

    schema: str = "ortserve.publish/1"
    model: str
    version: int
    folder: str
    digest: str
    nbytes: int
    provenance: str
    notes: tuple[str, ...]
