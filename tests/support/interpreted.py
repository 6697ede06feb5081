"""Marks tests that need interpreted modules: compiled code cannot be patched, nor compiled classes be subclassed."""

from typing import Final

import pytest

from ortserve.core.compiled import IS_COMPILED

WHY: Final = "puts something in the place of what is compiled"

interpreted_only: Final = pytest.mark.skipif(IS_COMPILED, reason=WHY)
