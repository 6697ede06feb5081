"""The processes that generate a load."""

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from ortserve.clock import monotonic_ns
from ortserve.tools.address import Address
from ortserve.tools.bench.generator import READY, STOP, Finished, Work
from ortserve.tools.bench.generators import Generators
from ortserve.tools.bench.samples import Chunk
from ortserve.tools.bench.target import ServerPlan


@pytest.fixture
def plan() -> Iterator[ServerPlan]:
    """A plan for a server that accepts connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        address = Address(f"http://127.0.0.1:{port}", "127.0.0.1", port, is_tls=False, is_grpc=False, headers={})
        yield ServerPlan(address, (b"request",), is_stream=False, max_connections=1)


def test_a_generator_that_waits_for_the_start_ends_with_its_pipe(plan: ServerPlan) -> None:
    """The measuring process may be interrupted at that moment."""
    with Generators(1) as generators:
        (pipe,), (process,) = generators._pipes, generators._processes
        pipe.send(Work(0, plan, 1, None, warmup_s=0, seconds=1, timeout_s=1))
        assert pipe.recv() == READY

    assert process.returncode == 0, "it had to be killed"


def test_a_generator_that_is_stopped_before_the_measurement_used_no_time_in_it(plan: ServerPlan) -> None:
    with Generators(1) as generators:
        (pipe,) = generators._pipes
        pipe.send(Work(0, plan, 1, None, warmup_s=60, seconds=1, timeout_s=0.1))
        assert pipe.recv() == READY
        pipe.send(monotonic_ns())
        assert isinstance(pipe.recv(), Chunk)  # the load has begun
        pipe.send(STOP)
        while isinstance(finished := pipe.recv(), Chunk):
            pass

    assert isinstance(finished, Finished)
    assert (finished.end_ns - finished.begin_ns, finished.cpu_ns) == (1, 0)


def test_an_interruption_is_left_to_the_measuring_process_from_the_start_on() -> None:
    with Generators(1) as generators:
        (pipe,), (process,) = generators._pipes, generators._processes
        os.kill(process.pid, signal.SIGINT)
        pipe.close()
        assert process.wait(60) == 0  # on a busy machine, its imports take longer than the context manager waits
