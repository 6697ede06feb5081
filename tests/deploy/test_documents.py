"""The pages of operations: their commands name existing files and have the described effect."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import yaml

from manifests import DEPLOY, ROOT, Installation, installation, overlays, rendered
from ortserve import __version__
from ortserve.app.server import FLUSH_S
from ortserve.cli.serve import build_parser
from ortserve.config.options import read_options, variable_name
from pages import DOCS, KUBERNETES, RUNBOOK, blocks, commands, own_overlay, yaml_block
from servers import LONG_S, SHORT_WARMUP, serving

OPERATIONS: Final = sorted((DOCS / "operations").glob("*.md"))
TYPED: Final = [command.words for command in commands(*OPERATIONS)]
COMPOSE: Final = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_images_are_built_from_existing_stages() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    built = [words for words in TYPED if words[:2] == ["docker", "build"]]
    assert len(built) == 2
    for words in built:
        target = words[words.index("--target") + 1]
        assert target in stages
        assert words[words.index("-t") + 1].endswith(f"/ortserve:{__version__}-{target}")
        assert words[-1] == "."


def test_compose_commands_name_existing_services_and_profiles() -> None:
    typed = [words for words in TYPED if words[:2] == ["docker", "compose"]]
    typed += [shlex.split(line.split("  ")[0]) for line in compose_header()]
    typed = [list(without_files(words)) for words in typed]
    services, profiles = (
        COMPOSE["services"],
        {profile for service in COMPOSE["services"].values() for profile in service.get("profiles", [])},
    )
    assert len(typed) >= 5
    for words in typed:
        plain = [word for word in words if not word.startswith("--") and "=" not in word][2:]
        if "--profile" in words:
            profile = words[words.index("--profile") + 1]
            assert profile in profiles
            plain.remove(profile)
        verb, *named = plain
        assert verb in ("up", "run")
        assert set(named) <= set(services)


def without_files(words: list[str]) -> Iterator[str]:
    """A command of Compose without the variables that name files, which exist here."""
    rest = iter(words)
    for word in rest:
        if word == "-f":
            assert (ROOT / next(rest)).exists()
        else:
            yield word


def compose_header() -> list[str]:
    text = (ROOT / "docker-compose.yml").read_text()
    return [line.removeprefix("#").strip() for line in text.splitlines() if re.match(r"#   .*docker compose", line)]


def test_applied_overlays_exist_and_every_overlay_is_described() -> None:
    described = re.findall(r"^\| `([\w-]+)` \|", KUBERNETES, re.MULTILINE)
    assert sorted(described) == sorted([*overlays(), "kserve"])
    for words in TYPED:
        for flag in ("-k", "-f"):
            if words[0] == "kubectl" and flag in words:
                path = words[words.index(flag) + 1]
                assert path == "my-models" or (ROOT / path).exists()


def test_every_component_is_described() -> None:
    for component in (DEPLOY / "components").iterdir():
        assert component.name in KUBERNETES or component.name in ("gpu", "mig", "hpa", "keda")


def test_documented_overlay_serves_a_volume_with_its_image_and_options(tmp_path: Path) -> None:
    installed = rendered(own_overlay(tmp_path, {**yaml_block("newTag"), **yaml_block("components/models-volume")}))
    assert installed.server["image"] == f"registry.example.com/ortserve:{__version__}-cpu"
    assert installed.server["args"] == ["serve", "/models"]
    assert installed.environment["ORTSERVE_LOG_FORMAT"] == "json"
    assert installed.environment["ORTSERVE_DRAIN_DELAY_S"]
    volumes = {volume["name"]: volume for volume in installed.pod["spec"]["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "ortserve-models", "readOnly": True}
    assert {"tmp", "shm"} <= set(volumes)


def test_documented_size_and_number_of_pods_take_effect(tmp_path: Path) -> None:
    installed = rendered(own_overlay(tmp_path, {**yaml_block("newTag"), **yaml_block("replicas:")}))
    assert installed.one("Deployment")["spec"]["replicas"] == 3
    assert installed.server["resources"] == {key: {"cpu": "4", "memory": "8Gi"} for key in ("requests", "limits")}


def test_documented_pull_secret_is_that_of_the_pods(tmp_path: Path) -> None:
    installed = rendered(own_overlay(tmp_path, {**yaml_block("newTag"), **yaml_block("imagePullSecrets")}))
    account = installed.one("ServiceAccount", installed.pod["spec"]["serviceAccountName"])
    assert account["imagePullSecrets"] == [{"name": "my-registry"}]


def test_openshift_chooses_the_ids_of_the_pod(tmp_path: Path) -> None:
    overlay = {"resources": ["../deploy/overlays/cpu"], "components": ["../deploy/components/openshift"]}
    context = rendered(own_overlay(tmp_path, overlay)).pod["spec"]["securityContext"]
    assert not {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"} & set(context)
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_documented_image_is_that_of_the_runtimes_for_kserve(tmp_path: Path) -> None:
    overlay = {"resources": ["../deploy/overlays/kserve"], "images": yaml_block("newTag")["images"]}
    runtimes = rendered(own_overlay(tmp_path, overlay)).all("ClusterServingRuntime")
    images = [container["image"] for runtime in runtimes for container in runtime["spec"]["containers"]]
    assert images == [f"registry.example.com/ortserve:{__version__}-cpu"] * 2


def opened_networks(installed: Installation) -> set[int]:
    """The versions of IP with which the pod may reach addresses outside the cluster's networks."""
    opened = [
        peer["ipBlock"]
        for rule in installed.one("NetworkPolicy")["spec"]["egress"]
        for peer in rule["to"]
        if "ipBlock" in peer
    ]
    for block in opened:
        whole = ip_network(block["cidr"])
        assert whole.prefixlen == 0
        assert {ip_network(part).version for part in block["except"]} == {whole.version}
    return {ip_network(block["cidr"]).version for block in opened}


def test_documented_archive_reaches_the_init_container(tmp_path: Path) -> None:
    overlay = yaml_block("newTag")
    overlay["components"] = ["../deploy/components/models-download"]
    overlay["configMapGenerator"] += yaml_block("MODELS_URL")["configMapGenerator"]
    installed = rendered(own_overlay(tmp_path, overlay))
    (fetching,) = installed.pod["spec"]["initContainers"]
    (source,) = fetching["envFrom"]
    variables = installed.one("ConfigMap", source["configMapRef"]["name"])["data"]
    assert variables["MODELS_URL"] == "https://models.example.com/repository-7.tar.gz"
    assert re.fullmatch(r"[0-9a-f]{64}", variables["MODELS_SHA256"])
    # The name has a hash, so that another archive causes a rollout.
    assert source["configMapRef"]["name"] != "ortserve-models"
    scripts = next(volume for volume in installed.pod["spec"]["volumes"] if volume["name"] == "fetch")
    assert "fetch.sh" in installed.one("ConfigMap", scripts["configMap"]["name"])["data"]
    ports = {port["port"] for rule in installed.one("NetworkPolicy")["spec"]["egress"] for port in rule["ports"]}
    assert ports == {53, 443}
    assert opened_networks(installed) == {4, 6}


def test_documented_patch_opens_a_private_address_to_the_init_container(tmp_path: Path) -> None:
    overlay = yaml_block("newTag")
    overlay["components"] = ["../deploy/components/models-download"]
    overlay["configMapGenerator"] += yaml_block("MODELS_URL")["configMapGenerator"]
    installed = rendered(own_overlay(tmp_path, overlay | yaml_block("10.20.30.40")))
    *before, added = installed.one("NetworkPolicy")["spec"]["egress"]
    assert added == {"to": [{"ipBlock": {"cidr": "10.20.30.40/32"}}], "ports": [{"port": 443}]}
    assert len(before) == 2
    for container in installed.containers:
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_models_image_is_mounted_as_a_volume(tmp_path: Path) -> None:
    overlay = yaml_block("newTag")
    overlay["components"] = ["../deploy/components/models-image"]
    installed = rendered(own_overlay(tmp_path, overlay))
    (volume,) = (volume for volume in installed.pod["spec"]["volumes"] if volume["name"] == "models")
    assert set(volume) == {"name", "image"}


def test_documented_store_is_served_through_a_cache_on_a_volume(tmp_path: Path) -> None:
    overlay = yaml_block("newTag")
    (store,) = map(yaml.safe_load, blocks("yaml", (DOCS / "repositories.md").read_text()))
    installed = rendered(own_overlay(tmp_path, {**overlay, **store}))
    assert installed.server["args"] == ["serve", "s3://my-bucket/models"]
    options = {name.removeprefix("ORTSERVE_").lower(): value for name, value in installed.environment.items()}
    mounted = {mount["mountPath"] for mount in installed.server["volumeMounts"]}
    assert options["store_cache_dir"] in mounted
    assert options["model_control_mode"] == "poll"
    assert {"tmp", "shm", "cache"} == {volume["name"] for volume in installed.pod["spec"]["volumes"]}
    ports = {port["port"] for rule in installed.one("NetworkPolicy")["spec"]["egress"] for port in rule["ports"]}
    assert ports == {53, 443}
    assert opened_networks(installed) == {4, 6}


def test_documented_traces_reach_the_named_collector(tmp_path: Path) -> None:
    overlay = yaml_block("newTag")
    traces = yaml_block("ORTSERVE_OTLP_ENDPOINT")
    overlay["configMapGenerator"][0]["literals"] += traces["configMapGenerator"][0]["literals"]
    installed = rendered(own_overlay(tmp_path, overlay | {"patches": traces["patches"]}))
    assert installed.environment["ORTSERVE_OTLP_ENDPOINT"] == "http://collector.observability:4318"
    assert installed.environment["ORTSERVE_OTLP_SAMPLE_RATIO"] == "0.01"
    ports = {port["port"] for rule in installed.one("NetworkPolicy")["spec"]["egress"] for port in rule["ports"]}
    assert ports == {53, 4318}


def test_documented_patch_admits_prometheus_of_another_namespace(tmp_path: Path) -> None:
    installed = rendered(own_overlay(tmp_path, {**yaml_block("newTag"), **yaml_block("my-prometheus")}))
    callers, scrapes = installed.one("NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for port in scrapes["ports"]] == ["metrics"]
    (peer,) = scrapes["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "my-prometheus"}
    assert callers == rendered(DEPLOY / "overlays" / "cpu").one("NetworkPolicy")["spec"]["ingress"][0]


def test_documented_timings_equal_those_of_the_manifests() -> None:
    base = installation("base, by its files")
    section = KUBERNETES[KUBERNETES.index("A pod ends in this order") :]
    assert f"waits {base.server['lifecycle']['preStop']['sleep']['seconds']} s (`preStop`)" in section
    assert f"`ORTSERVE_DRAIN_DELAY_S` ({base.environment['ORTSERVE_DRAIN_DELAY_S']} s)" in section
    assert f"`ORTSERVE_DRAIN_TIMEOUT_S` ({base.environment['ORTSERVE_DRAIN_TIMEOUT_S']} s)" in section
    assert f"`terminationGracePeriodSeconds` ({base.pod['spec']['terminationGracePeriodSeconds']})" in section
    assert "(`ORTSERVE_GRPC_MAX_CONNECTION_AGE_S`)" in section
    for protocol in ("GRPC", "HTTP"):
        assert f"`ORTSERVE_{protocol}_MAX_CONNECTION_AGE_S`" in KUBERNETES
        assert base.environment[f"ORTSERVE_{protocol}_MAX_CONNECTION_AGE_S"] == "300"  # "five minutes"


def test_documented_channels_use_every_address() -> None:
    """Round robin and weighted round robin; addresses of two servers replace the headless Service's name."""
    snippets = blocks("python", KUBERNETES)
    assert len(snippets) == 2
    with (
        serving("--example", *SHORT_WARMUP, "--server-name", "first") as first,
        serving("--example", *SHORT_WARMUP, "--server-name", "second") as second,
    ):
        names = f"ipv4:{first.grpc},{second.grpc}"
        for snippet in snippets:
            variables: dict[str, Any] = {}
            exec(snippet.replace("dns:///ortserve-grpc.ortserve:8001", names), variables)
            with variables["channel"] as channel:
                assert isinstance(channel, grpc.Channel)
                call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                    "/inference.GRPCInferenceService/ServerMetadata"
                )
                seen = [call(b"", timeout=LONG_S, wait_for_ready=True) for _ in range(200)]
            assert any(b"first" in answer for answer in seen)
            assert any(b"second" in answer for answer in seen)


def test_runbook_lists_exactly_the_alerts() -> None:
    rules = yaml.safe_load((DEPLOY / "monitoring" / "rules" / "ortserve.yaml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    assert alerts == set(re.findall(r"\*\*(Ortserve\w+)\*\*", RUNBOOK))


def test_documented_unit_starts_the_server_and_waits_for_its_drain(tmp_path: Path) -> None:
    (text,) = blocks("ini", (DOCS / "operations" / "index.md").read_text())
    unit = ConfigParser(interpolation=None)
    unit.read_string(text)
    service = unit["Service"]
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert command == "serve"
    given = vars(build_parser().parse_intermixed_args([str(tmp_path), *arguments[1:]]))
    options = read_options({name: value for name, value in given.items() if not name.endswith("_file")}, None)
    longest_s = options.drain_delay_s + options.drain_timeout_s + options.otlp_flush_timeout_s + 2 * FLUSH_S
    assert longest_s + 5 < float(service["TimeoutStopSec"])
    assert options.http_max_connections + options.grpc_max_connections < int(service["LimitNOFILE"])
    variable, _, folder = service["Environment"].partition("=")
    assert variable == variable_name("state_dir")
    assert Path(folder) == Path("/var/lib") / service["StateDirectory"]
    if shutil.which("systemd-analyze") is not None:
        file = tmp_path / "ortserve.service"
        file.write_text(text.replace(program, sys.executable))
        for check in (["verify"], ["security", "--offline=true", "--threshold=40"]):
            words = ["systemd-analyze", *check, str(file)]
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
            assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_questions_of_the_runbook_are_answered() -> None:
    with serving("--example", *SHORT_WARMUP) as server:
        base = f"http://{server.http}"
        asked = re.findall(r'curl -s (?:-X (\w+) )?"\$POD(/[^"]*)"', RUNBOOK)
        assert len(asked) == 2
        for method, path in asked:
            answer = httpx.request(method or "GET", base + path.replace("NAME", "digits"), timeout=LONG_S)
            assert answer.status_code == 200, (path, answer.text)
