"""Files for other programs are valid under their published schemas."""

import copy
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate.utils
import pytest
import yaml

from manifests import BASE, DEPLOY, ROOT, installation, overlays
from pages import KUBERNETES, blocks, yaml_block

MINORS = sorted({tuple(map(int, version.split(".")[:2])) for version in kubernetes_validate.utils.all_versions()})[-3:]
"""The newest three known minor versions; Kubernetes maintains three at a time."""

CUSTOM = {"ScaledObject", "ServiceMonitor", "PrometheusRule"}
"""Kinds that operators define; Kubernetes' schemas do not include them."""


def complaint(document: dict[str, Any], minor: tuple[int, ...]) -> str | None:
    """The error that a cluster of this version reports for a document; unknown fields are errors."""
    try:
        kubernetes_validate.utils.validate(document, ".".join(map(str, minor)), strict=True)
    except kubernetes_validate.utils.ValidationError as error:
        return f"{document['kind']}: {error.message}"
    return None


@pytest.mark.parametrize("minor", MINORS, ids=lambda minor: ".".join(map(str, minor)))
@pytest.mark.parametrize("name", [BASE, *overlays()])
def test_manifests_are_valid(name: str, minor: tuple[int, ...]) -> None:
    own = [document for document in installation(name).documents if document["kind"] not in CUSTOM]
    assert [message for document in own if (message := complaint(document, minor))] == []


@pytest.mark.parametrize("minor", MINORS, ids=lambda minor: ".".join(map(str, minor)))
def test_documented_ingress_is_valid_and_names_a_port_of_the_service(minor: tuple[int, ...]) -> None:
    ingress = yaml_block("kind: Ingress")
    assert complaint(ingress, minor) is None
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    backend = path["backend"]["service"]
    service = installation(BASE).one("Service", backend["name"])
    assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}


def test_documented_routes_name_ports_of_the_service() -> None:
    (block,) = (block for block in blocks("yaml", KUBERNETES) if "kind: HTTPRoute" in block)
    spoken = {"HTTPRoute": "http", "GRPCRoute": "kubernetes.io/h2c"}
    routes = {route["kind"]: route for route in yaml.safe_load_all(block)}
    assert routes.keys() == spoken.keys()
    for kind, route in routes.items():
        (rule,) = route["spec"]["rules"]
        (backend,) = rule["backendRefs"]
        service = installation(BASE).one("Service", backend["name"])
        protocols = {port["port"]: port["appProtocol"] for port in service["spec"]["ports"]}
        assert protocols[backend["port"]] == spoken[kind]
    # Two routes of different kinds must not share a host name.
    assert routes["HTTPRoute"]["spec"]["hostnames"] != routes["GRPCRoute"]["spec"]["hostnames"]


def test_misspelled_field_is_found() -> None:
    broken = copy.deepcopy(installation(BASE).one("Deployment"))
    container = broken["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")
    message = complaint(broken, MINORS[-1])
    assert message is not None
    assert "readynessProbe" in message


@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/compose.tls.yml"])
def test_compose_file_is_valid(file: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_dockerfile_passes_its_linter() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), "Dockerfile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_for_the_operator_are_those_of_the_file() -> None:
    script = runpy.run_path(str(DEPLOY / "monitoring" / "prometheusrule.py"))
    text = script["RESOURCE"].read_text()
    assert text == script["render"](script["RULES"].read_text()), "run: python deploy/monitoring/prometheusrule.py"
    assert yaml.safe_load(text)["spec"] == yaml.safe_load(script["RULES"].read_text())
