"""KServe's own client library, unmodified."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from apart import UnavailableError, installed_apart
from servers import LONG_S, ServerProcess

VERSION: Final = "0.21.0"


@pytest.fixture(scope="module")
def library() -> Path:
    """The library is installed separately, because it needs an older psutil than the project's tests."""
    try:
        return installed_apart(f"kserve-{VERSION}", f"kserve=={VERSION}")
    except UnavailableError as error:
        pytest.skip(f"kserve {VERSION} cannot be installed here: {error}")


@pytest.mark.timeout(400)
def test_kserves_clients_are_answered_on_both_protocols(library: Path, example_server: ServerProcess) -> None:
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("kserve_calls.py"), example_server.http, example_server.grpc],
        env=dict(os.environ) | {"PYTHONPATH": str(library)},
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert run.returncode == 0, run.stderr
    came = json.loads(run.stdout.splitlines()[-1])
    sums = [list(range(1, 17))]
    differences = [list(range(-1, 15))]
    empty = [[0, 16], [0, 16]]
    assert came == {
        "rest": [True, True, True],
        "rest binary=False": ["7", sums, differences],
        "rest binary=False rows=0": empty,
        "rest binary=True": ["7", sums, differences],
        "rest binary=True rows=0": empty,
        "grpc": [True, True, True],
        "grpc binary=False": ["7", sums, differences],
        "grpc binary=False rows=0": empty,
        "grpc binary=True": ["7", sums, differences],
        "grpc binary=True rows=0": empty,
    }
