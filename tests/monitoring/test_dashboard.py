"""The dashboard and the autoscaler: every query, run in a real Prometheus that scrapes a real server under load."""

import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import yaml

from encodings_of_requests import grpc_raw, rest_json
from models import builders
from monitoring_expressions import unknown_labels, unknown_metrics
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, json_input, rest_url, serving

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
MONITORING: Final = DEPLOY / "monitoring"
DASHBOARD: Final[dict[str, Any]] = json.loads((MONITORING / "grafana/dashboards/ortserve.json").read_text())
PANELS: Final[list[dict[str, Any]]] = DASHBOARD["panels"]
QUERIES: Final = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]


@pytest.mark.parametrize("expression", QUERIES)
def test_queries_use_known_metrics_and_labels(expression: str) -> None:
    assert unknown_metrics(expression, set()) == set()
    assert unknown_labels(expression) == set()


def test_legends_name_labels_that_their_queries_keep() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            grouped = re.search(r"\bby \(([^)]*)\)", target["expr"])
            kept = set(grouped.group(1).split(", ")) if grouped else {"instance", "model", "version"}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


def test_panels_have_unique_ids_and_descriptions_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert all(panel["description"] for panel in PANELS)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in PANELS)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_data_source_is_a_dashboard_variable() -> None:
    sources = [part["datasource"]["uid"] for panel in PANELS for part in (panel, *panel["targets"])]
    assert set(sources) == {"${datasource}"}
    provisioned = yaml.safe_load((MONITORING / "grafana/provisioning/datasources/prometheus.yml").read_text())
    assert [source["type"] for source in provisioned["datasources"]] == ["prometheus"]
    providers = yaml.safe_load((MONITORING / "grafana/provisioning/dashboards/ortserve.yml").read_text())["providers"]
    assert [provider["type"] for provider in providers] == ["file"]


@contextmanager
def load_on(server: ServerProcess) -> Iterator[None]:
    """Send good, bad and padded requests on both protocols until the block ends."""
    is_over = threading.Event()
    good = {"x": np.ones((3, 4), np.float32)}
    spoiled = {"inputs": [json_input("x", np.ones((1, 5), np.float32))]}

    def ask() -> None:
        while not is_over.is_set():
            rest_json(server, "identity", good)
            grpc_raw(server, "padded", good)
            assert httpx.post(rest_url(server, "identity"), json=spoiled, timeout=LONG_S).status_code == 400

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            is_over.set()
        asking.result(LONG_S)


class Prometheus:
    """A real Prometheus with the configuration of ``deploy/monitoring``, another target and two scrapes per second.

    It scrapes itself, too, as a job that is no server.
    """

    def __init__(self, folder: Path, target: str) -> None:
        config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [str(MONITORING / "rules/*.yaml")]
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        (scrape,) = config["scrape_configs"]
        scrape["static_configs"] = [{"targets": [target]}]
        itself = {"job_name": "prometheus", "static_configs": [{"targets": [self.address]}]}
        config["scrape_configs"].append(itself)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        transport = httpx.HTTPTransport(retries=8)
        self._client = httpx.Client(base_url=f"http://{self.address}", transport=transport, timeout=LONG_S)
        self._log = (folder / "prometheus.log").open("w+")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.address}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def wait_until_ready(self) -> None:
        """Wait until it answers queries; a port that does not listen yet is retried with pauses that double."""
        end_s = time.monotonic() + LONG_S
        while self._client.get("/-/ready").status_code != 200:
            assert time.monotonic() < end_s

    def ask(self, path: str, **parameters: str) -> Any:
        """The data in an answer of its API."""
        document = self._client.get(f"/api/v1/{path}", params=parameters).json()
        assert document["status"] == "success", document
        return document["data"]

    def numbers(self, expression: str) -> list[float]:
        """The numeric values of an instant query."""
        result = self.ask("query", query=expression)["result"]
        return [value for sample in result if not math.isnan(value := float(sample["value"][1]))]

    def wait_for_numbers(self, expression: str) -> list[float]:
        """Query until results exist, for the duration of about sixty scrapes; each query is a separate request."""
        end_s = time.monotonic() + 30
        found: list[float] = []
        while not found and time.monotonic() < end_s:
            found = self.numbers(expression)
        return found

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(LONG_S)
        self._log.close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes a server that is under load while tests run."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus (package prometheus) is missing")
    repository = tmp_path_factory.mktemp("dashboard")
    add_model(repository, "identity", builders.identity)
    padded = add_model(repository, "padded", builders.identity)
    (padded / "model.yaml").write_text("buckets: [4]\n")
    add_model(repository, "broken", builders.not_onnx)
    with serving(repository, *SHORT_WARMUP) as server, load_on(server):
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), server.metrics)
        try:
            prometheus.wait_until_ready()
            yield prometheus
        finally:
            prometheus.close()


def as_grafana_would(expression: str, prometheus: Prometheus) -> str:
    """A query with its variables replaced: each by "All", and a rate interval of at least four scrapes."""
    values = {"__rate_interval": "3s"}
    for variable in DASHBOARD["templating"]["list"][1:]:
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", _filled(variable["definition"], values))
        assert asked
        prometheus.wait_for_numbers(asked[1])
        found = prometheus.ask(f"label/{asked[2]}/values", **{"match[]": asked[1]})
        values[variable["name"]] = variable.get("allValue") or "|".join(found)
    return _filled(expression, values)


def _filled(expression: str, values: dict[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda name: values[name[1]], expression)


@pytest.mark.parametrize("expression", QUERIES)
def test_query_returns_numbers_from_a_real_server(prometheus: Prometheus, expression: str) -> None:
    assert prometheus.wait_for_numbers(as_grafana_would(expression, prometheus))


def test_queries_of_the_autoscaler_return_one_number(prometheus: Prometheus) -> None:
    triggers = yaml.safe_load((DEPLOY / "components/keda/scaledobject.yaml").read_text())["spec"]["triggers"]
    queries = [trigger["metadata"]["query"] for trigger in triggers]
    assert len(queries) == 2
    for query in queries:
        assert '{namespace="ortserve"}' in query  # a label that only Kubernetes sets
        (value,) = prometheus.wait_for_numbers(query.replace('{namespace="ortserve"}', ""))
        assert value >= 0


def test_panels_do_not_count_other_jobs(prometheus: Prometheus) -> None:
    (servers,) = (panel["targets"][0]["expr"] for panel in PANELS if panel["title"] == "Servers")
    (cpu,) = (panel["targets"][0]["expr"] for panel in PANELS if panel["title"] == "CPU use")
    assert prometheus.wait_for_numbers('up{job="prometheus"} == 1')
    assert prometheus.wait_for_numbers(as_grafana_would(servers, prometheus)) == [1]
    assert len(prometheus.wait_for_numbers(as_grafana_would(cpu, prometheus))) == 1


def test_rules_are_loaded_and_evaluated_without_errors(prometheus: Prometheus) -> None:
    assert prometheus.wait_for_numbers("job:ortserve_saturation:avg")
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    assert len(rules) == 21


def test_scrape_configuration_reaches_the_server(prometheus: Prometheus) -> None:
    assert prometheus.wait_for_numbers('up{job="ortserve"} == 1') == [1]
