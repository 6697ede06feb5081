"""Whether the modules of the request path were compiled when the package was built (``setup.py``)."""

from pathlib import Path
from typing import Final

IS_COMPILED: Final = Path(__file__).suffix != ".py"
