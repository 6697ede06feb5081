"""Rollouts: a version is tried with requests of clients before it becomes ``stable``.

``decision`` compares outputs, counts times and judges the candidate (pure), ``live`` sends requests to it, ``control``
starts and ends rollouts.
"""

__all__ = ["control"]
