"""``ortserve tune`` with a known correct result: six instances take more memory than one.

A process of its own is killed. The search resumes in the test's process, whose children are preloaded.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from models import builders
from ortserve.cli.main import main
from ortserve.tools.tune.arguments import JOURNAL
from servers import LOOK_S

OPTIONS = "# reviewed in May\ninstances: 6  # one for each team\nwarmup_s: 0.1\n"


pytestmark = pytest.mark.timeout(400)  # 25 s on two idle cores


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in a repository with a bad setting; each instance holds 16 MB of weights."""
    folder = tmp_path / "repository" / "wide"
    (folder / "1").mkdir(parents=True)
    builders.mlp(folder / "1" / "model.onnx", hidden=60_000)
    (folder / "model.yaml").write_text(OPTIONS)
    return folder


def test_mends_a_bad_setting_even_after_a_kill(
    model: Path, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    goal = ["--objective", "memory", "--slo", "5s", "--rate", "500", "--max-minutes", "3", "--json"]
    command = [sys.executable, "-m", "ortserve", "tune", str(model), *goal]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    journal = model / JOURNAL
    deadline = time.monotonic() + 110
    while not (journal.exists() and journal.read_bytes().count(b'"trial"') > 1):
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < deadline
        time.sleep(LOOK_S)
    children = psutil.Process(killed.pid).children(recursive=True)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert (model / "model.yaml").read_text() == OPTIONS
    with journal.open("ab") as half:
        half.write(b'{"op_code": 4, "wor')

    request.getfixturevalue("preloaded_commands")
    status = main(["tune", str(model), *goal, "--resume", "--max-trials", "1"])
    printed = capfd.readouterr()
    assert (status, printed.err) == (0, "")
    result = json.loads(printed.out)
    assert result["has_gain"], result
    assert result["trials"][1]["changes"] == {"instances": 1}
    assert result["confirmation"]["ratio"]["low"] > 1.3
    assert result["written"] == str(model / "model.yaml")
    lines = (model / "model.yaml").read_text().splitlines()
    assert lines[0] == "# reviewed in May"
    assert lines[1].startswith("instances: 1 ")
    assert "one for each team; ortserve tune: memory" in lines[1]
    assert lines[2:] == ["warmup_s: 0.1"]
    assert sorted(path.name for path in model.iterdir()) == ["1", "model.yaml"]
