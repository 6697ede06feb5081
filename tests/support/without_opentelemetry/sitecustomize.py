"""Python imports this module at its start if its folder is in PYTHONPATH: the extra ``otel`` then appears missing."""

import sys

sys.modules["opentelemetry.sdk"] = None  # type: ignore[assignment]  # makes its import fail
