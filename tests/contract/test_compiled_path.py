"""If the request path is compiled, a request runs no interpreted function of the package.

Functions that dataclasses and enumerations generate are interpreted even in compiled modules. Classes that are
instantiated for each request therefore define ``__init__`` explicitly.
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
def test_request_runs_no_interpreted_function_of_the_package(protocol: str) -> None:
    profile = subprocess.run(
        [sys.executable, PROFILE, protocol], check=True, capture_output=True, text=True, timeout=120
    )
    per_request = json.loads(profile.stdout)
    assert {name: count for name, count in per_request.items() if count >= 1} == {}
