"""The component ``keys``: its Secret is mounted so that it can be updated, options name it, probes need no key."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
import pytest
import yaml

from manifests import BASE, DEPLOY, Installation, installation, rendered
from ortserve.config.options import ServerOptions, read_options, variable_name
from servers import LONG_S, SHORT_WARMUP, ServerProcess, serving

COMPONENT = DEPLOY / "components" / "keys"
GROUPS = ("infer", "metadata", "control")


def options_of_component() -> dict[str, str]:
    (generator,) = yaml.safe_load((COMPONENT / "kustomization.yaml").read_text())["configMapGenerator"]
    assert (generator["name"], generator["behavior"]) == ("ortserve-options", "merge")
    return dict(literal.split("=", 1) for literal in generator["literals"])


def patched_pod() -> dict[str, Any]:
    patch = yaml.safe_load((COMPONENT / "deployment.yaml").read_text())
    pod: dict[str, Any] = patch["spec"]["template"]["spec"]
    return pod


def test_every_group_of_the_http_and_grpc_ports_has_its_file() -> None:
    named = {name: Path(path) for name, path in options_of_component().items()}
    assert set(named) == {variable_name(f"{group}_keys_file") for group in GROUPS}
    options = read_options({name.removeprefix("ORTSERVE_").lower(): path for name, path in named.items()})
    assert options.metrics_keys_file is None
    assert [options.infer_keys_file, options.metadata_keys_file, options.control_keys_file] == list(named.values())


def test_key_files_are_in_the_mounted_secret_that_only_the_server_reads() -> None:
    (container,) = patched_pod()["containers"]
    (mount,) = container["volumeMounts"]
    (volume,) = patched_pod()["volumes"]
    assert mount["name"] == volume["name"]
    assert mount["readOnly"] is True
    assert "subPath" not in mount, "it would never change"
    assert {str(PurePosixPath(path).parent) for path in options_of_component().values()} == {mount["mountPath"]}
    assert volume["secret"]["defaultMode"] == 0o440
    assert not volume["secret"].get("optional", False)
    context = installation(BASE).pod["spec"]["securityContext"]
    assert context["fsGroup"] == context["runAsGroup"]


def test_no_manifest_holds_a_secret_or_a_key_in_a_variable() -> None:
    for path in DEPLOY.rglob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            assert not isinstance(document, dict) or document.get("kind") != "Secret", path
            assert "secretGenerator" not in (document or {}), path
            assert "secretKeyRef" not in str(document), path


@pytest.fixture
def installed(tmp_path: Path) -> Installation:
    """The overlay ``cpu`` with the component, as the page describes it."""
    overlay = tmp_path / "kustomization.yaml"
    base, component = (f"{'../' * 20}{path.relative_to('/')}" for path in (DEPLOY / "overlays" / "cpu", COMPONENT))
    kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    overlay.write_text(yaml.safe_dump({**kind, "resources": [base], "components": [component]}))
    return rendered(tmp_path)


def test_component_keeps_the_settings_of_an_overlay(installed: Installation) -> None:
    assert options_of_component().items() <= installed.environment.items()
    assert installation(BASE).environment.items() <= installed.environment.items()
    volumes = {volume["name"]: volume for volume in installed.pod["spec"]["volumes"]}
    assert volumes["keys"]["secret"] == {"secretName": "ortserve-keys", "defaultMode": 0o440}
    assert {"tmp", "shm"} <= set(volumes)
    assert "/etc/ortserve/keys" in {mount["mountPath"] for mount in installed.server["volumeMounts"]}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with the component's options, but with other paths of the files."""
    environment = {}
    for name, path in options_of_component().items():
        file = tmp_path / Path(path).name
        file.write_text(f"key-of-{file.name}-0123456789\n")
        environment[name] = str(file)
    assert {name.removeprefix("ORTSERVE_").lower() for name in environment} <= set(ServerOptions.model_fields)
    with serving("--example", *SHORT_WARMUP, env=environment) as server:
        yield server


def test_probes_need_no_key_and_requests_do(server: ServerProcess) -> None:
    base = installation(BASE)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = base.server[probe]["httpGet"]
        address = {"http": server.http, "metrics": server.metrics}[asked["port"]]
        assert httpx.get(f"http://{address}{asked['path']}", timeout=LONG_S).status_code == 200, probe
    url = f"http://{server.http}/v2"
    assert httpx.get(url, timeout=LONG_S).status_code == 401
    key = {"authorization": "Bearer key-of-metadata-0123456789"}
    assert httpx.get(url, headers=key, timeout=LONG_S).status_code == 200
    assert httpx.get(f"http://{server.metrics}/metrics", timeout=LONG_S).status_code == 200
