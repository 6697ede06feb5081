"""The result of ``ortserve compare``, as ``--json`` prints it."""

from dataclasses import dataclass

from ortserve.core.agreement import Agreement
from ortserve.tools.speed import Speed


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """One of the models.

    Attributes:
        name: Name of the model.
        version: Version of the model; null for a file that is in no repository.
        path: Path of the file; of an ensemble, the folder of its version.
        digest: SHA-256 over the file and its external data; of an ensemble, over the digests of its members.
        nbytes: Size of the file and its external data; of an ensemble, the sum over its members.
        nodes: Nodes of the main graph in the file; of an ensemble, the sum over its members.
        execution_provider: The execution provider that ran it; of an ensemble, those of all members.
        threads: Threads of a run; of an ensemble, the maximum over its members.
        provenance: Summary of its provenance; null without one.
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
        schema: Name and number of this schema.
        reference: The first model, which the second one is compared with.
        candidate: The second model.
        inputs: A description of the inputs.
        rows: Rows of a run; 1 if one of the models is not batched.
        agreement: Agreement of the candidate's outputs with the reference's.
        reference_speed: Speed of the reference; null if it was not measured.
        speed: Speed of the candidate, with its ratio to the reference; null if it was not measured.
        exceeded: Bounds of ``--max-error`` that are exceeded and the ``--min-speedup`` that is not reached.
        notes: Limits of the comparison.
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
