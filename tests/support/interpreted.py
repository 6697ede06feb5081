"""Tests for which modules must be interpreted: what is compiled cannot be replaced, nor a class of it be inherited."""

from typing import Final

import pytest

from ortserve.core.compiled import IS_COMPILED

WHY: Final = "puts something in the place of what is compiled"

interpreted_only: Final = pytest.mark.skipif(IS_COMPILED, reason=WHY)
