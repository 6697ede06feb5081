"""Every documented ``kubectl`` command is run as written and has the documented effect.

``kubectl``, the server behind the pods and the commands in pods are real. The cluster is ``kubernetes_api``, which
states what the tests prove.
"""

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from certificates import Secret
from kubelet import Kubelet
from kubernetes_api import serving_api
from manifests import DEPLOY, overlays
from pages import KUBERNETES, kubectl_commands, own_overlay, yaml_block
from servers import LONG_S, SHORT_WARMUP, ServerProcess, serving

NEEDED: Final = (1, 31)
"""The first version of ``kubectl`` that forwards ports and runs commands over WebSockets."""

OF_PAGES: Final = kubectl_commands()
TYPED: Final[list[str]] = []
GROUPS: Final = ("infer", "metadata", "control")
LAST_LOG: Final = "what the last container said\n"
EXAMPLES: Final = yaml_block("newTag")
PAGE_OVERLAY: Final = EXAMPLES | yaml_block("components/models-volume")


def of_pages(*patterns: str) -> pytest.MarkDecorator:
    """Pass the documented command of each pattern to the test as ``commands``; the test must run all of them."""
    found = [command for pattern in patterns for command in OF_PAGES if re.search(pattern, command)]
    assert len(found) == len(patterns), f"expected one command for each of {patterns}, got {found}"
    TYPED.extend(found)
    return pytest.mark.parametrize("commands", [found], ids=[" ".join(patterns)])


@dataclass
class Console:
    """A shell in the root of the repository, with the files that the pages mention."""

    root: Path
    environment: dict[str, str]
    typed: list[str] = field(default_factory=list)

    def type(self, command: str, *, expect: int = 0, **places: str) -> str:
        """Run a command with ``places`` filled in. Returns its output."""
        done = subprocess.run(
            ["/bin/sh", "-c", self._fill(command, places)],
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=LONG_S,
        )
        assert done.returncode == expect, f"{command}: exit status {done.returncode}\n{done.stdout}"
        return done.stdout

    @contextmanager
    def started(self, command: str, **places: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command in the background during the block; it is ended afterwards."""
        words = shlex.split(self._fill(command, places))
        with subprocess.Popen(words, cwd=self.root, env=self.environment, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.terminate()

    def _fill(self, command: str, places: Mapping[str, str]) -> str:
        self.typed.append(command)
        for place, value in places.items():
            command = command.replace(place, value)
        return command

    def get(self, kind: str, name: str = "", namespace: str = "ortserve") -> Any:
        return json.loads(self.type(f"kubectl -n {namespace} get {kind} {name} -o json"))

    def pods(self) -> dict[str, Any]:
        """The pods by name."""
        return {pod["metadata"]["name"]: pod for pod in self.get("pods")["items"]}

    def install(self, overlay: dict[str, Any]) -> None:
        """Install an overlay in a folder beside ``deploy``."""
        own_overlay(self.root, overlay)
        self.type("kubectl apply -k my-models")

    def wait_for_rollout(self) -> None:
        self.type("kubectl -n ortserve rollout status deployment/ortserve --timeout=10s")

    def set_status(self, pod: str, **status: Any) -> None:
        """Set a pod's status as the kubelet would."""
        patch = json.dumps({"status": status})
        self.type(f"kubectl -n ortserve patch pod {pod} --subresource=status --type=merge -p '{patch}'")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("--example", *SHORT_WARMUP, env={"ORTSERVE_DRAIN_DELAY_S": "0"}) as server:
        yield server


@pytest.fixture
def console(server: ServerProcess, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Console]:
    """A console on an empty cluster. At the end the test must have run all its documented commands."""
    if kubectl_version() < NEEDED:
        pytest.skip(f"needs kubectl {NEEDED}, got {kubectl_version()}")
    root = tmp_path / "repository"
    shutil.copytree(DEPLOY, root / "deploy")
    write_files_of_pages(root)
    port, metrics_port = (address.rpartition(":")[2] for address in (server.http, server.metrics))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), "ORTSERVE_METRICS_PORT": metrics_port}
    logs = {"ortserve": server.output, "fetch-models": "MODELS_SHA256: expected 9f86…"}
    kubelet = Kubelet({8000: int(port)}, variables, logs, {"ortserve": LAST_LOG})
    with serving_api(tmp_path / "cluster", kubelet) as kubeconfig:
        # kubectl caches its discovery of a cluster in the home folder. Short commands need no garbage collector.
        environment = {"PATH": path, "HOME": str(tmp_path), "KUBECONFIG": str(kubeconfig), "GOGC": "off"}
        console = Console(root, environment)
        yield console
    callspec = getattr(request.node, "callspec", None)
    assert not callspec or set(callspec.params.get("commands", [])) <= set(console.typed)


@cache
def kubectl_version() -> tuple[int, ...]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    output = subprocess.run(
        ["kubectl", "version", "--client", "-o", "json"], capture_output=True, check=True, timeout=LONG_S
    ).stdout
    version = re.match(r"v(\d+)\.(\d+)", json.loads(output)["clientVersion"]["gitVersion"])
    assert version is not None
    return tuple(map(int, version.groups()))


def write_files_of_pages(root: Path) -> None:
    """Write the certificate, authority and keys under the names that the commands use."""
    secret = Secret(root / "tls")
    for file in (secret.cert, secret.key, secret.ca):
        shutil.copyfile(file, root / file.name)
    for group in GROUPS:
        (root / f"{group}.keys").write_text(f"key-of-{group}-0123456789\n")


def test_every_documented_kubectl_command_is_run_by_a_test() -> None:
    assert sorted(TYPED) == sorted(OF_PAGES)


@of_pages("apply -k my-models")
def test_documented_overlay_starts_once_its_claim_exists(console: Console, commands: Sequence[str]) -> None:
    own_overlay(console.root, PAGE_OVERLAY)
    console.type(commands[0])
    waiting = [pod["status"]["containerStatuses"][0]["state"]["waiting"] for pod in console.pods().values()]
    assert {state["message"] for state in waiting} == {'persistentvolumeclaims "ortserve-models" not found'}
    (console.root / "claim.yaml").write_text(yaml.safe_dump(yaml_block("PersistentVolumeClaim")))
    console.type("kubectl apply -f claim.yaml")
    console.wait_for_rollout()


@of_pages("rollout status")
def test_rollout_status_waits_until_the_pods_are_ready(console: Console, commands: Sequence[str]) -> None:
    console.install(EXAMPLES | {"components": ["../deploy/components/keys"]})
    with console.started(commands[0]) as rollout:
        assert rollout.stdout is not None
        assert "0 of 2 updated replicas are available" in rollout.stdout.readline()
        console.type("kubectl -n ortserve create secret generic ortserve-keys --from-literal=infer=key")
        assert "successfully rolled out" in rollout.communicate(timeout=LONG_S)[0]
    assert rollout.returncode == 0


@pytest.mark.parametrize("overlay", overlays())
def test_every_overlay_is_accepted_and_rolled_out(overlay: str, console: Console) -> None:
    console.type(f"kubectl apply -k deploy/overlays/{overlay}")
    console.type("kubectl -n ortserve create secret tls ortserve-tls --cert=tls.crt --key=tls.key")
    console.type("kubectl -n ortserve create configmap ortserve-client-ca --from-file=ca.crt")
    console.wait_for_rollout()


def test_changed_overlay_replaces_the_pods_and_an_unchanged_one_does_not(console: Console) -> None:
    console.install(EXAMPLES)
    first = console.pods()
    console.type("kubectl apply -k my-models")
    assert console.pods() == first
    shutil.rmtree(console.root / "my-models")
    options = PAGE_OVERLAY["configMapGenerator"][0] | {"literals": ["ORTSERVE_LOG_LEVEL=debug"]}
    console.install(EXAMPLES | {"configMapGenerator": [options]})
    console.wait_for_rollout()
    assert not first.keys() & console.pods().keys()


@contextmanager
def forwarded(console: Console, command: str, **places: str) -> Iterator[httpx.Client]:
    """A client of the forwarded port; ``kubectl`` chooses it, because the page's port may be in use."""
    with console.started(command, **places, **{"8000:8000": ":8000"}) as forwarding:
        assert forwarding.stdout is not None
        listening = re.match(r"Forwarding from (127.0.0.1:\d+) -> 8000", forwarding.stdout.readline())
        assert listening is not None
        with httpx.Client(base_url=f"http://{listening[1]}", timeout=LONG_S) as client:
            yield client


@of_pages("port-forward service/")
def test_forwarded_port_of_the_service_reaches_a_server(console: Console, commands: Sequence[str]) -> None:
    console.install(EXAMPLES)
    path = re.search(r"^curl http://127.0.0.1:8000(/\S+)$", KUBERNETES, re.MULTILINE)
    assert path is not None
    with forwarded(console, commands[0]) as client:
        assert client.get(path[1]).json() == {"ready": True}
        many = {"name": "image", "datatype": "FP32", "shape": [1_000, 1, 8, 8], "data": [0] * 64_000}
        answer = client.post("/v2/models/digits/infer", json={"inputs": [many]})
        assert answer.json()["outputs"][0]["shape"][0] == 1_000  # both directions in many frames


@of_pages("port-forward pod/", "get pods")
def test_forwarded_port_of_a_pod_reaches_its_server(console: Console, commands: Sequence[str]) -> None:
    forward, list_pods = commands
    console.install(EXAMPLES)
    pod = console.type(list_pods).splitlines()[1].split()[0]
    with forwarded(console, forward, NAME=pod) as client:
        assert client.get("/v2/models/digits/batching").status_code == 200


@of_pages("label namespace")
def test_network_policy_admits_the_labelled_namespace(console: Console, commands: Sequence[str]) -> None:
    console.install(EXAMPLES)
    console.type("kubectl create namespace my-application")
    console.type(commands[0])
    labels = console.get("namespace", "my-application")["metadata"]["labels"]
    rules = console.get("networkpolicy", "ortserve")["spec"]["ingress"]
    selectors = [peer.get("namespaceSelector", {}).get("matchLabels") for rule in rules for peer in rule["from"]]
    assert any(wanted and wanted.items() <= labels.items() for wanted in selectors)


def assert_mounted(console: Console, n_files: int) -> None:
    """Check that the files in the server's options are mounted in the pods."""
    (source,) = next(iter(console.pods().values()))["spec"]["containers"][0]["envFrom"]
    options = console.get("configmap", source["configMapRef"]["name"])["data"]
    files = [value for value in options.values() if value.startswith("/etc/ortserve/")]
    assert len(files) == n_files
    console.type(f"kubectl -n ortserve exec deployment/ortserve -- ls {' '.join(files)}")


@of_pages("apply -f .*namespace.yaml", "create secret generic .*control.keys$")
def test_keys_can_be_created_before_the_pods(console: Console, commands: Sequence[str]) -> None:
    make_namespace, make_keys = commands
    assert 'namespaces "ortserve" not found' in console.type(make_keys, expect=1)
    console.type(make_namespace)
    console.type(make_keys)
    console.install(EXAMPLES | {"components": ["../deploy/components/keys"]})
    console.wait_for_rollout()
    assert_mounted(console, 3)


@of_pages("create secret tls", "create configmap")
def test_pods_start_once_certificates_exist(console: Console, commands: Sequence[str]) -> None:
    console.type("kubectl apply -k deploy/overlays/mutual-tls")
    for command in commands:
        assert not any(pod["status"]["phase"] == "Running" for pod in console.pods().values())
        console.type(command)
    console.wait_for_rollout()
    assert console.get("secret", "ortserve-tls")["type"] == "kubernetes.io/tls"
    assert_mounted(console, 3)


@of_pages("apply -f -$")
def test_changed_keys_update_the_secret_and_keep_every_group(console: Console, commands: Sequence[str]) -> None:
    console.type("kubectl apply -f deploy/base/namespace.yaml")
    console.type(commands[0].partition(" --dry-run")[0])
    for change in range(2):
        (console.root / "infer.keys").write_text(f"old\nnew-{change}\n")
        output = console.type(commands[0])
        assert ("missing the kubectl.kubernetes.io/last-applied-configuration" in output) == (change == 0)
        held = console.get("secret", "ortserve-keys")["data"]
        assert base64.b64decode(held["infer"]) == (console.root / "infer.keys").read_bytes()
        assert held.keys() == {"infer", "metadata", "control"}


@of_pages("ls -l .*/keys")
def test_key_files_are_listed_by_date_without_keys(console: Console, commands: Sequence[str]) -> None:
    console.type("kubectl apply -f deploy/base/namespace.yaml")
    files = " ".join(f"--from-file={group}={group}.keys" for group in GROUPS)
    console.type(f"kubectl -n ortserve create secret generic ortserve-keys {files}")
    console.install(EXAMPLES | {"components": ["../deploy/components/keys"]})
    output = console.type(commands[0])
    assert {line.split()[-1] for line in output.splitlines()[1:]} == set(GROUPS)
    assert "key-of" not in output


@of_pages("ortserve health")
def test_health_command_runs_in_the_named_pod(console: Console, commands: Sequence[str]) -> None:
    """The command names the pod, because for a Deployment ``kubectl`` would choose the ready pod."""
    console.install(EXAMPLES)
    unready, ready = console.pods()
    assert console.type(commands[0], NAME=unready) == "ready\n"
    console.set_status(unready, conditions=[{"type": "Ready", "status": "False"}])
    assert f"/pods/{unready}/exec" in console.type(commands[0], NAME=f"-v=6 {unready}")
    assert f"/pods/{ready}/exec" in console.type(commands[0], NAME="-v=6 deployment/ortserve")


@of_pages("ls /dev/nvidia0")
def test_exit_status_shows_whether_the_pod_has_a_gpu(console: Console, commands: Sequence[str]) -> None:
    console.install(EXAMPLES)
    console.type(commands[0], expect=0 if Path("/dev/nvidia0").exists() else 2)


@of_pages("rollout restart")
def test_restart_replaces_every_pod(console: Console, commands: Sequence[str]) -> None:
    console.install(EXAMPLES)
    first = console.pods()
    console.type(commands[0])
    console.wait_for_rollout()
    assert len(console.pods()) == len(first)
    assert not first.keys() & console.pods().keys()
    template = console.get("deployment", "ortserve")["spec"]["template"]
    assert "kubectl.kubernetes.io/restartedAt" in template["metadata"]["annotations"]


@of_pages("scale deployment")
def test_scaled_deployment_has_as_many_pods(console: Console, commands: Sequence[str]) -> None:
    console.install(EXAMPLES)
    first = console.pods()
    console.type(commands[0])
    assert len(console.pods()) == 6
    assert first.items() <= console.pods().items()


@of_pages("delete pod")
def test_deleted_pod_is_replaced(console: Console, commands: Sequence[str]) -> None:
    console.install(EXAMPLES)
    first = console.pods()
    name = next(iter(first))
    console.type(commands[0], NAME=name)
    assert name not in console.pods()
    assert len(console.pods()) == len(first)


@of_pages("describe pod", "logs .*--previous")
def test_killed_pod_shows_the_reason_and_keeps_its_last_log(console: Console, commands: Sequence[str]) -> None:
    describe, read_log = commands
    console.install(EXAMPLES)
    name, pod = next(iter(console.pods().items()))
    assert "previous terminated container" in console.type(read_log, expect=1, NAME=name)
    (container,) = pod["status"]["containerStatuses"]
    killed = {"restartCount": 1, "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    console.set_status(name, containerStatuses=[container | killed])
    assert re.search(r"Last State: +Terminated\n +Reason: +OOMKilled", console.type(describe, NAME=name))
    assert console.type(read_log, NAME=name) == LAST_LOG


@of_pages("logs .*fetch-models")
def test_log_of_the_init_container_is_available(console: Console, commands: Sequence[str]) -> None:
    components = {"components": ["../deploy/components/models-download"]}
    options = PAGE_OVERLAY["configMapGenerator"] + yaml_block("MODELS_URL")["configMapGenerator"]
    console.install(PAGE_OVERLAY | components | {"configMapGenerator": options})
    assert "MODELS_SHA256" in console.type(commands[0], NAME=next(iter(console.pods())))


@of_pages("describe certificate")
def test_described_certificate_names_the_secret(console: Console, commands: Sequence[str]) -> None:
    console.type("kubectl apply -f deploy/base/namespace.yaml")
    (console.root / "certificate.yaml").write_text(yaml.safe_dump(yaml_block("kind: Certificate")))
    console.type("kubectl apply -f certificate.yaml")
    assert re.search(r"Secret Name: +ortserve-tls", console.type(commands[0]))


@of_pages("apply -k .*kserve", "apply -f .*inferenceservice")
def test_services_of_kserve_find_their_runtimes(console: Console, commands: Sequence[str]) -> None:
    for command in commands:
        console.type(command)
    runtimes = {runtime["metadata"]["name"] for runtime in console.get("clusterservingruntimes")["items"]}
    services = console.get("inferenceservices", namespace="default")["items"]
    assert runtimes == {service["spec"]["predictor"]["model"]["runtime"] for service in services}


@pytest.mark.parametrize(
    ("spec", "expected_error"),
    [({"nodeNam": "a"}, r"BadRequest.*strict decoding.*'nodeNam'"), ({"nodeName": 1}, r"invalid.*nodeName.*'string'")],
)
def test_fake_api_rejects_what_kubernetes_rejects(spec: dict[str, Any], expected_error: str, console: Console) -> None:
    patch = yaml.safe_dump({"kind": "Deployment", "metadata": {"name": "x"}, "spec": {"template": {"spec": spec}}})
    own_overlay(console.root, EXAMPLES | {"patches": [{"target": {"kind": "Deployment"}, "patch": patch}]})
    assert re.search(expected_error, console.type("kubectl apply -k my-models", expect=1))
