"""Which requests of a model may share a batch: those of one shape class."""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, TypeAlias

from ortserve.core.batch import Arrays
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import is_absent
from ortserve.core.terms import Alone
from ortserve.rows import sum_terms

_MOST_VALUE_BYTES: Final = 64 * 1024
"""Of an input without rows, which is compared by value: a rate, a scale, a list of labels."""
_MOST_KEPT: Final = 256
"""Sets of shapes whose verdict is kept."""

Shapes: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""Of a row of each input; None for one that is absent."""


class ShapeClasses:
    """Finds the shape class of a request, of a model that has several. Any thread."""

    def __init__(self, signature: ModelSignature, padding: Padding | None) -> None:
        """``signature`` is of the model itself; ``padding`` is None where no request is padded."""
        self._is_batched = signature.is_batched
        self._padding = padding
        self._wholes = [
            (index, spec.is_optional)
            for index, spec in enumerate(signature.inputs)
            if signature.is_batched and spec.batch_axis is None
        ]
        self._sizes = EqualSizes(signature)
        self._may_share = lru_cache(_MOST_KEPT)(self._judge_shapes)

    def find(self, inputs: Arrays) -> Hashable:
        """The class of a request: equal for those that may share a batch, ``Alone`` for one that must not.

        A request must run alone that brings an initializer of the model's, that has an axis of no elements, or whose
        sizes disagree with the names of the model's dimensions where the proof that rows are independent needs them.

        Args:
            inputs: As batches hold them.

        Raises:
            ServeError: invalid_input, for inputs that disagree on a padded dimension.
        """
        first = 1 if self._is_batched else 0
        shapes: Shapes = tuple([None if is_absent(array) else array.shape[first:] for array in inputs])
        if not self._is_batched:
            return shapes
        key: Hashable = shapes
        if self._padding is not None:
            key = self._padding.shape_class(inputs), tuple([shape is None for shape in shapes])
        if not self._may_share(shapes):
            return Alone()
        for index, is_optional in self._wholes:
            if shapes[index] is None:
                continue
            value = inputs[index][0, ...]
            if is_optional or value.nbytes > _MOST_VALUE_BYTES:
                return Alone()
            elements = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
            key = key, blake2b(elements, digest_size=16).hexdigest()
        return key

    def _judge_shapes(self, shapes: Shapes) -> bool:
        return not any(shape is not None and 0 in shape for shape in shapes) and self._sizes.agree(shapes)


class EqualSizes:
    """The conditions on sizes under which the rows of a model were proven to be independent."""

    def __init__(self, signature: ModelSignature) -> None:
        self._names = set(signature.equal_sizes)
        self._sums = {name: terms for name in signature.equal_sizes if (terms := sum_terms(name))}
        # Terms of sums are dimensions, too.
        self._names |= {term for terms in self._sums.values() for term in terms if isinstance(term, str)}
        self._dims = [
            tuple(name for axis, name in enumerate(spec.dim_names) if axis != spec.batch_axis)
            for spec in signature.inputs
        ]

    def agree(self, shapes: Shapes) -> bool:
        """Whether each dimension has one size in all of these, and sums have theirs."""
        if not self._names:
            return True
        sizes: dict[str, int] = {}
        for names, shape in zip(self._dims, shapes, strict=True):
            for name, size in zip(names, shape or (), strict=False):
                if name in self._names and sizes.setdefault(name, size) != size:
                    return False
        return all(self._adds_up(name, terms, sizes) for name, terms in self._sums.items())

    def _adds_up(self, name: str, terms: Sequence[str | int], sizes: dict[str, int]) -> bool:
        if name not in sizes:  # of an optional input that is absent
            return True
        unknown = [term for term in terms if isinstance(term, str) and term not in sizes]
        rest = sizes[name] - sum(term if isinstance(term, int) else sizes.get(term, 0) for term in terms)
        if not unknown:
            return rest == 0
        if len(unknown) > 1 or rest < 1:
            return False
        sizes[unknown[0]] = rest
        return True
