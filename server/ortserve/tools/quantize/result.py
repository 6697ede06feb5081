"""The result of ``ortserve quantize``, as ``--json`` writes it."""

from dataclasses import dataclass

from ortserve.core.agreement import Agreement
from ortserve.tools.destination import Delivered
from ortserve.tools.speed import Speed


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is quantized.

    Attributes:
        mode: ``dynamic``: weights, and activations by their range in each run; ``static``: activations have ranges from
            calibration; ``weights``: only weights, which are converted back to floating point in each run.
        bits: Bits of a weight.
        block: Number of weights along an axis that share a scale, in mode ``weights``; None in others.
        calibrator: How ranges are computed from values, in mode ``static``; empty in others.
        per_channel: Whether each channel of a weight has its own scale.
        activations: Type of activations; empty if they stay in floating point.
        weights: Type of weights.
        reduce_range: Whether weights use 7 of 8 bits, so that sums do not overflow on processors without VNNI.
        operators: Operators that are quantized.
    """

    mode: str
    bits: int
    block: int | None
    calibrator: str
    per_channel: bool
    activations: str
    weights: str
    reduce_range: bool
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeCost:
    """The error of a model in which only some nodes are quantized.

    Attributes:
        nodes: Names of the nodes: one node, or neighbours that were measured together.
        operators: Operators of the nodes.
        error: The error in the measure ``ranked_by``; infinite (null) if the model cannot run; None if there was no
            time to measure it.
        is_quantized: Whether the nodes are quantized in the result.
    """

    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    error: float | None
    is_quantized: bool


@dataclass(frozen=True, slots=True)
class QuantizedOperator:
    """The nodes of an operator that could be quantized.

    Attributes:
        operator: Name of the operator.
        quantized: Number of quantized nodes.
        floating: Number of nodes that stay in floating point.
    """

    operator: str
    quantized: int
    floating: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeResult:
    """A quantized model and its evidence.

    Attributes:
        model: Name of the source.
        path: File of the source.
        settings: How it was quantized.
        bounds: The largest errors that were accepted, as ``--max-error`` writes them.
        missed: The bounds that the best model exceeds. If there are any, nothing is written.
        source_nbytes: Size of the source with its external data.
        nbytes: Size of the quantized model with its external data.
        operators: The numbers of quantized nodes by operator.
        floating: Names of nodes that stay in floating point, because they cost too much or were excluded.
        ranked_by: The measure of ``ranking``; empty without a ranking.
        ranking: Errors of nodes that are quantized alone, the largest first; empty if no ranking was needed.
        trials: The number of models that were made and compared.
        calibration: A description of the calibration inputs; empty without calibration.
        inputs: A description of the inputs of the comparison.
        agreement: Agreement of the outputs with those of the source.
        source_speed: Speed of the source on this machine; None if it was not measured.
        speed: Speed of the quantized model, with its ratio to the source; None if it was not measured.
        notes: Facts that matter for judging or using the model.
        delivered: Where the model was written; None if it was not.
    """

    schema: str = "ortserve.quantize/1"
    model: str
    path: str
    settings: Settings
    bounds: tuple[str, ...]
    missed: tuple[str, ...]
    source_nbytes: int
    nbytes: int
    operators: tuple[QuantizedOperator, ...]
    floating: tuple[str, ...]
    ranked_by: str
    ranking: tuple[NodeCost, ...]
    trials: int
    calibration: str
    inputs: str
    agreement: Agreement
    source_speed: Speed | None
    speed: Speed | None
    notes: tuple[str, ...]
    delivered: Delivered | None
