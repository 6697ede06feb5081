"""The processes that generate a load."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import builders
from ortserve.clock import monotonic_ns
from ortserve.errors import ServeError
from ortserve.tools.address import Address
from ortserve.tools.bench.generator import READY, STOP, Finished, LoadPart
from ortserve.tools.bench.generators import Generators
from ortserve.tools.bench.outcomes import Chunk
from ortserve.tools.bench.target import ModelPlan, Plan, ServerPlan
from ortserve.tools.subject import Subject


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
        pipe.send(LoadPart(0, plan, 1, None, warmup_s=0, seconds=1, timeout_s=1))
        assert pipe.recv() == READY

    assert process.returncode == 0, "it had to be killed"


def test_a_generator_that_is_stopped_before_the_measurement_used_no_time_in_it(plan: ServerPlan) -> None:
    with Generators(1) as generators:
        (pipe,) = generators._pipes
        pipe.send(LoadPart(0, plan, 1, None, warmup_s=60, seconds=1, timeout_s=0.1))
        assert pipe.recv() == READY
        pipe.send(monotonic_ns())
        assert isinstance(pipe.recv(), Chunk)  # the load has begun
        pipe.send(STOP)
        while isinstance(finished := pipe.recv(), Chunk):
            pass

    assert isinstance(finished, Finished)
    assert (finished.end_ns - finished.begin_ns, finished.cpu_ns) == (1, 0)


def test_a_server_that_ends_before_the_load_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = Address(f"http://127.0.0.1:{port}", "127.0.0.1", port, is_tls=False, is_grpc=False, headers={})
    gone = ServerPlan(address, (b"request",), is_stream=False, max_connections=1)
    with Generators(1) as generators, pytest.raises(ServeError) as caught:
        generators.offer([LoadPart(0, gone, 1, None, warmup_s=0, seconds=1, timeout_s=1)], lambda seen, elapsed_s: True)

    assert caught.value.message == f"http://127.0.0.1:{port}: cannot reach the server: Connection refused"


@pytest.mark.parametrize("way", ["", "batcher", "run"])
def test_a_generator_that_is_stopped_at_its_start_ends(plan: ServerPlan, tmp_path: Path, way: str) -> None:
    """Both messages usually arrive in the same turn of its event loop, as it is stopped while they are sent."""
    chosen: Plan = plan
    if way:
        inputs = ((np.zeros((1, 64), np.float32),),)
        chosen = ModelPlan(Subject("mlp", builders.mlp(tmp_path / "mlp.onnx")), way, None, 1, inputs, 1)
    with Generators(1) as generators:
        (pipe,), (process,) = generators._pipes, generators._processes
        pipe.send(LoadPart(0, chosen, 1, None, warmup_s=0, seconds=3600, timeout_s=60))
        assert pipe.recv() == READY
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        pipe.send(monotonic_ns())
        pipe.send(STOP)
        os.kill(process.pid, signal.SIGCONT)
        while pipe.poll(60) and isinstance(message := pipe.recv(), Chunk):
            pass

    assert isinstance(message, Finished)


def raise_interruption() -> int:
    """Called when a message is unpickled."""
    signal.raise_signal(signal.SIGINT)
    return 7


class Interrupting:
    """An integer whose reception interrupts the receiver."""

    def __reduce__(self) -> tuple[Callable[[], int], tuple[()]]:
        return raise_interruption, ()


def test_an_interruption_during_a_message_loses_no_message(plan: ServerPlan) -> None:
    received: list[object] = []

    def generate(pipe: Connection) -> None:
        received.append(pipe.recv())
        pipe.send(READY)
        received.append(pipe.recv())
        number: Any = Interrupting()
        pipe.send(Finished(0, 1, number, None, {}))
        received.append(pipe.recv())
        pipe.close()

    ours, theirs = Pipe()
    thread = threading.Thread(target=generate, args=(theirs,))
    thread.start()
    with Generators(0) as generators, ours:
        generators._pipes.append(ours)
        seen = generators.offer([LoadPart(0, plan, 1, None, 0, 60, 1)], lambda seen, elapsed_s: True)
    thread.join()

    assert seen.is_interrupted
    assert seen.finished == [Finished(0, 1, 7, None, {})]
    assert received[-1] == STOP


def test_an_interruption_is_left_to_the_measuring_process_from_the_start_on() -> None:
    with Generators(1) as generators:
        (pipe,), (process,) = generators._pipes, generators._processes
        os.kill(process.pid, signal.SIGINT)
        pipe.close()
        assert process.wait(60) == 0  # on a busy machine, its imports take longer than the context manager waits
