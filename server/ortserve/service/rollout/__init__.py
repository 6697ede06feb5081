"""Rollouts: a version is tried with requests of clients before it takes the place of ``stable``.

``decision`` compares outputs, keeps times and judges (pure), ``live`` sends requests to the candidate, ``control``
starts and ends rollouts.
"""

__all__ = ["control"]
