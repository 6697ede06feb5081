"""Rules that every overlay for Kubernetes must follow."""

import pytest
import yaml

from manifests import (
    BASE,
    DEPLOY,
    Document,
    Installation,
    cpus,
    installation,
    is_pinned,
    n_bytes,
    overlays,
    read_documents,
)
from ortserve import __version__
from ortserve.app.server import FLUSH_S
from ortserve.config.option_groups import tls_problems
from ortserve.config.options import ENV_PREFIX, ServerOptions, read_options, variable_name

KSERVE = DEPLOY / "overlays" / "kserve"


@pytest.fixture(params=[BASE, *overlays()])
def installed(request: pytest.FixtureRequest) -> Installation:
    return installation(request.param)


@pytest.fixture
def options(installed: Installation, monkeypatch: pytest.MonkeyPatch) -> ServerOptions:
    """The options that the server reads from its environment in this installation; fails if they are invalid."""
    for name in (*ServerOptions.model_fields, "config"):
        monkeypatch.delenv(variable_name(name), raising=False)
    for name, value in installed.environment.items():
        monkeypatch.setenv(name, value)
    return read_options({})


def test_every_variable_is_an_option(installed: Installation, options: ServerOptions) -> None:
    known = {variable_name(name) for name in ServerOptions.model_fields}
    assert {name for name in installed.environment if name.startswith(ENV_PREFIX)} <= known
    assert options != ServerOptions()


def test_services_do_not_set_options_by_their_names(installed: Installation) -> None:
    """A Service ``ortserve-grpc`` would set ORTSERVE_GRPC_PORT to ``tcp://…``."""
    assert installed.pod["spec"]["enableServiceLinks"] is False


def test_ports_are_those_that_the_server_listens_on(installed: Installation, options: ServerOptions) -> None:
    ports = {port["name"]: port["containerPort"] for port in installed.server["ports"]}
    assert ports == {"http": options.http_port, "grpc": options.grpc_port, "metrics": options.metrics_port}


def test_services_target_the_ports_of_the_pod(installed: Installation) -> None:
    labels = installed.pod["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in installed.server["ports"]}
    services = installed.all("Service")
    assert {port["name"] for service in services for port in service["spec"]["ports"]} == set(ports)
    for service in services:
        assert service["spec"]["selector"].items() <= labels
        for port in service["spec"]["ports"]:
            assert port["port"] == ports[port["targetPort"]]


def test_headless_service_for_grpc_names_ready_pods_only(installed: Installation) -> None:
    spec = installed.one("Service", "ortserve-grpc")["spec"]
    assert spec["clusterIP"] == "None"
    assert not spec.get("publishNotReadyAddresses", False)


def test_old_connections_end_so_that_clients_find_new_pods(options: ServerOptions) -> None:
    assert options.http_max_connection_age_s is not None
    assert options.grpc_max_connection_age_s is not None
    assert options.grpc_max_connection_age_grace_s is not None


def test_selectors_find_the_pod(installed: Installation) -> None:
    labels = installed.pod["metadata"]["labels"].items()
    selectors = [
        installed.one("Deployment")["spec"]["selector"],
        installed.one("PodDisruptionBudget")["spec"]["selector"],
        installed.one("NetworkPolicy")["spec"]["podSelector"],
        *(spread["labelSelector"] for spread in installed.pod["spec"]["topologySpreadConstraints"]),
    ]
    for selector in selectors:
        assert selector["matchLabels"]
        assert selector["matchLabels"].items() <= labels


def test_network_policy_opens_every_port_to_named_peers_only(installed: Installation) -> None:
    rules = installed.one("NetworkPolicy")["spec"]["ingress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == {"http", "grpc", "metrics"}
    assert all(rule["from"] for rule in rules)


def test_termination_grace_period_exceeds_the_drain(installed: Installation, options: ServerOptions) -> None:
    before = installed.server["lifecycle"]["preStop"]["sleep"]["seconds"]
    writing_s = 2 * FLUSH_S + options.otlp_flush_timeout_s
    longest = before + options.drain_delay_s + options.drain_timeout_s + writing_s
    assert installed.pod["spec"]["terminationGracePeriodSeconds"] > longest + 5  # 5 seconds to free models and exit


def test_drain_delay_outlasts_the_readiness_probe(installed: Installation, options: ServerOptions) -> None:
    probe = installed.server["readinessProbe"]
    assert options.drain_delay_s >= probe["periodSeconds"] * probe["failureThreshold"]


def test_each_probe_uses_its_health_path(installed: Installation, options: ServerOptions) -> None:
    """Probes use a port whose connections clients cannot exhaust and that requires no client certificate."""
    asked = {name: installed.server[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    has_tls = options.tls_cert_file is not None and options.tls_metrics
    assert {probe.get("scheme", "HTTP") for probe in asked.values()} == {"HTTPS" if has_tls else "HTTP"}
    assert {name: (probe["path"], probe["port"]) for name, probe in asked.items()} == {
        "startupProbe": ("/v2/health/live", "metrics"),
        "livenessProbe": ("/v2/health/live", "metrics"),
        "readinessProbe": ("/v2/health/ready", "metrics"),
    }


def test_tls_options_agree_and_their_mounted_files_can_be_renewed(
    installed: Installation, options: ServerOptions
) -> None:
    assert list(tls_problems(options, grpc_transport=options.grpc_transport)) == []
    mounts = {mount["mountPath"]: mount for mount in installed.server["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in installed.pod["spec"]["volumes"]}
    for file in (options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file):
        if file is not None:
            mount = mounts[str(file.parent)]
            assert mount["readOnly"] is True
            assert "subPath" not in mount  # a subPath mount is never renewed
            assert {"secret", "configMap"} & set(volumes[mount["name"]])
    if options.tls_key_file is not None:
        secret = volumes[mounts[str(options.tls_key_file.parent)]["name"]]["secret"]
        assert secret["defaultMode"] == 0o440
        assert installed.pod["spec"]["securityContext"]["fsGroup"]  # the group that may read the files


@pytest.mark.parametrize(("overlay", "asks_clients"), [("tls", False), ("mutual-tls", True)])
def test_tls_overlays_enable_tls(overlay: str, asks_clients: bool) -> None:
    named = {name for name in installation(overlay).environment if name.startswith("ORTSERVE_TLS_")}
    wanted = {"ORTSERVE_TLS_CERT_FILE", "ORTSERVE_TLS_KEY_FILE"}
    assert named == wanted | ({"ORTSERVE_TLS_CLIENT_CA_FILE"} if asks_clients else set())


def test_services_declare_the_application_protocol(installed: Installation, options: ServerOptions) -> None:
    """``appProtocol`` uses the values that Kubernetes defines for gateways and service meshes."""
    plain = {"http": "http", "grpc": "kubernetes.io/h2c", "metrics": None}
    spoken = plain if options.tls_cert_file is None else plain | {"http": "https", "grpc": "https"}
    for service in installed.all("Service"):
        for port in service["spec"]["ports"]:
            assert port.get("appProtocol") == spoken[port["name"]]


def test_every_container_has_resource_limits(installed: Installation) -> None:
    for container in installed.containers:
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        assert cpus(limits["cpu"]) >= cpus(requests["cpu"]) > 0
        assert n_bytes(limits["memory"]) >= n_bytes(requests["memory"]) > 0


def test_pods_have_their_processors_and_memory_reserved(installed: Installation) -> None:
    """Kubernetes gives whole processors only to pods all of whose containers have equal requests and limits."""
    for container in installed.containers:
        limits = {name: value for name, value in container["resources"]["limits"].items() if "/" not in name}
        assert limits == container["resources"]["requests"]


def test_autoscaler_of_nodes_may_evict_the_pod(installed: Installation) -> None:
    """Otherwise a pod with an ``emptyDir`` keeps its node."""
    assert installed.pod["metadata"]["annotations"] == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}


def test_queued_requests_fit_into_the_memory_limit(installed: Installation, options: ServerOptions) -> None:
    (shm,) = (volume["emptyDir"] for volume in installed.pod["spec"]["volumes"] if volume["name"] == "shm")
    memory = n_bytes(installed.server["resources"]["limits"]["memory"])
    bodies = options.max_inflight_bytes or memory // 4
    assert bodies + options.max_queue_bytes + n_bytes(shm["sizeLimit"]) <= 0.75 * memory


def test_containers_drop_all_privileges(installed: Installation) -> None:
    pod = installed.pod["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for container in installed.containers:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    (namespace,) = installed.all("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_writable_paths_are_volumes(installed: Installation) -> None:
    volumes = {volume["name"]: volume for volume in installed.pod["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in installed.server["volumeMounts"]}
    assert "sizeLimit" in mounts["/tmp"]["emptyDir"]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("overlay", overlays())
def test_everything_is_in_one_namespace(overlay: str) -> None:
    documents = [one for one in installation(overlay).documents if one["kind"] != "Namespace"]
    assert {one["metadata"].get("namespace") for one in documents} == {"ortserve"}


def test_images_are_pinned_and_the_server_is_of_this_version(installed: Installation) -> None:
    for container in installed.containers:
        assert is_pinned(container["image"]), container["image"]
    assert installed.server["image"].startswith(f"ortserve:{__version__}-")


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("a", False),
        ("a:latest", False),
        ("host:5000/a", False),
        ("host:5000/a:1.2", True),
        ("a@sha256:" + "0" * 64, True),
    ],
)
def test_pinned_images_are_recognised(image: str, expected: bool) -> None:
    assert is_pinned(image) is expected


@pytest.mark.parametrize(("overlay", "resource"), [("gpu", "nvidia.com/gpu"), ("mig", "nvidia.com/mig-1g.10gb")])
def test_gpu_overlays_request_a_gpu_and_exclude_the_cpu(overlay: str, resource: str) -> None:
    installed = installation(overlay)
    limits = installed.server["resources"]["limits"]
    assert {name: count for name, count in limits.items() if "/" in name} == {resource: "1"}
    assert installed.server["image"].endswith("-gpu")
    assert installed.environment["ORTSERVE_EXECUTION_PROVIDERS"] == "cuda"


def test_both_autoscalers_use_the_same_metrics_and_bounds() -> None:
    (hpa,) = read_documents(DEPLOY / "components" / "hpa" / "horizontalpodautoscaler.yaml")
    (keda,) = read_documents(DEPLOY / "components" / "keda" / "scaledobject.yaml")
    adapter = yaml.safe_load((DEPLOY / "components" / "hpa" / "prometheus-adapter.yaml").read_text())

    pods = [metric["pods"] for metric in hpa["spec"]["metrics"]]
    triggers = [trigger["metadata"] for trigger in keda["spec"]["triggers"]]
    rules = adapter["rules"]["custom"]
    assert [one["metric"]["name"] for one in pods] == [rule["name"]["as"] for rule in rules]
    selected = '{namespace="ortserve"}'
    for rule, trigger in zip(rules, triggers, strict=True):
        series, _, _ = rule["seriesQuery"].partition("{")
        assert rule["name"]["matches"] == f"^{series}$"
        query = rule["metricsQuery"].replace("<<.Series>>{<<.LabelMatchers>>}", series + selected)
        assert trigger["query"] == query.removesuffix(" by (<<.GroupBy>>)")
        assert trigger["serverAddress"] == triggers[0]["serverAddress"]
        assert trigger["ignoreNullValues"] == "false"  # KEDA takes no value for 0 otherwise
    targets = [cpus(one["target"]["averageValue"]) for one in pods]
    assert targets == [float(trigger["threshold"]) for trigger in triggers]
    assert hpa["spec"]["scaleTargetRef"]["name"] == keda["spec"]["scaleTargetRef"]["name"] == "ortserve"
    assert hpa["spec"]["minReplicas"] == keda["spec"]["minReplicaCount"]
    assert hpa["spec"]["maxReplicas"] == keda["spec"]["maxReplicaCount"]
    assert hpa["spec"]["behavior"] == keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]


@pytest.mark.parametrize("overlay", ["autoscaled", "autoscaled-keda"])
def test_autoscaled_deployment_sets_no_replicas(overlay: str) -> None:
    assert "replicas" not in installation(overlay).one("Deployment")["spec"]


def test_service_monitor_selects_the_metrics_service() -> None:
    base = installation(BASE)
    (monitor,) = read_documents(DEPLOY / "monitoring" / "servicemonitor.yaml")
    service = base.one("Service", "ortserve-metrics")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    for other in base.all("Service"):
        if other is not service:
            assert not monitor["spec"]["selector"]["matchLabels"].items() <= other["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def kserve_runtimes() -> dict[str, Document]:
    found = read_documents(KSERVE / "clusterservingruntimes.yaml")
    return {runtime["metadata"]["name"]: runtime["spec"] for runtime in found}


def test_kserve_has_a_runtime_for_each_protocol_that_the_examples_name() -> None:
    runtimes = kserve_runtimes()
    examples = [one["spec"]["predictor"]["model"] for one in read_documents(KSERVE / "inferenceservice.yaml")]
    assert {example["protocolVersion"] for example in examples} == {"v2", "grpc-v2"}
    for example in examples:
        runtime = runtimes[example["runtime"]]
        assert runtime["protocolVersions"] == [example["protocolVersion"]]
        formats = [{key: one[key] for key in ("name", "version")} for one in runtime["supportedModelFormats"]]
        assert example["modelFormat"] in formats


@pytest.mark.parametrize("name", ["ortserve", "ortserve-grpc"])
def test_kserve_runtime_keeps_to_the_same_rules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = kserve_runtimes()[name]
    (container,) = spec["containers"]
    for variable in container["env"]:
        assert variable["name"].removeprefix(ENV_PREFIX).lower() in ServerOptions.model_fields
        monkeypatch.setenv(variable["name"], variable["value"])
    flags = dict(zip(container["args"][2::2], container["args"][3::2], strict=True))
    options = read_options({flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()})

    assert container["args"][:2] == ["serve", "/mnt/models"]
    (port,) = container["ports"]
    assert port["containerPort"] == {"ortserve": options.http_port, "ortserve-grpc": options.grpc_port}[name]
    assert spec["annotations"]["prometheus.kserve.io/port"] == str(options.metrics_port)
    readiness, liveness = container["readinessProbe"], container["livenessProbe"]
    if name == "ortserve":
        assert liveness["httpGet"] == {"path": "/v2/health/live", "port": options.metrics_port}
        assert readiness["httpGet"] == {"path": "/v2/health/ready", "port": options.http_port}
    else:
        # Knative sends HTTP probes to the exposed port, which is that of gRPC here.
        asked = ["ortserve", "health", "--live", "--metrics-port", str(options.metrics_port)]
        assert liveness["exec"] == {"command": asked}
        assert readiness["grpc"] == {"port": options.grpc_port}
    # Kubernetes' default grace period, which KServe does not change.
    assert options.drain_delay_s + options.drain_timeout_s < 30
    assert container["image"] == f"ortserve:{__version__}-cpu"
    assert container["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"cpu", "memory"} <= set(container["resources"]["limits"])
    memory = n_bytes(container["resources"]["limits"]["memory"])
    assert (options.max_inflight_bytes or memory // 4) + options.max_queue_bytes < memory
