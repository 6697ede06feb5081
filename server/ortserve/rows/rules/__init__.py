"""The rules, one for each operator, which derive claims about results from claims about operands.

Each module holds the rules of a family of operators, by domain and operator. Every rule is sound on its own: it raises
``NotKnownError`` for a case that it does not cover, and ``RowsMeetError`` if the operator may combine rows.
"""

from typing import Final

from ortserve.rows.rules import (
    classical,
    constants,
    control_flow,
    elementwise,
    fused,
    gather,
    masked_writes,
    matmul,
    movement,
    reduction,
    sequences,
    shapes,
    spatial,
)
from ortserve.rows.rules.call import Rule

RULES: Final[dict[tuple[str, str], Rule]] = {
    **classical.RULES,
    **constants.RULES,
    **control_flow.RULES,
    **elementwise.RULES,
    **fused.RULES,
    **gather.RULES,
    **matmul.RULES,
    **movement.RULES,
    **reduction.RULES,
    **sequences.RULES,
    **shapes.RULES,
    **spatial.RULES,
}
"""The rules by domain (empty for ONNX's own) and operator."""

__all__ = ["RULES", "call", "masked_writes"]
