"""One rule for each operator: from claims about operands to claims about results.

A module holds a family of operators and gives its rules by domain and operator. Every rule is sound on its own: where
it does not cover a case, it raises ``NotKnownError``, and where rows may meet, ``RowsMeetError``.
"""

from typing import Final

from ortserve.rows.rules import (
    arithmetic,
    attention,
    branches,
    classical,
    creation,
    elementwise,
    fused,
    gather,
    loops,
    matmul,
    movement,
    normalization,
    quantization,
    recurrent,
    reduction,
    resizing,
    shapes,
    texts,
    windows,
)
from ortserve.rows.rules.call import Rule

RULES: Final[dict[tuple[str, str], Rule]] = {
    **arithmetic.RULES,
    **attention.RULES,
    **branches.RULES,
    **classical.RULES,
    **creation.RULES,
    **elementwise.RULES,
    **fused.RULES,
    **gather.RULES,
    **loops.RULES,
    **matmul.RULES,
    **movement.RULES,
    **normalization.RULES,
    **quantization.RULES,
    **recurrent.RULES,
    **reduction.RULES,
    **resizing.RULES,
    **shapes.RULES,
    **texts.RULES,
    **windows.RULES,
}
"""By domain (empty for ONNX's own) and operator."""

__all__ = ["RULES", "call"]
