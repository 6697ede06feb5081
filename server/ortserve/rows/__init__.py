"""Whether the rows of a batch are independent in a model, proven by following them through its graph.

An abstract interpretation: ``symbols`` are the numbers that shapes are made of, ``values`` what is claimed of a tensor,
``rules`` how operators change claims, ``walk`` goes through one graph, ``hypotheses`` are the axes that may carry rows,
and ``verdict`` is what comes out. ``reading`` reads the file without its weights. All of it is pure but for that.

*Proven* is a promise: with N entries along the batch axis of each input that carries rows, entry r of each output is
what row r gives alone, up to rounding. It holds while the requests of a batch agree in all other sizes and, byte for
byte, in the inputs without rows, while sizes with a name in ``equal_sizes`` are equal, no axis is empty, and each row
alone is a request that the model accepts. A batch may still be refused as a whole, for one row's sake or by a node that
no output needs; its requests then run alone.
"""

from ortserve.rows.graph import Model
from ortserve.rows.hypotheses import Axes, real_inputs, sum_terms
from ortserve.rows.reading import TooLargeError, parse_model, read_graph
from ortserve.rows.symbols import DEPENDENT, N, Number, Product
from ortserve.rows.values import Facts, Kind, Value
from ortserve.rows.verdict import Outcome, RowVerdict, claims, prove_axes, prove_model, prove_rows
from ortserve.rows.walk import TooMuchWorkError

__all__ = [
    "DEPENDENT",
    "Axes",
    "Facts",
    "Kind",
    "Model",
    "N",
    "Number",
    "Outcome",
    "Product",
    "RowVerdict",
    "TooLargeError",
    "TooMuchWorkError",
    "Value",
    "claims",
    "parse_model",
    "prove_axes",
    "prove_model",
    "prove_rows",
    "read_graph",
    "real_inputs",
    "sum_terms",
]
