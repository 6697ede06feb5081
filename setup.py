"""What ``pyproject.toml`` cannot say: where ``ORTSERVE_COMPILE=1`` asks for it, modules are compiled to C.

mypyc compiles them as they stand, after mypy has checked them. The extra ``compile`` brings both; a C compiler and
Python's headers have to be there. Without it the same modules are interpreted: only the time of a request changes.

``ORTSERVE_COMPILE_LEVEL`` is the level at which the C compiler optimizes, 3 where it is unset: 1 builds faster, for
tests.
"""

import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from setuptools import setup
from setuptools.command.build_ext import build_ext

PACKAGE: Final = Path("server/ortserve")

COMPILED: Final = (
    "batching/*.py",
    "codecs/binary_tensor.py",
    "codecs/bytes_elements.py",
    "codecs/grpc_*.py",
    "codecs/json_*.py",
    "codecs/rest.py",
    "codecs/shape_bounds.py",
    "core/*.py",
    "engine/binding.py",
    "engine/instance.py",
    "engine/output_buffers.py",
    "engine/plain_batch.py",
    "engine/row_layout.py",
    "engine/run_options.py",
    "engine/staging.py",
    "frontends/grpc/infer_calls.py",
    "frontends/grpc/native/*.py",
    "frontends/http/asgi_exchange.py",
    "frontends/http/connection.py",
    "frontends/http/infer_exchange.py",
    "frontends/http/limits.py",
    "frontends/http/protocol.py",
    "frontends/http/request_body.py",
    "frontends/http/request_head.py",
    "frontends/http/responses.py",
    "frontends/large_body.py",
    "frontends/load_reports.py",
    "frontends/tls/transport.py",
    "registry/catalog.py",
    "registry/served.py",
    "service/access.py",
    "service/accounts.py",
    "service/busy_polling.py",
    "service/call.py",
    "service/gate.py",
    "service/inference.py",
    "service/parameters.py",
    "service/poll_policy.py",
    "service/validation.py",
    "telemetry/histogram.py",
    "telemetry/metrics.py",
)
"""What every infer request passes, as patterns in the package."""

INTERPRETED: Final = (
    "batching/alarm.py",  # ctypes
    "core/dtypes.py",  # an enum whose members have an __init__
    "core/region.py",  # a base class of what is not compiled
    "frontends/grpc/native/compression.py",  # functions in functions, which hold themselves until garbage is collected
    "frontends/grpc/native/server.py",  # likewise
)
"""What stays as it is among them, and why."""


def modules() -> list[str]:
    """The paths of what is compiled."""
    found = {path for pattern in COMPILED for path in PACKAGE.glob(pattern)}
    left_out = {PACKAGE / path for path in INTERPRETED}
    return sorted(str(path) for path in found - left_out if path.name != "__init__.py")


class ParallelBuild(build_ext):
    """Runs a C compiler per processor: almost all files belong to one extension, which setuptools compiles serially."""

    def build_extensions(self) -> None:
        compiler: Any = self.compiler
        compile_file, compile_files = compiler._compile, compiler.compile
        started: list[Future[None]] = []

        def start_file(*arguments: Any) -> None:
            started.append(pool.submit(compile_file, *arguments))

        def wait_for_files(*arguments: Any, **keywords: Any) -> Any:
            objects = compile_files(*arguments, **keywords)
            while started:
                started.pop().result()
            return objects

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiler._compile, compiler.compile = start_file, wait_for_files
            super().build_extensions()


IS_FOR_METADATA: Final = not {"egg_info", "dist_info"}.isdisjoint(sys.argv)
"""pip asks for the metadata first, in a run of its own, which would check and translate all modules in vain."""

if os.environ.get("ORTSERVE_COMPILE") == "1" and not IS_FOR_METADATA:
    from mypyc.build import mypycify

    level = os.environ.get("ORTSERVE_COMPILE_LEVEL", "3")
    extensions = mypycify(modules(), opt_level=level, debug_level="0", multi_file=True)
    setup(ext_modules=extensions, cmdclass={"build_ext": ParallelBuild})
else:
    setup()
