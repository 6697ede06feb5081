"""The Dockerfile, without a container engine: its text, and its steps run in a folder.

These tests cannot show that the base images exist and that packages can be installed in them.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
import pytest

from manifests import ROOT, installation, is_pinned
from models import builders
from ortserve import __version__
from ortserve.config.options import ENV_PREFIX, ServerOptions, read_options
from servers import LONG_S, SHORT_WARMUP

TEXT = (ROOT / "Dockerfile").read_text()


@dataclass
class Stage:
    """One FROM: its base image, and its instructions in order."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [words for name, words in self.instructions if name == keyword]

    def last(self, keyword: str) -> str:
        return self.all(keyword)[-1]

    @property
    def environment(self) -> dict[str, str]:
        pairs = [pair for words in self.all("ENV") for pair in shlex.split(words)]
        return dict(pair.split("=", 1) for pair in pairs)


def stages() -> dict[str, Stage]:
    """The stages by name."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE))
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, joined.splitlines())):
        keyword, words = line.split(maxsplit=1)
        if keyword == "FROM":
            base, _, name = words.split()
            found[name] = Stage(base)
        else:
            list(found.values())[-1].instructions.append((keyword, words))
    return found


STAGES = stages()
SERVERS = ("cpu", "gpu")


def test_base_images_are_pinned_and_of_one_release() -> None:
    bases = {stage.base for stage in STAGES.values()} - set(STAGES)
    assert all(is_pinned(base) for base in bases), bases
    assert {re.sub(r".*ubuntu:?", "", base) for base in bases} == {"24.04"}


@pytest.mark.parametrize("name", SERVERS)
def test_image_runs_the_server_under_any_uid(name: str) -> None:
    stage = STAGES[name]
    assert json.loads(stage.last("ENTRYPOINT")) == ["tini", "--", "ortserve"]
    assert json.loads(stage.last("CMD")) == ["serve", "/models"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", stage.last("USER"))
    assert stage.last("STOPSIGNAL") == "SIGTERM"
    assert stage.environment["ORT_DISABLE_TELEMETRY"] == "1"
    default = ServerOptions()
    assert stage.last("EXPOSE").split() == [str(default.http_port), str(default.grpc_port), str(default.metrics_port)]
    timing, _, command = stage.last("HEALTHCHECK").partition(" CMD ")
    assert json.loads(command) == ["ortserve", "health"]
    deadline_s = installation("base, by its files").one("Deployment", "ortserve")["spec"]["progressDeadlineSeconds"]
    # The models may take as long to load as in Kubernetes.
    assert f"--start-period={deadline_s // 60}m" in timing.split()


@pytest.mark.parametrize("name", SERVERS)
def test_image_contains_no_build_tools(name: str) -> None:
    stage = STAGES[name]
    (installed,) = stage.all("RUN")
    packages = installed.partition("--no-install-recommends")[2].partition("&&")[0].split()
    assert packages == ["python3", "tini"]
    assert stage.all("COPY") == [
        f"--from=environment-{name} /opt/ortserve /opt/ortserve",
        "--from=wheel /opt/locale /usr/lib/locale",
    ]
    made = " ".join(STAGES[f"environment-{name}"].all("RUN"))
    assert "--without-pip /opt/ortserve" in made
    assert "--only-binary :all:" in made
    assert "--constraint constraints.txt" in made
    assert made.rstrip().endswith(f'[{name},otel,stores]"')


def test_images_have_the_locale_that_string_normalizer_needs(tmp_path: Path) -> None:
    """Runs the build step that creates the locale, and a model that lower-cases texts with it."""
    installed, _ = STAGES["wheel"].all("RUN")
    assert "locales" in installed.split()
    (step,) = [step for step in installed.split("&&") if "localedef" in step]
    if shutil.which("localedef") is None or not Path("/usr/share/i18n/locales/en_US").exists():
        pytest.skip("needs the package locales")
    subprocess.run(shlex.split(step.replace("/opt/locale", str(tmp_path))), check=True, timeout=LONG_S)
    builders.lower_case(tmp_path / "model.onnx")
    code = (
        "import numpy, onnxruntime; session = onnxruntime.InferenceSession('model.onnx');"
        "print(session.run(None, {'x': numpy.array(['ÀÉ Groß'], object)})[0][0])"
    )
    for paths, expected in ((str(tmp_path), "àé groß"), ("/nowhere", "")):
        environment = {"PATH": os.environ["PATH"], "LOCPATH": paths, "PYTHONIOENCODING": "utf-8"}
        run = subprocess.run(
            [sys.executable, "-X", "utf8", "-c", code],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            encoding="utf-8",
            check=False,
            timeout=LONG_S,
        )
        assert run.stdout.strip() == expected, run.stderr


def test_images_contain_the_compiled_request_path() -> None:
    installed, made = STAGES["wheel"].all("RUN")
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(installed.split())
    assert "'.[cpu,otel,compile]'" in made
    assert "ORTSERVE_COMPILE=1 /opt/pip/bin/pip wheel" in made


@pytest.mark.parametrize("name", SERVERS)
def test_image_has_descriptive_labels(name: str) -> None:
    stage = STAGES[name]
    labels = dict(pair.split("=", 1) for words in stage.all("LABEL") for pair in shlex.split(words))
    wanted = ("title", "description", "version", "revision", "licenses")
    assert {f"org.opencontainers.image.{key}" for key in wanted} == set(labels)
    assert f"VERSION={__version__}" in stage.all("ARG")


@pytest.mark.parametrize("name", SERVERS)
def test_variables_of_the_image_are_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {key: value for key, value in STAGES[name].environment.items() if key.startswith(ENV_PREFIX)}
    assert {key.removeprefix(ENV_PREFIX).lower() for key in given} <= set(ServerOptions.model_fields)
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    assert read_options({}).host == "0.0.0.0"


def test_images_differ_only_in_gpu_requirements() -> None:
    cpu, gpu = (STAGES[name] for name in SERVERS)
    only_gpu = {"CUDA_CACHE_PATH", "CUPY_CACHE_DIR", "ORTSERVE_EXECUTION_PROVIDERS"}
    assert {key for key, value in gpu.environment.items() if cpu.environment.get(key) != value} == only_gpu | {"PATH"}
    for keyword in ("USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD", "WORKDIR", "ARG"):
        assert cpu.all(keyword) == gpu.all(keyword)


def context_files() -> set[str]:
    """Files of the repository that .dockerignore admits; it lists a few paths and patterns."""
    named = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    found = {path for pattern in named for path in ROOT.glob(pattern)}
    files = found | {file for folder in found for file in folder.rglob("*") if folder.is_dir()}
    return {
        str(file.relative_to(ROOT))
        for file in files
        if file.is_file() and "__pycache__" not in file.parts and ".egg-info" not in str(file)
    }


def test_build_context_contains_all_copied_and_needed_files() -> None:
    files = context_files()
    for stage in STAGES.values():
        for words in stage.all("COPY"):
            if not words.startswith("--from"):
                for source in [word for word in words.split()[:-1] if not word.startswith("--")]:
                    assert source in files or any(file.startswith(f"{source}/") for file in files), source
    assert {"pyproject.toml", "README.md", "constraints.txt"} <= files
    assert not [file for file in files if file.startswith((".git", "tests/", "deploy/"))]


def test_user_of_an_image_can_read_files_of_a_private_clone() -> None:
    """The build context keeps the permissions of the clone; installed packages have those of pip."""
    for name in ("cpu", "gpu", "loadtest"):
        copied = [words for words in STAGES[name].all("COPY") if not words.startswith("--from")]
        user = STAGES["cpu"].last("USER")
        assert all(words.startswith(f"--chown={user} ") for words in copied), name


@pytest.fixture
def image() -> Iterator[Path]:
    """The image's own files, read-only, in a folder that any user can read; packages are those of this environment."""
    folder = Path(tempfile.mkdtemp(prefix="ortserve-image-"))
    try:
        for file in context_files():
            if file.startswith("server/"):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / file, folder / file)
        set_writable(folder, False)
        yield folder
    finally:
        set_writable(folder, True)
        shutil.rmtree(folder)


def set_writable(folder: Path, is_writable: bool) -> None:
    for path in [folder, *folder.rglob("*")]:
        readable = 0o555 if path.is_dir() else 0o444
        path.chmod(readable | (stat.S_IWUSR if is_writable else 0))


def can_be(uid: int) -> bool:
    """Whether this environment's Python can run as another user."""
    if os.geteuid() != 0:
        return False
    try:
        code = "import numpy, onnxruntime, grpc"
        return subprocess.run([sys.executable, "-c", code], user=uid, cwd="/", timeout=60, check=False).returncode == 0
    except OSError:
        return False


def entry_point(stage: Stage) -> list[str]:
    """The command of the image, with this environment's Python in place of the image's."""
    *init, ortserve = json.loads(stage.last("ENTRYPOINT"))
    return [*init, sys.executable, "-m", ortserve]


def read_until(output: IO[str], text: str) -> None:
    """Read lines up to the first that contains the text."""
    lines: list[str] = []
    while not any(text in line for line in lines):
        line = output.readline()
        assert line, "".join(lines)
        lines.append(line)


def test_server_runs_as_the_image_user_in_a_read_only_tree(image: Path) -> None:
    stage = STAGES["cpu"]
    uid = int(stage.last("USER").split(":")[0])
    user = uid if can_be(uid) else None  # None keeps the user of the tests
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics_port = str(free.getsockname()[1])
    ports = {"ORTSERVE_HTTP_PORT": "0", "ORTSERVE_GRPC_PORT": "0", "ORTSERVE_METRICS_PORT": metrics_port}
    python = {"PATH": os.environ["PATH"], "PYTHONPATH": str(image / "server")}
    environment = stage.environment | python | ports
    ortserve = entry_point(stage)[-3:]  # the command that its init process starts
    before = {path: path.stat().st_mtime_ns for path in image.rglob("*")}

    server = subprocess.Popen(
        [*ortserve, "serve", "--example", *SHORT_WARMUP],
        env=environment,
        cwd=stage.last("WORKDIR"),
        user=user,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        read_until(server.stderr, "initial loading has ended")
        check = json.loads(stage.last("HEALTHCHECK").partition(" CMD ")[2])[1:]
        health = subprocess.run(
            [*ortserve, *check], env=environment, user=user, capture_output=True, text=True, check=False, timeout=LONG_S
        )
        assert (health.returncode, health.stdout) == (0, "ready\n"), health.stderr
        server.terminate()
        rest = server.stderr.read()
        assert server.wait(LONG_S) == 0, rest
        assert "Traceback" not in rest
    finally:
        server.kill()
        server.communicate()
    assert {path: path.stat().st_mtime_ns for path in image.rglob("*")} == before


def test_second_signal_ends_the_server_of_a_container_at_once() -> None:
    """The kernel drops unhandled signals of a container's first process, so the server must not be this process."""
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True, timeout=LONG_S)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a namespace of processes: {error}")
    command = entry_point(STAGES["cpu"])
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    ports = [word for kind in ("http", "grpc", "metrics") for word in (f"--{kind}-port", "0")]
    with subprocess.Popen(
        [*alone, *command, "serve", "--example", *SHORT_WARMUP, *ports, "--drain-delay-s", "600"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            read_until(process.stderr, "initial loading has ended")
            (first,) = psutil.Process(process.pid).children()
            first.terminate()
            read_until(process.stderr, "draining")
            first.terminate()
            assert process.wait(LONG_S) == 128 + signal.SIGTERM
        finally:
            process.kill()
