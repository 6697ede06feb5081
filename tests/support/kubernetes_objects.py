"""The state of ``kubernetes_api``: objects valid by Kubernetes' published schemas, and the pods of Deployments.

It makes decisions only, without sockets or threads. ``Objects`` belongs to the thread that serves it.
"""

import copy
import hashlib
import itertools
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import kubernetes_validate.utils

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    api_version: str
    name: str
    is_namespaced: bool = True

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    @property
    def plural(self) -> str:
        return f"{self.name.lower().removesuffix('y')}{'ies' if self.name.endswith('y') else 's'}"

    @property
    def is_custom(self) -> bool:
        """Whether the kind is defined by an operator, so that Kubernetes' schemas do not include it."""
        return "." in self.group and not self.group.endswith(".k8s.io")


KINDS: Final = (
    Kind("v1", "Namespace", is_namespaced=False),
    *(Kind("v1", name) for name in ("ConfigMap", "Event", "PersistentVolumeClaim", "Pod", "Secret", "Service")),
    Kind("v1", "ServiceAccount"),
    Kind("apps/v1", "Deployment"),
    Kind("autoscaling/v2", "HorizontalPodAutoscaler"),
    Kind("networking.k8s.io/v1", "NetworkPolicy"),
    Kind("policy/v1", "PodDisruptionBudget"),
    Kind("cert-manager.io/v1", "Certificate"),
    Kind("keda.sh/v1alpha1", "ScaledObject"),
    Kind("monitoring.coreos.com/v1", "PrometheusRule"),
    Kind("monitoring.coreos.com/v1", "ServiceMonitor"),
    Kind("serving.kserve.io/v1alpha1", "ClusterServingRuntime", is_namespaced=False),
    Kind("serving.kserve.io/v1beta1", "InferenceService"),
)
"""The kinds in the manifests and pages, and the kinds that ``kubectl`` requests along with them."""

KIND: Final = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Key:
    kind: Kind
    namespace: str
    name: str


class RefusedError(Exception):
    """An error response of the API, with Kubernetes' status and reason."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        names = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self.status = {**names, "code": code, "reason": reason, "message": message}


class Objects:
    """All objects.

    ``version`` rises with every change; ``resourceVersion`` of an object is the version of its last change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._kept: dict[Key, Document] = {}
        self._numbers = itertools.count()
        for name in ("default", "kube-system"):
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            self.create(Key(KIND["Namespace"], "", name), namespace)

    def get(self, key: Key) -> Document:
        if key not in self._kept:
            resource = f"{key.kind.plural}.{key.kind.group}".removesuffix(".")
            raise RefusedError(404, "NotFound", f'{resource} "{key.name}" not found')
        return copy.deepcopy(self._kept[key])

    def all(self, kind: Kind, namespace: str = "") -> list[Document]:
        """All objects of a kind, in one namespace or in all."""
        found = [kept for key, kept in self._kept.items() if key.kind == kind and namespace in ("", key.namespace)]
        return copy.deepcopy(found)

    def create(self, key: Key, document: Document) -> Document:
        if key in self._kept:
            raise RefusedError(409, "AlreadyExists", f'{key.kind.plural} "{key.name}" already exists')
        if key.namespace:
            self.get(Key(KIND["Namespace"], "", key.namespace))
        metadata = {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
        return self._change(key, document | {"metadata": document["metadata"] | metadata})

    def replace(self, key: Key, document: Document) -> Document:
        old = self.get(key)
        if old == document:
            return old
        if old.get("spec") != document.get("spec"):
            document["metadata"]["generation"] += 1
        return self._change(key, document)

    def delete(self, key: Key) -> Document:
        gone = self.get(key)
        del self._kept[key]
        self.version += 1
        self._follow_deployments()
        return gone

    def _change(self, key: Key, document: Document) -> Document:
        if key.kind.is_namespaced:
            document["metadata"].setdefault("namespace", key.namespace)
        validate(document)
        self._put(key, document)
        self._follow_deployments()
        return self.get(key)

    def _put(self, key: Key, document: Document) -> None:
        if self._kept.get(key) != document:
            self.version += 1
            document["metadata"]["resourceVersion"] = str(self.version)
            self._kept[key] = document

    def _follow_deployments(self) -> None:
        """Do at once what controllers, scheduler and kubelet would do in time without obstacles."""
        for pod in self.all(KIND["Pod"]):
            if pod["status"]["phase"] == "Pending":
                pod["status"] = pod_status(pod, self._missing(pod))
                self._put(key_of(pod), pod)
        for deployment in self.all(KIND["Deployment"]):
            self._follow(deployment)

    def _follow(self, deployment: Document) -> None:
        """Create the wanted number of pods of the current template; older pods stay until the new ones are ready."""
        template, wanted = deployment["spec"]["template"], deployment["spec"].get("replicas", 1)
        digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]
        owned = [pod for pod in self.all(KIND["Pod"]) if is_owned(pod, deployment)]
        new = [pod for pod in owned if pod["metadata"]["labels"]["pod-template-hash"] == digest]
        for pod in new[wanted:]:
            del self._kept[key_of(pod)]
        new = new[:wanted]
        for number in itertools.islice(self._numbers, wanted - len(new)):
            pod = pod_of(deployment, digest, number)
            pod["status"] = pod_status(pod, self._missing(pod))
            validate(pod)
            self._put(key_of(pod), pod)
            new.append(pod)
        old = [pod for pod in owned if pod["metadata"]["labels"]["pod-template-hash"] != digest]
        if all(is_ready(pod) for pod in new):
            for pod in old:
                del self._kept[key_of(pod)]
            old = []
        deployment["status"] = deployment_status(deployment, new, old)
        self._put(key_of(deployment), deployment)

    def _missing(self, pod: Document) -> list[str]:
        namespace = pod["metadata"]["namespace"]
        keys = (Key(KIND[kind], namespace, name) for kind, name in references(pod))
        return [f'{key.kind.plural} "{key.name}" not found' for key in keys if key not in self._kept]


def key_of(pod_or_deployment: Document) -> Key:
    metadata = pod_or_deployment["metadata"]
    return Key(KIND[pod_or_deployment["kind"]], metadata["namespace"], metadata["name"])


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def validate(document: Document) -> None:
    """Validate against the newest known schemas and reject unknown fields; custom kinds are not checked."""
    if KIND[document["kind"]].is_custom:
        return
    try:
        kubernetes_validate.utils.validate(document, kubernetes_validate.utils.latest_version(), strict=True)
    except kubernetes_validate.utils.ValidationError as error:
        message = f"{document['kind']}: {error.json_path}: {error.message}"
        if error.validator == "additionalProperties":
            raise RefusedError(400, "BadRequest", f"strict decoding error: {message}") from error
        raise RefusedError(422, "Invalid", message) from error


def references(pod: Document) -> Iterator[tuple[str, str]]:
    """Kind and name of each object that the pod needs in its namespace before it starts."""
    yield "ServiceAccount", pod["spec"]["serviceAccountName"]
    for volume in pod["spec"]["volumes"]:
        match volume:
            case {"configMap": {"name": name}}:
                yield "ConfigMap", name
            case {"secret": {"secretName": name}}:
                yield "Secret", name
            case {"persistentVolumeClaim": {"claimName": name}}:
                yield "PersistentVolumeClaim", name
    for container in containers_of(pod):
        for source in container.get("envFrom", []):
            yield "ConfigMap", source["configMapRef"]["name"]


def pod_of(deployment: Document, digest: str, number: int) -> Document:
    template, metadata = copy.deepcopy(deployment["spec"]["template"]), deployment["metadata"]
    owner = {key: deployment[key] for key in ("apiVersion", "kind")} | {key: metadata[key] for key in ("name", "uid")}
    template["metadata"] |= {
        "name": f"{metadata['name']}-{digest}-{number:05}",
        "namespace": metadata["namespace"],
        "uid": str(uuid.uuid4()),
        "creationTimestamp": now(),
        "ownerReferences": [owner],
        "labels": template["metadata"]["labels"] | {"pod-template-hash": digest},
    }
    return {"apiVersion": "v1", "kind": "Pod", **template}


def containers_of(pod: Document) -> list[Document]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def is_owned(pod: Document, deployment: Document) -> bool:
    owners = pod["metadata"].get("ownerReferences", [])
    return deployment["metadata"]["uid"] in {owner["uid"] for owner in owners}


def is_ready(pod: Document) -> bool:
    return {"type": "Ready", "status": "True"} in pod["status"]["conditions"]


def pod_status(pod: Document, missing: list[str]) -> Document:
    """The status of a pod that runs, or that waits for missing objects."""
    waiting = {"waiting": {"reason": "ContainerCreating", "message": "; ".join(missing)}}
    return {
        "phase": "Pending" if missing else "Running",
        "conditions": [{"type": "Ready", "status": "False" if missing else "True"}],
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": not missing,
                "restartCount": 0,
                "state": waiting if missing else {"running": {"startedAt": now()}},
            }
            for container in pod["spec"]["containers"]
        ],
    }


def deployment_status(deployment: Document, new: list[Document], old: list[Document]) -> Document:
    ready = sum(map(is_ready, [*new, *old]))
    return {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": len(new) + len(old),
        "updatedReplicas": len(new),
        "readyReplicas": ready,
        "availableReplicas": ready,
    }


def merge(target: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged


def strategic_merge(target: Any, patch: Any) -> Any:
    """A strategic merge patch as ``kubectl`` sends it; ``$setElementOrder`` names the lists that are merged."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    orders = {name.partition("/")[2]: order for name, order in patch.items() if name.startswith("$setElementOrder/")}
    for name, value in patch.items():
        if name.startswith("$"):
            continue
        if value is None:
            merged.pop(name, None)
        elif orders.get(name) and isinstance(orders[name][0], dict):
            merged[name] = _merge_list(merged.get(name, []), value, orders[name])
        else:
            merged[name] = strategic_merge(merged.get(name), value)
    return {name: value for name, value in merged.items() if name in patch.get("$retainKeys", merged)}


def _merge_list(entries: list[Document], patches: list[Document], order: list[Document]) -> list[Document]:
    (key,) = order[0]
    old, new = ({entry[key]: entry for entry in given} for given in (entries, patches))
    left = [name for name in old if new.get(name, {}).get("$patch") != "delete"]
    names = dict.fromkeys([entry[key] for entry in order] + left)
    return [strategic_merge(old.get(name), new.get(name, {})) for name in names]


def is_selected(document: Document, labels: str, fields: str) -> bool:
    """Whether label and field selectors choose the object; only equality selectors are supported."""
    has = document["metadata"].get("labels", {})
    return all(has.get(name) == value for name, value in _equalities(labels)) and all(
        _field(document, path) == value for path, value in _equalities(fields)
    )


def _equalities(selector: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, selector.split(",")):
        name, sign, value = part.partition("=")
        if not sign or name.endswith("!"):
            raise RefusedError(400, "BadRequest", f"unable to parse {part!r}")
        yield name, value.removeprefix("=")


def _field(document: Any, path: str) -> Any:
    for name in path.split("."):
        document = document.get(name, {})
    return document
