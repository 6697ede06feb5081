"""How much does each optional feature cost a REST JSON request?

Level: server. Expected: of about 50 µs per request, load reports and unsampled traces cost 1 to 3 µs each; keys, an
access log and TLS up to 10. A hit of the response cache costs at most as much as a request that runs the tiny model.

    python loadtests/feature_cost.py [--rounds 5] [--seconds 3] [--connections 32]

A server for each feature and one without any run throughout and are loaded in turns, one at a time. Limits on callers,
metrics and ``Server-Timing`` cannot be disabled, so all servers have them. The load generator (wrk) shares the servers'
processors. Writes ``loadtests/results/feature_cost.md``.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import httpx  # noqa: E402

from certificates import HOST, Secret  # noqa: E402
from harness import running, spread, table, write_report, wrk  # noqa: E402
from infer_requests import json_request, numbers_of_json  # noqa: E402
from tiny_mlp import write_tiny_mlp  # noqa: E402

PORT = 18300
KEY = "a-key-for-a-benchmark-0123456789"
NO_COLLECTOR = "--otlp-endpoint=http://127.0.0.1:9"


@dataclass(frozen=True)
class Feature:
    """A feature by its ``name`` in the table. ``flags`` enable it; requests to ``model`` carry ``headers``."""

    name: str
    flags: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    scheme: str = "http"
    model: str = "mlp"


@dataclass(frozen=True)
class Arm:
    feature: Feature
    pid: int
    url: str


def features(folder: Path, secret: Secret) -> list[Feature]:
    (folder / "keys").write_text(KEY)
    return [
        Feature("none"),
        Feature("keys", ("--infer-keys-file", str(folder / "keys")), {"Authorization": f"Bearer {KEY}"}),
        Feature("load reports", ("--load-reports=always",)),
        Feature("traces, none sampled", (NO_COLLECTOR, "--otlp-sample-ratio=0")),
        Feature("traces, 1 of 100 sampled", (NO_COLLECTOR, "--otlp-sample-ratio=0.01")),
        Feature("access log, to nowhere", ("--access-log",)),
        Feature("TLS", secret.flags, scheme="https"),
        Feature("response cache, all hits", model="cached"),
    ]


def start(stack: ExitStack, feature: Feature, repository: Path, port: int) -> Arm:
    serve = [sys.executable, "-m", "ortserve", "serve", str(repository), *feature.flags]
    serve += [f"--http-port={port}", f"--grpc-port={port + 1}", f"--metrics-port={port + 2}"]
    quietly = ["sh", "-c", 'exec "$@" 2>/dev/null', "sh", *serve]
    pid = stack.enter_context(running(quietly, f"http://{HOST}:{port + 2}/v2/health/ready"))
    return Arm(feature, pid, f"{feature.scheme}://{HOST}:{port}/v2/models/{feature.model}/infer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    costs: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        folder = Path(temporary)
        model, _ = (write_tiny_mlp(folder / "models", name) for name in ("mlp", "cached"))
        body = json_request(model.row)
        (folder / "models" / "cached" / "model.yaml").write_text("response_cache: true\n")
        secret = Secret(folder / "tls")
        arms = [
            start(servers, feature, folder / "models", PORT + 10 * number)
            for number, feature in enumerate(features(folder, secret))
        ]
        client = servers.enter_context(httpx.Client(verify=secret.client_context()))

        def load(arm: Arm, seconds: int) -> float:
            headers = arm.feature.headers
            found = wrk(
                arm.url, body, folder, pid=arm.pid, connections=options.connections, seconds=seconds, headers=headers
            )
            answer = client.post(arm.url, content=body, headers=dict(headers)).content
            model.check(numbers_of_json(answer))
            return found.cpu_us

        for arm in arms:  # warm-up, not counted
            load(arm, 1)
        for number in range(options.rounds):
            for arm in arms if number % 2 else reversed(arms):
                costs.setdefault(arm.feature.name, []).append(load(arm, options.seconds))
                print(f"round {number + 1} {arm.feature.name:26} {costs[arm.feature.name][-1]:.1f} µs", flush=True)
    names = [arm.feature.name for arm in arms]
    report({name: costs[name] for name in names}, options)


def report(costs: dict[str, list[float]], options: argparse.Namespace) -> None:
    bare = costs["none"]
    rows = [
        [name, spread(each), spread([one - other for one, other in zip(each, bare, strict=True)])]
        for name, each in costs.items()
    ]
    setting = (
        f"Tiny MLP, {options.connections} connections, closed loop, CPU µs of the server a request: medians (lowest to "
        f"highest) of {options.rounds} rounds of {options.seconds} s in which the servers took turns. An answer of "
        "each round was compared with ONNX Runtime's own."
    )
    write_report(
        options.results / "feature_cost.md",
        "What features cost a REST JSON request",
        setting,
        table(["feature", "CPU µs a request", "more than without"], rows),
    )


if __name__ == "__main__":
    main()
