"""How old a connection may become, on either protocol."""

import random
from typing import Final

_SPREAD: Final = 0.1
"""Part of the age by which a connection's own is shorter or longer at most."""


def draw_age_s(max_age_s: float) -> float:
    """How old one connection becomes, so that those that came together do not all go together."""
    return max_age_s * random.uniform(1 - _SPREAD, 1 + _SPREAD)  # noqa: S311 - no secret
