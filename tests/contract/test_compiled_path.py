"""In a compiled build, the request path runs no interpreted code of the package.

What dataclasses and enumerations make for themselves is interpreted also where their module is compiled; of those that
are made for each request ``__init__`` is written out.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ortserve.core.compiled import IS_COMPILED

PROFILE = Path(__file__).parents[1] / "support" / "calls_profile.py"


@pytest.mark.skipif(not IS_COMPILED, reason="is about the compiled package")
@pytest.mark.parametrize("protocol", ["json", "binary", "grpc"])
def test_request_path_runs_compiled_code_only(protocol: str) -> None:
    run = subprocess.run([sys.executable, PROFILE, protocol], check=True, capture_output=True, text=True, timeout=120)
    per_request = json.loads(run.stdout)
    assert {name: count for name, count in per_request.items() if count >= 1} == {}
