"""The image, its pod and docker-compose.yml, run by a container engine if one is configured.

    ORTSERVE_TEST_ENGINE=docker .venv/bin/python -m pytest tests/deploy/test_containers.py

runs the commands of docs/operations/containers.md with the image ``ORTSERVE_TEST_IMAGE``, or with an image that it
builds. The pod needs Podman, whose ``play kube`` runs the output of Kustomize. docker-compose.yml needs Docker and the
ports that it names.
"""

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import yaml

from certificates import Secret
from manifests import ROOT, installation
from ortserve.example import repository_path
from pages import DOCS, commands
from proxies import Ports, free_ports
from servers import LONG_S

PAGE: Final = DOCS / "operations" / "containers.md"
ENGINE: Final = shlex.split(os.environ.get("ORTSERVE_TEST_ENGINE", ""))
BUILD_S: Final = 900.0
DRAIN_S: Final = 70.0
"""``terminationGracePeriodSeconds`` of the manifests."""

pytestmark = [
    pytest.mark.skipif(not ENGINE, reason="needs a container engine, named by ORTSERVE_TEST_ENGINE"),
    pytest.mark.timeout(BUILD_S + 2 * LONG_S),
]


def typed(program: str, verb: str) -> list[list[str]]:
    """The commands of the page that begin with this program and verb."""
    return [command.words for command in commands(PAGE) if command.words[:2] == [program, verb]]


def engine(*arguments: str | Path, timeout_s: float = LONG_S, **variables: str) -> str:
    """Run a command of the engine. Returns its output."""
    done = subprocess.run(
        [*ENGINE, *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def image() -> str:
    """The name of the CPU image."""
    if named := os.environ.get("ORTSERVE_TEST_IMAGE"):
        return named
    (command,) = (words for words in typed("docker", "build") if "cpu" in words)
    engine(*command[1:], timeout_s=BUILD_S)
    return command[command.index("-t") + 1]


@dataclass
class Container:
    """A running container."""

    name: str
    ports: Ports
    process: subprocess.Popen[str]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container."""
        return subprocess.run(
            [*ENGINE, "exec", self.name, *command], capture_output=True, text=True, timeout=LONG_S, check=False
        )

    def stop(self) -> str:
        """Stop the container. It must drain and exit with 0. Returns its log."""
        engine("stop", "--time", f"{DRAIN_S:g}", self.name, timeout_s=DRAIN_S + LONG_S)
        log, _ = self.process.communicate(timeout=LONG_S)
        assert self.process.returncode == 0, log
        return log


@contextmanager
def running(command: list[str], image: str, folder: Path, *, verify: Any = True) -> Iterator[Container]:
    """Run a command of the page with another image, other ports and ``folder`` as its working folder."""
    ports = free_ports()
    container = f"ortserve-test-{os.getpid()}-{ports.http}"
    words = [word.replace("$PWD", str(folder)) for word in command[2:-1]]
    words = [re.sub(r"^(127\.0\.0\.1):800([01]):", lambda at: f"{at[1]}:{ports[int(at[2])]}:", word) for word in words]
    process = subprocess.Popen(
        [*ENGINE, "run", "--name", container, *words, image],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    scheme = "http" if verify is True else "https"
    try:

        def is_up() -> bool:
            assert process.poll() is None, process.communicate()[0]
            return is_ready(f"{scheme}://127.0.0.1:{ports.http}/v2/health/ready", verify)

        wait_until(is_up)
        yield Container(container, ports, process)
    finally:
        subprocess.run([*ENGINE, "rm", "--force", container], capture_output=True, timeout=LONG_S, check=False)
        process.communicate(timeout=LONG_S)


def wait_until(look: Callable[[], bool]) -> None:
    """Poll until the condition holds, because engines report no events for it."""
    ends = time.monotonic() + LONG_S
    while not look():
        assert time.monotonic() < ends
        time.sleep(0.1)


def is_ready(url: str, verify: Any) -> bool:
    try:
        return httpx.get(url, verify=verify, timeout=LONG_S).status_code == 200
    except httpx.TransportError:
        return False


def with_models(folder: Path) -> Path:
    """The example models in a folder ``models`` that any user may read."""
    shutil.copytree(repository_path(), folder / "models")
    folder.chmod(0o755)
    return folder


def test_container_serves_both_protocols_under_any_uid_and_drains(image: str, tmp_path: Path) -> None:
    command, _ = typed("docker", "run")
    with running(command, image, with_models(tmp_path)) as container:
        rows = np.arange(16, dtype=np.int32).reshape(1, 16)
        for kind, port in ((triton_http, container.ports.http), (triton_grpc, container.ports.grpc)):
            with kind.InferenceServerClient(f"127.0.0.1:{port}") as client:
                inputs = [kind.InferInput(name, rows.shape, "INT32") for name in ("INPUT0", "INPUT1")]
                for given in inputs:
                    given.set_data_from_numpy(rows)
                np.testing.assert_array_equal(client.infer("simple", inputs).as_numpy("OUTPUT0"), rows + rows)

        assert container.run("id", "-u").stdout == "10001\n"
        assert container.run("ortserve", "health").stdout == "ready\n"
        assert container.run("touch", "/tmp/there").returncode == 0
        assert "request path compiled\n" in container.run("ortserve", "version").stdout
        assert "Read-only file system" in container.run("touch", "/opt/there").stderr
        assert container.run("python", "-m", "pip").returncode != 0
        assert container.run("sh", "-c", "command -v gcc cc make pip").stdout == ""
        assert "drained" in container.stop()


def readable_secret(folder: Path) -> Secret:
    """Certificates and keys that any user may read."""
    secret = Secret(folder)
    for file in secret.folder.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    return secret


def test_container_serves_tls_with_a_mounted_folder(image: str, tmp_path: Path) -> None:
    _, command = typed("docker", "run")
    secret = readable_secret(with_models(tmp_path) / "tls")
    with running(command, image, tmp_path, verify=secret.client_context()) as container:
        assert container.run("ortserve", "health").stdout == "ready\n"
        assert "tls=server" in container.stop()


@pytest.mark.skipif("podman" not in " ".join(ENGINE), reason="needs Podman, for play kube")
def test_rendered_pod_is_ready_with_no_rights_and_drains(image: str, tmp_path: Path) -> None:
    documents = [deepcopy(one) for one in installation("cpu").documents if one["kind"] in ("ConfigMap", "Deployment")]
    for document in documents:
        if document["kind"] == "Deployment":
            document["spec"]["replicas"] = 1  # a host has each port only once
            document["spec"]["template"]["spec"]["containers"][0]["image"] = image
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(yaml.safe_dump_all(documents))
    try:
        engine("play", "kube", manifest)
        pod, container = "ortserve-pod-0", "ortserve-pod-0-ortserve"
        wait_until(lambda: "initial loading has ended" in logs_of(container))
        assert engine("exec", container, "ortserve", "health") == "ready\n"
        status = engine("exec", container, "cat", "/proc/self/status")
        assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
        assert re.search(r"^Uid:\s+10001\s", status, re.MULTILINE)
        engine("pod", "stop", "--time", f"{DRAIN_S:g}", pod, timeout_s=DRAIN_S + LONG_S)
        assert "drained" in logs_of(container)
        assert engine("inspect", container, "--format", "{{.State.ExitCode}}") == "0\n"
    finally:
        subprocess.run([*ENGINE, "play", "kube", "--down", manifest], capture_output=True, timeout=LONG_S, check=False)


@pytest.fixture
def compose() -> Iterator[Callable[..., str]]:
    """Runs commands of the page in a separate project, which is removed at the end."""
    if "podman" in " ".join(ENGINE):
        pytest.skip("needs Docker, for its compose command")
    project = {"COMPOSE_PROJECT_NAME": f"ortserve-test-{os.getpid()}"}

    def run(command: list[str], **variables: str) -> str:
        return engine(*command[1:], timeout_s=BUILD_S, **project, **variables)

    try:
        yield run
    finally:
        engine("compose", "down", "--volumes", "--timeout", "60", timeout_s=2 * DRAIN_S, **project)


def test_compose_starts_a_server_that_prometheus_finds_and_loads_it(
    compose: Callable[..., str], tmp_path: Path
) -> None:
    up, load, _ = typed("docker", "compose")
    folder = with_models(tmp_path) / "models"
    (folder / "digits").rename(folder / "mine")
    compose(up, MODELS=str(folder))
    for model in ("digits", "mine"):
        assert is_ready(f"http://127.0.0.1:8000/v2/models/{model}/ready", verify=True)

    answered = sum(map(int, re.findall(r"(\d+) answered", compose(load))))
    assert answered > 10_000
    query = {"query": 'sum(ortserve_request_duration_seconds_count{outcome="ok"})'}
    answer = httpx.get("http://127.0.0.1:9090/api/v1/query", params=query, timeout=LONG_S).json()
    assert float(answer["data"]["result"][0]["value"][1]) > answered / 2  # the last scrape may be older
    rules = httpx.get("http://127.0.0.1:9090/api/v1/rules", timeout=LONG_S).json()
    assert rules["data"]["groups"]


def test_compose_serves_tls_with_the_named_folder(compose: Callable[..., str], tmp_path: Path) -> None:
    _, _, up = typed("docker", "compose")
    tmp_path.chmod(0o755)
    secret = readable_secret(tmp_path / "tls")
    compose(up, TLS=str(secret.folder))
    assert is_ready("https://127.0.0.1:8000/v2/health/ready", secret.client_context())


def logs_of(container: str) -> str:
    done = subprocess.run([*ENGINE, "logs", container], capture_output=True, text=True, timeout=LONG_S, check=True)
    return done.stdout + done.stderr
