"""One rule for each operator: from claims about operands to claims about results.

A module holds a family of operators and gives its rules by domain and operator. Every rule is sound on its own: where
it does not cover a case, it raises ``NotKnown``, and where rows may meet, ``RowsMeet``.
"""

from typing import Final

from ortserve.rows.rules import (
    arithmetic,
    elementwise,
    gather,
    matmul,
    movement,
    normalization,
    reduction,
    shapes,
    windows,
)
from ortserve.rows.rules.call import Rule

RULES: Final[dict[tuple[str, str], Rule]] = {
    **arithmetic.RULES,
    **elementwise.RULES,
    **gather.RULES,
    **matmul.RULES,
    **movement.RULES,
    **normalization.RULES,
    **reduction.RULES,
    **shapes.RULES,
    **windows.RULES,
}
"""By domain (empty for ONNX's own) and operator."""
