"""The Kubernetes manifests for tests: the base read from its files, overlays as ``kubectl`` renders them."""

import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"
BASE: Final = "base, by its files"

Document = dict[str, Any]


@dataclass(frozen=True)
class Installation:
    """The documents that would be applied to a cluster."""

    documents: tuple[Document, ...]

    def all(self, kind: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] == kind]

    def one(self, kind: str, name: str = "ortserve") -> Document:
        (found,) = (document for document in self.all(kind) if document["metadata"]["name"] == name)
        return found

    @property
    def pod(self) -> Document:
        """The server's pod template."""
        template: Document = self.one("Deployment")["spec"]["template"]
        return template

    @property
    def server(self) -> Document:
        """The server's container."""
        (container,) = self.pod["spec"]["containers"]
        return dict(container)

    @property
    def containers(self) -> list[Document]:
        """All containers of the pod, including its init containers."""
        return [*self.pod["spec"].get("initContainers", []), *self.pod["spec"]["containers"]]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the server's container receives from its ConfigMaps."""
        values: dict[str, str] = {}
        for source in self.server["envFrom"]:
            values |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
        return values


def installation(name: str) -> Installation:
    """The base (``BASE``) or an overlay. Skips the test if the overlay cannot be rendered here."""
    return _base() if name == BASE else rendered(DEPLOY / "overlays" / name)


def rendered(folder: Path) -> Installation:
    """The documents that ``kubectl apply -k`` would apply. Skips the test without ``kubectl``."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, to render Kustomize's overlays")
    return _rendered(folder)


@cache
def _rendered(folder: Path) -> Installation:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # kustomize reports deprecated fields on stderr
    return Installation(tuple(yaml.safe_load_all(done.stdout)))


@cache
def _base() -> Installation:
    folder = DEPLOY / "base"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    documents = [document for name in kustomization["resources"] for document in read_documents(folder / name)]
    for generator in kustomization["configMapGenerator"]:
        data = {key: value for name in generator["envs"] for key, value in read_variables(folder / name).items()}
        documents.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data}
        )
    return Installation(tuple(documents))


def read_documents(path: Path) -> list[Document]:
    """All YAML documents of a file."""
    return list(yaml.safe_load_all(path.read_text()))


def read_variables(path: Path) -> dict[str, str]:
    """A file of ``NAME=value`` lines, as Kustomize reads it."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def overlays() -> list[str]:
    """The overlays that install the server; KServe's is not among them."""
    return sorted(path.name for path in (DEPLOY / "overlays").iterdir() if path.name != "kserve")


def is_pinned(image: str) -> bool:
    """Whether an image has a digest or a tag that does not move."""
    name = image.rpartition("/")[2]
    return "@sha256:" in name or (":" in name and not name.endswith(":latest"))


def cpus(quantity: str) -> float:
    """Processors of a Kubernetes quantity."""
    return float(quantity.removesuffix("m")) / (1000 if quantity.endswith("m") else 1)


def n_bytes(quantity: str) -> int:
    """Bytes of a Kubernetes quantity with a binary unit."""
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    return int(quantity[:-2]) * units[quantity[-2:]]
