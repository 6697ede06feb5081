"""The result of ``ortserve publish``, as ``--json`` prints it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishResult:
    """A new version of a model.

    Attributes:
        schema: Name and number of this schema.
        model: The name of the model in the repository.
        version: The number of the new version.
        folder: Folder of the version.
        digest: SHA-256 over the model file and its external data.
        nbytes: Size of the model file and its external data.
        provenance: Summary of the provenance, as the server shows it in the model's metadata.
        notes: Facts that may be unexpected, such as a version policy that does not select the version.
    """

    schema: str = "ortserve.publish/1"
    model: str
    version: int
    folder: str
    digest: str
    nbytes: int
    provenance: str
    notes: tuple[str, ...]
