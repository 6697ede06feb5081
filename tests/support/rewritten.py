"""Lets each worker of pytest-xdist rewrite the assertions of its share of the test files, before all import all files.

Otherwise every worker rewrites every file in a fresh checkout, which takes as long as the rest of the collection. A
worker that reaches a file before the worker whose share it is rewrites the file itself.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.assertion import rewrite  # private: pytest's import hook also runs the module


def rewrite_share(config: pytest.Config, files: Sequence[Path], worker: int, workers: int) -> None:
    """Rewrite every ``workers``-th file of ``files`` from ``worker`` on, unless its result is on disk and current."""
    if sys.dont_write_bytecode:
        return
    state = config.stash[rewrite.assertstate_key]
    for file in files[worker::workers]:
        folder = rewrite.get_cache_dir(file)
        result = folder / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, result) is None and rewrite.try_makedirs(folder):
            source, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, source, result)
