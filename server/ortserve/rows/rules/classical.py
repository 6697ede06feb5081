"""Rules of classical models (ai.onnx.ml) on a matrix with a row for each item, and of operators on strings."""

from dataclasses import replace
from typing import Final

from ortserve.model_file.graph import FLOAT, INT64, STRING
from ortserve.rows.number import Number
from ortserve.rows.rules.call import (
    Call,
    NotKnownError,
    Output,
    RandomError,
    RowsMeetError,
    Rule,
    Rules,
    check_sizes,
    off_axis,
)
from ortserve.rows.values import Facts, Value

DOMAIN: Final = "ai.onnx.ml"


def _need_features(call: Call, value: Value, count: int) -> None:
    if dims := call.dims(value):
        call.symbols.need(dims[-1], count)


def _list(call: Call, name: str) -> tuple[object, ...]:
    given = call.attributes.get(name)
    return given if isinstance(given, tuple) else ()


def _item_count(call: Call, value: Value) -> Number:
    """The number of items of a matrix. Raises an error unless the rows are the items."""
    dims = call.dims(value)
    if value.is_rows and (len(dims) != 2 or value.axis != 0):
        raise RowsMeetError("treats the rows as the features of one item")
    if len(dims) != 2:
        raise NotKnownError(f"has an operand of {len(dims)} dimensions")
    return dims[0]


def classifier(call: Call) -> Output:
    value = call.operand(0)
    items = _item_count(call, value)
    if call.text("post_transform", "NONE") == "PROBIT":
        raise RandomError("may leave scores unwritten, which then hold earlier content of the memory")
    strings = call.attributes.get("classlabels_strings") or call.attributes.get("classlabels_string")
    labels = strings or call.attributes.get("classlabels_ints") or call.attributes.get("classlabels_int64s")
    count = len(labels) if isinstance(labels, tuple) else 0
    scores: Number = call.symbols.fresh(1)  # support vector machines may have one for each pair of classes
    if call.op == "LinearClassifier":
        intercepts = call.attributes.get("intercepts")
        if isinstance(intercepts, tuple):
            _need_features(call, value, len(_list(call, "coefficients")) // max(len(intercepts), 1))
            scores = 2 if count == 2 else len(intercepts)  # of two classes, ONNX Runtime adds a missing score
    elif call.op == "TreeEnsembleClassifier" and count:
        scores = count
    return [
        call.result((items,), value, 0, STRING if strings else INT64),
        call.result((items, scores), value, 0, FLOAT),
    ]


def regressor(call: Call) -> Output:
    value = call.operand(0)
    items = _item_count(call, value)
    targets = 1  # all that a support vector machine has
    if call.op == "LinearRegressor":
        targets = call.integer("targets", 1)
        _need_features(call, value, len(_list(call, "coefficients")) // max(targets, 1))
    elif call.op != "SVMRegressor":
        targets = call.integer("n_targets", 1)
    return call.result((items, targets), value, 0, FLOAT)


def normalizer(call: Call) -> Output:
    value = call.operand(0)
    _item_count(call, value)
    return call.same_shape(value, FLOAT)


def zip_map(call: Call) -> Output:
    """ZipMap: its sequence of maps is treated as a vector with an entry for each item."""
    value = call.operand(0)
    return call.result((_item_count(call, value),), value, 0)


def per_feature(call: Call) -> Output:
    """Operators with a parameter for each entry of axis 1. ONNX Runtime cycles through them over all elements."""
    value = call.operand(0)
    if value.is_rows and (value.axis != 0 or len(call.dims(value)) < 2):
        raise RowsMeetError("applies its parameters in turn over all elements, so those of a row depend on its index")
    _need_features(call, value, max(len(_list(call, name)) for name in ("offset", "imputed_value_floats")))
    return call.same_shape(value, FLOAT if call.op == "Scaler" else None)


def elementwise(call: Call) -> Output:
    dtype = 0
    if call.op == "LabelEncoder":
        for name, kind in (("strings", STRING), ("int64s", INT64), ("floats", FLOAT)):
            if f"values_{name}" in call.attributes:
                dtype = kind
    if call.op == "CategoryMapper":
        dtype = INT64 if call.operand(0).dtype == STRING else STRING
    return call.same_shape(call.operand(0), call.operand(0).dtype if call.op == "Binarizer" else dtype)


def one_hot_encoder(call: Call) -> Output:
    value = call.operand(0)
    categories = call.attributes.get("cats_strings") or call.attributes.get("cats_int64s")
    if not isinstance(categories, tuple):
        raise NotKnownError("has no categories")
    return call.result((*call.dims(value), len(categories)), value, value.axis, FLOAT)


def array_feature_extractor(call: Call) -> Output:
    value, indices = call.operand(0), call.operand(1)
    dims = call.dims(value)
    if value.is_rows and len(dims) < 2:
        raise RowsMeetError("treats the rows as the features of one item")
    dims = (1, *dims) if len(dims) == 1 else dims
    picked = call.dims(indices)
    _need_features(call, value, max((each for each in indices.elements or () if isinstance(each, int)), default=-1) + 1)
    lengths = (*dims[:-1], call.symbols.product(picked))
    if not indices.is_rows:
        off_axis(value, (len(dims) - 1,), "selects features")
        return call.result(lengths, value, value.axis, value.dtype)
    if value.is_rows:
        raise RowsMeetError("selects from all rows by indices that depend on the rows")
    product = call.symbols.product
    like = replace(
        indices,
        outer=product((*picked[: indices.axis], indices.outer)),
        inner=product((indices.inner, *picked[indices.axis + 1 :])),
    )
    return call.result(lengths, like, len(lengths) - 1, value.dtype)


def feature_vectorizer(call: Call) -> Output:
    values = call.present()
    first = values[0]
    if any(value.is_rows != first.is_rows for value in values):
        raise RowsMeetError("joins rows with a tensor without rows")
    items = _item_count(call, first)
    for value in values:
        _item_count(call, value)
        if value.is_rows and not value.carries_like(first):
            raise RowsMeetError("joins rows that lie in different orders")
    if first.is_rows:
        check_sizes(call)
    widths = call.integers("inputdimensions") or ()  # ONNX Runtime cuts or pads the operands to these widths
    return call.result((items, sum(widths)), first, 0, FLOAT)


def normalize(call: Call) -> Output:
    """``StringNormalizer`` accepts ``[C]`` or ``[1, C]``; with stop words it drops entries."""
    value = call.operand(0)
    dims = call.dims(value)
    if call.attributes.get("stopwords"):
        if value.is_rows:
            raise RowsMeetError("drops stop words, so later rows change their index")
        raise NotKnownError("returns an unknown number of results")
    if value.is_rows and len(dims) == 2 and value.axis == 0:
        raise RowsMeetError("accepts one row, but not several")
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
            raise RowsMeetError("treats the rows as the entries of one item")
        raise NotKnownError(f"has an operand of {len(dims)} dimensions")
    if value.is_rows and value.axis != 0:
        raise RowsMeetError("counts along the axis of the rows")
    padding = value.facts.padding
    vocabulary = call.attributes.get("pool_strings")
    if padding is not None and (not isinstance(vocabulary, tuple) or padding in vocabulary):
        raise RowsMeetError("counts the padding, whose length depends on the longest row of the batch")
    indexes = call.integers("ngram_indexes") or ()
    return call.result((dims[0], max(indexes, default=-1) + 1), value, 0, FLOAT)


RULES: Final[Rules] = {
    **{(DOMAIN, op): Rule(classifier) for op in ("LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier")},
    **{
        (DOMAIN, op): Rule(regressor)
        for op in ("LinearRegressor", "SVMRegressor", "TreeEnsemble", "TreeEnsembleRegressor")
    },
    (DOMAIN, "Normalizer"): Rule(normalizer),
    (DOMAIN, "ZipMap"): Rule(zip_map),
    **{(DOMAIN, op): Rule(per_feature) for op in ("Imputer", "Scaler")},
    **{(DOMAIN, op): Rule(elementwise) for op in ("Binarizer", "CategoryMapper", "LabelEncoder")},
    (DOMAIN, "OneHotEncoder"): Rule(one_hot_encoder),
    (DOMAIN, "ArrayFeatureExtractor"): Rule(array_feature_extractor),
    (DOMAIN, "FeatureVectorizer"): Rule(feature_vectorizer),
    ("", "StringNormalizer"): Rule(normalize),
    ("com.microsoft", "Tokenizer"): Rule(tokenize),
    ("", "TfIdfVectorizer"): Rule(vectorize, keeps_padding=True),
}
