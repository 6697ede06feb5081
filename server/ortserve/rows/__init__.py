"""Proves by a dataflow analysis of a model's graph whether the rows of a batch are independent.

The analysis is an abstract interpretation. ``number`` and ``symbols`` compute with the numbers in shapes, ``values``
holds the claims about a tensor, and ``rules`` derives the claims about an operator's results. ``walk`` analyses one
graph. ``verdict`` tries the axes that may carry rows and returns the result. All code is pure.

*Proven* is a promise: with N entries along the batch axis of each input that carries rows, entry r of each output is
the result of row r alone, up to rounding. It holds under these conditions: The requests of a batch agree in all other
sizes and, byte for byte, in the inputs without rows. Sizes with the same name in ``equal_sizes`` are equal, and those
in ``fixed_sizes`` have the given value. No axis is empty. The model accepts each row alone. The model may still reject
a batch as a whole, because of one row or of a node that no output needs; then the requests run alone.
"""

from ortserve.rows.number import DEPENDENT, Atom, N, Number, Product, atoms_of, has_atom
from ortserve.rows.sizes import Sizes, find_sizes
from ortserve.rows.values import Facts, Kind, Value
from ortserve.rows.verdict import (
    Axes,
    Outcome,
    RowVerdict,
    claims,
    prove_axes,
    prove_model,
    real_inputs,
    sum_terms,
    why_not_analysed,
)
from ortserve.rows.walk import constant_value
from ortserve.rows.work_budget import TooMuchWorkError

__all__ = [
    "DEPENDENT",
    "Atom",
    "Axes",
    "Facts",
    "Kind",
    "N",
    "Number",
    "Outcome",
    "Product",
    "RowVerdict",
    "Sizes",
    "TooMuchWorkError",
    "Value",
    "atoms_of",
    "claims",
    "constant_value",
    "find_sizes",
    "has_atom",
    "prove_axes",
    "prove_model",
    "real_inputs",
    "sum_terms",
    "why_not_analysed",
]
