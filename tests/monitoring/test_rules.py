"""Rules and alerts, checked by Prometheus' own tool, and their names against the declarations."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from certificates import Secret
from models import builders
from monitoring_expressions import unknown_labels, unknown_metrics
from pages import sections
from servers import SHORT_WARMUP, add_model, read_metrics, serving

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "deploy/monitoring/rules/ortserve.yaml"
RULES_TEST: Final = Path(__file__).with_name("ortserve_rules_test.yaml")

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) is missing")


def run_promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)


def all_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@promtool
def test_rules_pass_their_tests() -> None:
    run = run_promtool("test", "rules", RULES_TEST)
    assert run.returncode == 0, run.stdout + run.stderr


@promtool
def test_rule_tests_detect_a_changed_rule(tmp_path: Path) -> None:
    changed = RULES.read_text().replace("job:ortserve_saturation:avg > 1", "job:ortserve_saturation:avg > 2")
    (tmp_path / "rules.yaml").write_text(changed)
    tests = RULES_TEST.read_text().replace("../../deploy/monitoring/rules/ortserve.yaml", "rules.yaml")
    (tmp_path / "tests.yaml").write_text(tests)
    assert run_promtool("test", "rules", tmp_path / "tests.yaml").returncode == 1


@promtool
def test_prometheus_configuration_is_valid() -> None:
    run = run_promtool("check", "config", ROOT / "deploy/monitoring/prometheus.yml")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "rules found" in run.stdout  # the rules are in the folder that the configuration names


def test_every_alert_is_tested() -> None:
    alerts = [rule["alert"] for rule in all_rules() if "alert" in rule]
    tests = yaml.safe_load(RULES_TEST.read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    fired = {case["alertname"] for case in cases if "exp_alerts" in case}
    quiet = {case["alertname"] for case in cases if "exp_alerts" not in case}
    assert fired == quiet == set(alerts)


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_use_known_metrics_and_labels_and_have_descriptions(rule: dict[str, Any]) -> None:
    recorded = {known["record"] for known in all_rules() if "record" in known}
    assert unknown_metrics(rule["expr"], recorded) == set()
    assert unknown_labels(rule["expr"]) == set()
    if "alert" in rule:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert f"**{rule['alert']}**" in sections(ROOT / page)[anchor]
    else:
        assert re.fullmatch(r"[a-z_]+:[a-z0-9_]+:[a-z0-9_]+", rule["record"])


def test_counters_whose_increase_fires_an_alert_begin_with_0(tmp_path: Path) -> None:
    """The increase of a series that begins with its first event is 0, unless the alert also compares with an offset."""
    expressions = [rule["expr"] for rule in all_rules() if "alert" in rule and " offset " not in rule["expr"]]
    series = {found for expr in expressions for found in re.findall(r"increase\((\w+(?:\{[^}]*\})?)\[", expr)}
    assert len(series) == 3
    add_model(tmp_path / "models", "identity", builders.identity)
    secret = Secret(tmp_path / "tls")
    with serving(tmp_path / "models", *secret.flags, *SHORT_WARMUP, client=secret.client_context()) as server:
        text = read_metrics(server).text
    for name, _, matchers in (one.rstrip("}").partition("{") for one in series):
        assert re.search(rf"^{name}(\{{.*{matchers}.*\}})? 0(\.0)?$", text, re.MULTILINE), name
