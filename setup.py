"""Compiles the modules of the request path to C if ``ORTSERVE_COMPILE=1`` is set.

mypyc compiles the unchanged modules after mypy has checked them. Both come with the extra ``compile``; a C compiler and
Python's headers are required. Without compilation the same modules are interpreted: only the time of a request changes.

``ORTSERVE_COMPILE_LEVEL`` is the optimization level of the C compiler, 3 by default. Level 0 builds faster, for tests.
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
    "codecs/bounds.py",
    "codecs/grpc_*.py",
    "codecs/json_*.py",
    "codecs/rest.py",
    "core/*.py",
    "engine/host_binding.py",
    "engine/instance.py",
    "engine/output_buffers.py",
    "engine/runs.py",
    "engine/staging.py",
    "frontends/grpc/infer_calls.py",
    "frontends/grpc/native/*.py",
    "frontends/grpc/quick_calls.py",
    "frontends/http/asgi_exchange.py",
    "frontends/http/connection.py",
    "frontends/http/context.py",
    "frontends/http/cross_origin.py",
    "frontends/http/infer_exchange.py",
    "frontends/http/limits.py",
    "frontends/http/protocol.py",
    "frontends/http/request_body.py",
    "frontends/http/request_head.py",
    "frontends/http/responses.py",
    "frontends/http/timeouts.py",
    "frontends/idle_connections.py",
    "frontends/large_body.py",
    "frontends/load_reports.py",
    "frontends/long_reads.py",
    "frontends/read_rate.py",
    "frontends/tls/record_budget.py",
    "frontends/tls/transport.py",
    "frontends/unsent_answers.py",
    "registry/catalog.py",
    "registry/ensemble/limits.py",
    "registry/ensemble/route.py",
    "registry/ensemble/run.py",
    "registry/ensemble/served_ensemble.py",
    "registry/ensemble/turns.py",
    "registry/served_model.py",
    "registry/served_version.py",
    "service/access.py",
    "service/busy_polling.py",
    "service/call.py",
    "service/classification.py",
    "service/gate.py",
    "service/inference.py",
    "service/recorder.py",
    "service/validation.py",
    "service/waiting_calls.py",
    "telemetry/metrics.py",
    "telemetry/readings.py",
    "telemetry/series.py",
)
"""The modules of the request path, as patterns in the package."""

INTERPRETED: Final = (
    "batching/timers.py",  # ctypes
    "core/agreement.py",  # not on the path of requests
    "core/dtypes.py",  # an enum whose members have an __init__
    "core/region.py",  # a base class of interpreted classes
    "core/thread_pool.py",  # threads keep weak references to a pool, which mypyc's deallocation leaves dangling
)
"""Exceptions to these patterns, with the reason."""


def modules() -> list[str]:
    """The paths of the compiled modules."""
    found = {path for pattern in COMPILED for path in PACKAGE.glob(pattern)}
    left_out = {PACKAGE / path for path in INTERPRETED}
    return sorted(str(path) for path in found - left_out if path.name != "__init__.py")


class ParallelBuild(build_ext):
    """Compiles files in parallel: almost all belong to one extension, whose files setuptools compiles one by one."""

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
"""pip reads the metadata in a separate run first, which must not check and translate all modules."""

if os.environ.get("ORTSERVE_COMPILE") == "1" and not IS_FOR_METADATA:
    from mypyc.build import mypycify

    level = os.environ.get("ORTSERVE_COMPILE_LEVEL", "3")
    extensions = mypycify(modules(), opt_level=level, debug_level="0", multi_file=True)
    setup(ext_modules=extensions, cmdclass={"build_ext": ParallelBuild})
else:
    setup()
