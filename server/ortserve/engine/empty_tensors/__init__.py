"""Finds tensors of a model that may become empty although its inputs are not: an analysis with rules of operators."""

__all__ = ["analysis", "known"]
