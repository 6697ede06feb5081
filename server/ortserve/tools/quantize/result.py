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
            calibration; ``weights``: only weights, which become floating point again in each run.
        bits: Of weights.
        block: Weights along an axis that share a scale, in mode ``weights``; None in others.
        calibrator: How ranges come from values, in mode ``static``; empty in others.
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
    """What it costs to quantize some nodes alone.

    Attributes:
        nodes: Their names: one node, or neighbours that were measured together.
        operators: Their operators.
        error: Of the model with only these nodes quantized, as ``ranked_by`` measures it; infinite (null) if it cannot
            run; None if there was no time to measure it.
        is_quantized: Whether they are quantized in the result.
    """

    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    error: float | None
    is_quantized: bool


@dataclass(frozen=True, slots=True)
class QuantizedOperator:
    """The nodes of an operator that could be quantized.

    Attributes:
        operator: Its name.
        quantized: Nodes that are.
        floating: Nodes that stay in floating point.
    """

    operator: str
    quantized: int
    floating: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeResult:
    """A quantized model and its evidence.

    Attributes:
        model: Name of the source.
        path: Its file.
        settings: How it was quantized.
        bounds: The errors that were accepted, as ``--max-error`` writes them.
        missed: How the best model that was found exceeds them; empty if it does not. Then nothing is written.
        source_nbytes: Size of the source with its external data.
        nbytes: Size of the quantized model.
        operators: What is quantized.
        floating: Nodes that stay in floating point, because they cost too much or were excluded.
        ranked_by: The measure of ``ranking``; empty if all nodes could be quantized within the bounds.
        ranking: What nodes cost, the most expensive first.
        trials: The number of models that were made and compared.
        calibration: Where the calibration inputs came from; empty without calibration.
        inputs: Where the inputs came from with which the models were compared.
        agreement: Of the outputs with those of the source.
        source_speed: Of the source on this machine; None if it was not measured.
        speed: Of the quantized model, compared with the source.
        notes: What must be known to judge or to use the model.
        delivered: What was written; None if nothing was.
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
