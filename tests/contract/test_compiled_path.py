"""If the request path is compiled, a request runs no interpreted function of the package.

Functions that dataclasses and enumerations generate are interpreted even in compiled modules. Classes that are
instantiated for each request therefore define ``__init__`` explicitly.

Two tests are about faults of mypyc that the compiled modules must avoid.
"""

import ast
import gc
import json
import runpy
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from ortserve.core.compiled import IS_COMPILED
from ortserve.core.thread_pool import ThreadPool

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "tests" / "support" / "calls_profile.py"


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


def test_no_compiled_function_is_suspended_while_it_handles_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception would count as handled in the whole thread meanwhile, and after two such functions for ever.

    Unrelated exceptions then have it as their context, and its traceback is never freed.
    """
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    modules = runpy.run_path("setup.py")["modules"]()
    assert modules
    suspends = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith)
    found = [
        f"{path}:{inner.lineno}"
        for path in modules
        for block in ast.walk(ast.parse(Path(path).read_text()))
        for handled in (block.finalbody if isinstance(block, ast.Try) else [block])
        if isinstance(block, ast.Try | ast.ExceptHandler | ast.AsyncWith)
        for inner in ast.walk(handled)
        if isinstance(inner, suspends)
    ]
    assert found == []
