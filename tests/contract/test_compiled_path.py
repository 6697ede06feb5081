"""If the request path is compiled, a request runs no interpreted function of the package.

Functions that dataclasses and enumerations generate are interpreted even in compiled modules. Classes that are
instantiated for each request therefore define ``__init__`` explicitly.
"""

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from ortserve.core.compiled import IS_COMPILED
from ortserve.core.thread_pool import ThreadPool

PROFILE = Path(__file__).parents[1] / "support" / "calls_profile.py"


@pytest.mark.skipif(not IS_COMPILED, reason="is about the compiled package")
@pytest.mark.parametrize("protocol", ["json", "binary", "grpc"])
def test_request_runs_no_interpreted_function_of_the_package(protocol: str) -> None:
    profile = subprocess.run(
        [sys.executable, PROFILE, protocol], check=True, capture_output=True, text=True, timeout=120
    )
    per_request = json.loads(profile.stdout)
    assert {name: count for name, count in per_request.items() if count >= 1} == {}


def test_weak_reference_to_a_thread_pool_ends_with_the_pool() -> None:
    """The threads of a pool have such references. Those to a class that mypyc derives from another one dangle."""
    pool = ThreadPool(1, "short-lived")
    reference = weakref.ref(pool)
    pool.shutdown()
    del pool
    gc.collect()
    assert reference() is None
