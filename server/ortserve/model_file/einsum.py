"""Equations of Einsum, for the checks of empty tensors at load and of requests."""


def is_plain_product(equation: str) -> bool:
    """Whether an equation is a product of matrices as MatMul computes it."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        result = "".join(sorted(letter for letter in set(terms) - {","} if terms.count(letter) == 1))
    first, _, second = terms.partition(",")
    batch, summed = first[:-2], first[-1:]
    return second[:-1] == batch + summed and result == first[:-1] + second[-1:]
