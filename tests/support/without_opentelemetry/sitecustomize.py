"""Python imports this by itself where its folder is in PYTHONPATH: as if the extra ``otel`` were not installed."""

import sys

sys.modules["opentelemetry.sdk"] = None  # type: ignore[assignment]  # makes its import fail
