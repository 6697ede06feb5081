"""Preloaded processes: what they share with others, and starts that the template cannot serve."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import preloaded
from ortserve.example import repository_path
from servers import SHORT_WARMUP, serving

pytestmark = pytest.mark.usefixtures("preloaded_commands")


def run(program: str, **options: Any) -> str:
    command = [sys.executable, "-c", f"from ortserve.core import dtypes; {program}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60, **options)
    return bytes(done.stdout).decode()


IS_PRELOADED = "import sys; print('forked' if 'onnxslim' in sys.modules else 'alone')"


def test_starts_after_the_end_of_the_template_succeed() -> None:
    assert run(IS_PRELOADED) == "forked\n"
    preloaded._TEMPLATES["tools"]._process.kill()
    preloaded._TEMPLATES["tools"]._process.wait()
    assert run(IS_PRELOADED) == "alone\n"
    assert run(IS_PRELOADED) == "forked\n"


def test_server_starts_after_the_end_of_the_template() -> None:
    with serving(repository_path(), *SHORT_WARMUP):
        preloaded._TEMPLATES["servers"]._process.kill()
        preloaded._TEMPLATES["servers"]._process.wait()
    with serving(repository_path(), *SHORT_WARMUP) as server:
        assert isinstance(server._process, subprocess.Popen)


@pytest.mark.parametrize("options", [{"umask": 0o77}, {"process_group": 0}, {"close_fds": False}])
def test_options_that_no_forked_process_follows_start_the_interpreter(options: dict[str, Any]) -> None:
    assert run(IS_PRELOADED, **options) == "alone\n"


@pytest.mark.parametrize("name", ["TZ", "HOME", "MPLCONFIGDIR", "GRPC_VERBOSITY", "MKL_NUM_THREADS"])
def test_variables_that_libraries_read_early_start_the_interpreter(name: str) -> None:
    assert run(IS_PRELOADED, env={**os.environ, name: ""}) == "alone\n"


def test_folders_of_pythonpath_come_first_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "of_this_test.py").write_text("number = 3")
    # Without the folder of Python's own modules, which has a sitecustomize in Debian's packages.
    others = [folder for folder in sys.path if folder and not (Path(folder) / "sitecustomize.py").exists()]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "added"), *others]))
    program = f"{IS_PRELOADED}; import of_this_test; print(of_this_test.number, sys.path[:2])"
    assert run(program) == f"forked\n3 ['', '{tmp_path / 'added'}']\n"


def test_folder_of_pythonpath_with_sitecustomize_starts_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*filter(None, sys.path), str(tmp_path)]))
    assert run(IS_PRELOADED) == "alone\n"


def test_exit_waits_for_threads_and_functions_of_atexit_and_writes_all_output() -> None:
    program = """from ortserve.core import dtypes
import atexit, ctypes, sys, threading, time

def late():
    time.sleep(0.05)
    atexit.register(print, "atexit")

threading.Thread(target=late).start()
ctypes.CDLL(None).printf(b"native\\n")
sys.exit(3 if "onnxslim" in sys.modules else 4)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, sorted(done.stdout.split())) == (3, [b"atexit", b"native"])


def test_exit_whose_output_nobody_reads_has_the_status_of_the_interpreter() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = "from ortserve.core import dtypes; import sys; sys.stdout.write('x'); sys.exit(0)"
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run([sys.executable, "-c", program], stdout=output, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, b"BrokenPipeError" in done.stderr) == (120, True)


def test_exit_destroys_no_modules() -> None:
    program = """from ortserve.core import dtypes
import os, sys, types

class Left:
    def __del__(self, write=os.write):
        write(1, b"destroyed")

sys.modules["holder"] = types.ModuleType("holder")
sys.modules["holder"].left = Left()
"""
    assert run(IS_PRELOADED + "\n" + program) == "forked\n"


@pytest.mark.parametrize("change", ["sys.stdout.close()", "sys.stdout = None", "sys.stderr = None"])
def test_exit_without_a_stream_has_its_status(change: str) -> None:
    status = "3 if 'onnxslim' in sys.modules else 4"
    program = f"from ortserve.core import dtypes; import sys; {change}; sys.exit({status})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (3, b"")


def test_processes_do_not_share_random_numbers() -> None:
    program = "import numpy; print(numpy.random.random())"
    assert run(program) != run(program)


def zombies() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE}


def test_failed_start_names_the_command_and_leaves_no_process(tmp_path: Path) -> None:
    before = zombies()
    with pytest.raises(Exception, match="FileNotFoundError") as caught:
        run("print()", cwd=tmp_path / "missing")
    assert len(str(caught.value)) < 500
    assert zombies() <= before  # orphans of other tests, which this process adopts
    assert run(IS_PRELOADED) == "forked\n"


def test_system_without_processes_gets_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        mine.send(json.dumps({}).encode())
        mine.shutdown(socket.SHUT_WR)
        preloaded._serve_orders(theirs)
        assert mine.recv(4096).startswith(b" BlockingIOError")
