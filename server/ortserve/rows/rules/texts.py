"""Operators on texts: tokens are padded to the longest row, which only a vectorizer may take."""

from typing import Final

from ortserve.rows.graph import FLOAT, STRING
from ortserve.rows.rules.call import Call, NotKnownError, Output, RowsMeetError, Rules, rule
from ortserve.rows.values import Facts


def normalize(call: Call) -> Output:
    """``StringNormalizer`` takes ``[C]`` or ``[1, C]``; with stop words it drops entries."""
    value = call.operand(0)
    dims = call.dims(value)
    if call.attributes.get("stopwords"):
        if value.is_rows:
            raise RowsMeetError("drops stop words, after which rows are no longer at their places")
        raise NotKnownError("gives a number of results that is not known")
    if value.is_rows and len(dims) == 2 and value.axis == 0:
        raise RowsMeetError("takes one row alone, but not several")
    return call.same_shape(value, STRING)


def tokenize(call: Call) -> Output:
    value = call.operand(0)
    dims = call.dims(value)
    if call.integer("mark", 0):
        raise NotKnownError("marks the beginning and the end of texts")
    facts = Facts(padding=call.text("pad_value", ""))
    return call.result((*dims, call.symbols.fresh(0)), value, value.axis, STRING, facts=facts)


def vectorize(call: Call) -> Output:
    """``TfIdfVectorizer`` counts n-grams in each row of a matrix; a vector is one row."""
    value = call.operand(0)
    dims = call.dims(value)
    if len(dims) != 2:
        if value.is_rows:
            raise RowsMeetError("takes the rows for the entries of one row")
        raise NotKnownError(f"has an operand of {len(dims)} dimensions")
    if value.is_rows and value.axis != 0:
        raise RowsMeetError("counts along the axis of the rows")
    padding = value.facts.padding
    vocabulary = call.attributes.get("pool_strings")
    if padding is not None and (not isinstance(vocabulary, tuple) or padding in vocabulary):
        raise RowsMeetError("counts the padding up to the longest row")
    indexes = call.integers("ngram_indexes") or ()
    return call.result((dims[0], max(indexes, default=-1) + 1), value, 0, FLOAT)


RULES: Final[Rules] = {
    ("", "StringNormalizer"): rule(normalize),
    ("com.microsoft", "Tokenizer"): rule(tokenize),
    ("", "TfIdfVectorizer"): rule(vectorize, keeps_padding=True),
}
