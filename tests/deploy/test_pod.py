"""The pod without a cluster: the server with the manifests' arguments and options, probed like the kubelet does."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from certificates import Secret
from manifests import BASE, DEPLOY, Installation, installation
from models import builders
from ortserve.example import repository_path
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, serving, triton_clients

FETCH = DEPLOY / "components" / "models-download" / "fetch.sh"


def statuses_of_probes(installed: Installation, server: ServerProcess) -> dict[str, int]:
    """Send the kubelet's probes, which neither verify nor present a certificate."""
    addresses = {"http": server.http, "metrics": server.metrics}
    statuses = {}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = installed.server[probe]["httpGet"]
        url = f"{asked.get('scheme', 'HTTP').lower()}://{addresses[asked['port']]}{asked['path']}"
        statuses[probe] = httpx.get(url, verify=False, timeout=LONG_S).status_code
    return statuses


YES: Final = {"startupProbe": 200, "livenessProbe": 200, "readinessProbe": 200}


def test_probes_of_the_pod_succeed() -> None:
    base = installation(BASE)
    options = base.environment | {"ORTSERVE_DRAIN_DELAY_S": "0"}
    command, *arguments = base.server["args"]
    assert command == "serve"
    with serving(*arguments, *SHORT_WARMUP, env=options) as server:
        assert statuses_of_probes(base, server) == YES


def test_probes_succeed_while_requests_hold_every_connection() -> None:
    """Otherwise the kubelet would kill a pod with many clients."""
    base = installation(BASE)
    options = base.environment | {"ORTSERVE_DRAIN_DELAY_S": "0", "ORTSERVE_HTTP_MAX_CONNECTIONS": "1"}
    with serving(*base.server["args"][1:], *SHORT_WARMUP, env=options) as server:
        url = f"http://{server.http}/v2/health/live"
        with httpx.stream("GET", f"http://{server.http}/v2/console/stream", timeout=LONG_S) as response:
            assert response.status_code == 200
            assert httpx.get(url, timeout=LONG_S).status_code == 429
            assert statuses_of_probes(base, server) == YES


@pytest.mark.parametrize("overlay", ["tls", "mutual-tls"])
def test_probes_of_a_pod_with_certificates_succeed(overlay: str, tmp_path: Path) -> None:
    """Temporary folders replace the mounted folders."""
    installed = installation(overlay)
    secret = Secret(tmp_path / "secret")
    options = {
        name: str(secret.folder / Path(value).name) if value.startswith("/etc/ortserve/") else value
        for name, value in installed.environment.items()
    }
    options["ORTSERVE_DRAIN_DELAY_S"] = "0"
    client = secret.client_context(has_certificate=overlay == "mutual-tls")
    with serving(*installed.server["args"][1:], *SHORT_WARMUP, env=options, client=client) as server:
        assert statuses_of_probes(installed, server) == YES


@pytest.mark.parametrize("component", ["models-volume", "models-download", "models-image"])
def test_models_are_mounted_where_the_server_looks(component: str) -> None:
    patch = yaml.safe_load((DEPLOY / "components" / component / "deployment.yaml").read_text())
    pod = patch["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mount = next(mount for mount in container["volumeMounts"] if mount["name"] == "models")
    assert container["args"] == ["serve", mount["mountPath"]]
    assert mount["readOnly"] is True
    assert "models" in {volume["name"] for volume in pod["volumes"]}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A served folder with an archive of the example repository."""
    path = tmp_path / "web" / "repository.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        tar.add(repository_path(), arcname=".")
    return path


@contextmanager
def web_server(folder: Path, stalls: int = 0) -> Iterator[str]:
    """A server of a folder. It answers the first ``stalls`` requests with headers only, until the test ends."""
    ended, left = threading.Event(), [stalls]

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_args: object) -> None:
            """Stay quiet."""

        def copyfile(self, source: Any, outputfile: Any) -> None:
            if left[0]:
                left[0] -= 1
                ended.wait(LONG_S)
            else:
                super().copyfile(source, outputfile)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


def fetch(url: str, sha256: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the init container's script as the init container does, with further variables."""
    for tool in ("curl", "sha256sum", "tar"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    patch = yaml.safe_load((FETCH.parent / "deployment.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["initContainers"]
    shell, script = container["command"]
    assert script == f"/scripts/{FETCH.name}"
    assert [variable["name"] for variable in container["env"]] == ["MODELS_FOLDER"]
    variables |= {"MODELS_URL": url, "MODELS_SHA256": sha256, "MODELS_FOLDER": str(folder), "PATH": "/usr/bin:/bin"}
    folder.mkdir()
    return subprocess.run([shell, FETCH], env=variables, capture_output=True, text=True, check=False, timeout=60)


def files_under(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def test_archive_with_the_right_checksum_is_unpacked(archive: Path, tmp_path: Path) -> None:
    with web_server(archive.parent) as url:
        checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
        done = fetch(f"{url}/{archive.name}", checksum, tmp_path / "models")
    assert done.returncode == 0, done.stderr
    assert files_under(tmp_path / "models") == files_under(repository_path())


def test_stalled_download_begins_again(archive: Path, tmp_path: Path) -> None:
    """Otherwise the pod would wait for it for ever."""
    with web_server(archive.parent, stalls=1) as url:
        checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
        done = fetch(f"{url}/{archive.name}", checksum, tmp_path / "models", MODELS_STALL_S="1")
    assert done.returncode == 0, done.stderr
    assert files_under(tmp_path / "models") == files_under(repository_path())


def test_archive_with_another_checksum_is_not_unpacked(archive: Path, tmp_path: Path) -> None:
    with web_server(archive.parent) as url:
        done = fetch(f"{url}/{archive.name}", "0" * 64, tmp_path / "models")
    assert done.returncode == 1
    assert f"MODELS_SHA256: expected {'0' * 64}, got {hashlib.sha256(archive.read_bytes()).hexdigest()}" in done.stderr
    assert not [path for path in (tmp_path / "models").rglob("*") if path.name != ".archive"]


def test_missing_archive_fails_the_pod(archive: Path, tmp_path: Path) -> None:
    with web_server(archive.parent) as url:
        done = fetch(f"{url}/absent.tar", "0" * 64, tmp_path / "models")
    assert done.returncode != 0
    assert "404" in done.stderr


def test_kserves_arguments_serve_a_repository_on_kserves_ports(tmp_path: Path) -> None:
    """The flags are those of the runtime, with free ports in place of its ports."""
    runtimes = yaml.safe_load_all((DEPLOY / "overlays" / "kserve" / "clusterservingruntimes.yaml").read_text())
    container, container_of_grpc = (runtime["spec"]["containers"][0] for runtime in runtimes)
    add_model(tmp_path, "identity", builders.identity)
    words = [{"/mnt/models": str(tmp_path)}.get(word, word) for word in container["args"]]
    arguments = ["0" if word.isdecimal() else word for word in words[1:]]
    environment = {variable["name"]: variable["value"] for variable in container["env"]} | {
        "ORTSERVE_DRAIN_DELAY_S": "0"
    }
    with serving(*arguments, *SHORT_WARMUP, env=environment) as server, triton_clients(server) as (http, grpc):
        assert http.is_model_ready("identity")
        assert grpc.is_model_ready("identity")
        port = server.metrics.rpartition(":")[2]
        probe = [port if word == "8002" else word for word in container_of_grpc["livenessProbe"]["exec"]["command"]]
        done = subprocess.run([sys.executable, "-m", *probe], capture_output=True, check=False, timeout=LONG_S)
        assert (done.returncode, done.stdout) == (0, b"live\n")
