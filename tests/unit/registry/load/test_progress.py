"""The steps of a load as they are shown."""

import signal
import subprocess

from fakes.clock import FakeClock
from ortserve.registry.load.progress import Progress


def test_time_counts_from_the_current_step() -> None:
    clock = FakeClock()
    progress = Progress(clock)
    clock.advance(3_000_000_000)
    assert progress.describe() == "waiting for its turn, for 3 s"
    progress.begin("opening the session")
    clock.advance(1_999_999_999)
    assert progress.describe() == "opening the session, for 1 s"


def test_part_prefixes_all_following_steps() -> None:
    progress = Progress(FakeClock())
    progress.begin("opening the session")
    progress.begin_part("instance 2 of 3")
    assert progress.describe() == "opening the session, for 0 s"
    progress.begin("opening the session")
    assert progress.describe() == "instance 2 of 3: opening the session, for 0 s"


def test_process_that_starts_while_its_load_is_cancelled_is_killed() -> None:
    progress = Progress(FakeClock())
    with progress.killing() as children:
        progress.cancel("the model is unloaded")
        children.append(subprocess.Popen(["sleep", "60"]))
        assert children[0].wait(30) == -signal.SIGKILL
