"""One rule for each operator: from claims about operands to claims about results.

A module holds a family of operators and their rules by domain and operator. Every rule is sound on its own: if it does
not cover a case, it raises ``NotKnownError``, and if rows may meet, ``RowsMeetError``.
"""

from typing import Final

from ortserve.rows.rules import (
    classical,
    control_flow,
    elementwise,
    fused,
    gather,
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
"""By domain (empty for ONNX's own) and operator."""

__all__ = ["RULES", "call"]
