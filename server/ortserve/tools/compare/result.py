"""What ``ortserve compare --json`` prints."""

from dataclasses import dataclass

from ortserve.core.agreement import Agreement
from ortserve.tools.speed import Speed


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """One of the models.

    Attributes:
        name: Of the model.
        version: Of the model; null for a file that is in no repository.
        path: Of the file; of an ensemble, the folder of its version.
        digest: SHA-256 over the file and its external data; of an ensemble, over the digests of its members.
        nbytes: Size of the file and its external data; of an ensemble, those of its members together.
        nodes: Of the graph as it is in the file; of an ensemble, those of its members together.
        execution_provider: That ran it; of an ensemble, all of them.
        threads: Of a run; of an ensemble, the most of a member.
        provenance: Where it came from, if it has a provenance.
    """

    name: str
    version: int | None
    path: str
    digest: str
    nbytes: int
    nodes: int
    execution_provider: str
    threads: int
    provenance: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareResult:
    """Two models side by side.

    Attributes:
        schema: Of this result.
        reference: The first model, which the other one is compared with.
        candidate: The second model.
        inputs: Where the inputs come from.
        rows: Of a run; 1 if one of the models is not batched.
        agreement: How the candidate agrees with the reference.
        reference_speed: Of the reference; null if speed was not measured.
        speed: Of the candidate, with its ratio to the reference; null if speed was not measured.
        exceeded: Bounds of ``--max-error`` that are exceeded and the ``--min-speedup`` that is not reached.
        notes: What limits the comparison.
    """

    schema: str = "ortserve.compare/1"
    reference: ComparedModel
    candidate: ComparedModel
    inputs: str
    rows: int
    agreement: Agreement
    reference_speed: Speed | None
    speed: Speed | None
    exceeded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
