"""Helper processes that cannot be started."""

import os
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
