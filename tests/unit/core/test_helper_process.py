"""Helper processes that cannot be started, or that do not answer."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from ortserve.codecs.json_process import unpack_load
from ortserve.core.helper_process import HelperProcess
from ortserve.core.large_memory import LargeMemory
from ortserve.errors import ErrorKind, ServeError
from scarcity import few_descriptors


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("free", [0, 1, 2, 4])
def test_process_without_descriptors_is_overloaded_and_is_started_later(free: int) -> None:
    helper = HelperProcess("ortserve.codecs.json_process", "reads JSON", LargeMemory())
    probes = [os.open("/dev/null", os.O_RDONLY) for _ in range(free + 1)]
    for probe in probes:
        os.close(probe)
    before = open_descriptors()
    with few_descriptors(probes[free]), pytest.raises(ServeError, match="reads JSON cannot be started: Too") as caught:
        helper.call(("load", ()), b"{}")
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert open_descriptors() == before
    try:
        assert unpack_load(helper.call(("load", ()), b'{"parameters": {"a": 1}}')) == {"a": 1}
    finally:
        helper.close()


@pytest.mark.parametrize("content_bytes", [10, 4 * 2**20], ids=["receiving", "sending"])
def test_stopped_process_fails_its_call_soon_and_the_next_call_starts_another(content_bytes: int) -> None:
    helper = HelperProcess("ortserve.codecs.json_process", "reads JSON", LargeMemory())
    try:
        helper.call(("load", ()), b"{}")
        process = helper._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(ServeError, match="reads JSON was stopped by a signal while it read") as caught:
            helper.call(("load", ()), b" " * content_bytes)
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert time.monotonic() - began_s < 30, "the server gives up a silent process after 60 s only"
        assert process.returncode == -signal.SIGKILL
        assert unpack_load(helper.call(("load", ()), b'{"parameters": {"a": 1}}')) == {"a": 1}
    finally:
        helper.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_process_that_starts_is_not_ended_by_a_signal_for_the_process_group(number: signal.Signals) -> None:
    helper = HelperProcess("ortserve.codecs.json_process", "reads JSON", LargeMemory())
    try:
        helper._start()
        process = helper._process
        assert process is not None
        os.kill(process.pid, number)
        assert unpack_load(helper.call(("load", ()), b'{"parameters": {"a": 1}}')) == {"a": 1}
        assert helper._process is process
    finally:
        helper.close()


def test_process_that_is_stopped_for_a_moment_answers() -> None:
    helper = HelperProcess("ortserve.codecs.json_process", "reads JSON", LargeMemory())

    def continue_after_a_check(pid: int) -> None:
        while helper._stopped_ticks < 0:
            time.sleep(0.05)
        os.kill(pid, signal.SIGCONT)

    try:
        helper.call(("load", ()), b"{}")
        process = helper._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        continuing = threading.Thread(target=continue_after_a_check, args=(process.pid,), daemon=True)
        continuing.start()
        assert unpack_load(helper.call(("load", ()), b'{"parameters": {"a": 1}}')) == {"a": 1}
        assert helper._process is process
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        for _ in range(2):  # a byte came between them
            helper._check_progress(1)
    finally:
        helper.close()
