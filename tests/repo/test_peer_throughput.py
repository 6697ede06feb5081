"""The comparison with other servers counts whole servers."""

import subprocess
import sys
from typing import Final

from harness import cpu_s

BURN_S: Final = 0.2


def test_processor_time_includes_processes_that_ended() -> None:
    burn = f"import time\nwhile time.process_time() < {BURN_S}: pass"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_s(process.pid) >= BURN_S
        process.communicate(b"\n")
