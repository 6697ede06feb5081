"""docker-compose.yml, without Docker: the files that it names exist, and its parts are consistent."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from manifests import DEPLOY, ROOT, is_pinned, n_bytes
from ortserve import __version__
from ortserve.app.server import FLUSH_S
from ortserve.config.option_groups import tls_problems
from ortserve.config.options import ServerOptions, read_options
from servers import SHORT_WARMUP, serving

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
SERVERS = ("ortserve", "ortserve-gpu")


def test_mounted_files_exist() -> None:
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"]


def test_no_usual_name_of_a_repository_is_a_volume() -> None:
    """Compose takes ``MODELS=models`` for the name of a volume, and reports an error if there is none."""
    (default,) = (re.findall(r"MODELS:-([\w-]+)", mount) for mount in SERVICES["ortserve"]["volumes"])
    assert set(default) <= set(COMPOSE["volumes"])
    assert not {"models", "model_repository", "repository"} & set(COMPOSE["volumes"])


def test_targets_are_stages_of_the_dockerfile() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for service in SERVICES.values():
        if "build" in service:
            assert service["build"]["target"] in stages
            assert service["image"] == f"ortserve:{__version__}-{service['build']['target']}"
        assert is_pinned(service["image"])


def test_no_port_is_open_to_the_network() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_every_service_is_limited_and_gains_no_privileges() -> None:
    for service in SERVICES.values():
        assert service["cpus"] > 0
        assert service["mem_limit"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", SERVERS)
def test_options_exist_and_agree_with_the_container(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = SERVICES[name]
    for variable, value in service["environment"].items():
        assert variable.removeprefix("ORTSERVE_").lower() in ServerOptions.model_fields
        monkeypatch.setenv(variable, value)
    options = read_options({})
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    writing_s = 2 * FLUSH_S + options.otlp_flush_timeout_s
    assert grace_s > options.drain_delay_s + options.drain_timeout_s + writing_s + 5
    memory = n_bytes(service["mem_limit"].upper() + "i")
    assert (options.max_inflight_bytes or memory // 4) + options.max_queue_bytes < memory
    published = [int(port.rpartition(":")[2]) for port in service["ports"]]
    assert published == [options.http_port, options.grpc_port, options.metrics_port]
    assert service["read_only"] is True
    assert any(mount.startswith("/tmp") for mount in service["tmpfs"])


@pytest.mark.parametrize("name", SERVERS)
def test_certificate_path_is_in_the_mounted_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = yaml.safe_load((DEPLOY / "compose.tls.yml").read_text())["services"][name]
    for variable, value in service["environment"].items():
        monkeypatch.setenv(variable, value)
    options = read_options({})
    assert list(tls_problems(options, grpc_transport=options.grpc_transport)) == []
    (mount,) = service["volumes"]
    folder, mode = mount.split("}")[1].lstrip(":").split(":")
    assert mode == "ro"
    assert {str(file.parent) for file in (options.tls_cert_file, options.tls_key_file) if file} == {folder}


def test_prometheus_finds_the_server_and_grafana_finds_prometheus() -> None:
    prometheus = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    alias, port = target.split(":")
    for name in SERVERS:
        assert alias in SERVICES[name]["networks"]["default"]["aliases"]
    assert int(port) == ServerOptions().metrics_port

    mounts = dict(mount.split(":")[:2] for mount in SERVICES["prometheus"]["volumes"])
    (rules,) = prometheus["rule_files"]
    configuration = Path(mounts["./deploy/monitoring/prometheus.yml"])
    assert f"--config.file={configuration}" in SERVICES["prometheus"]["command"]
    assert str((configuration.parent / rules).parent) == mounts["./deploy/monitoring/rules"]

    provisioning = DEPLOY / "monitoring" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "ortserve.yml").read_text())["providers"]
    mounts = dict(mount.split(":")[:2] for mount in SERVICES["grafana"]["volumes"])
    assert provider["options"]["path"] == mounts["./deploy/monitoring/grafana/dashboards"]
    assert mounts["./deploy/monitoring/grafana/provisioning"] == "/etc/grafana/provisioning"


def test_server_starts_with_the_command_of_the_file_and_takes_the_load_test(tmp_path: Path) -> None:
    """The volume is an empty folder, as on the first start."""
    service = SERVICES["ortserve"]
    command, *arguments = [str(tmp_path) if word == "/models" else word for word in service["command"]]
    assert command == "serve"
    with serving(*arguments, *SHORT_WARMUP, env=service["environment"]) as server:
        port = server.http.rpartition(":")[2]
        load = ["--rate", "50", "--seconds", "1"]
        assert {word for word in SERVICES["loadtest"]["command"] if word.startswith("--")} == {"--rate", "--seconds"}
        done = subprocess.run(
            [sys.executable, ROOT / "loadtests" / "steady_load.py", "--port", port, *load],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert re.search(r"(\d+) answered, 0 refused, 0 otherwise", done.stdout), done.stdout
