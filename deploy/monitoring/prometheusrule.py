"""Write ``prometheusrule.yaml``, which contains ``rules/ortserve.yaml`` for the Prometheus operator.

Kustomize cannot include a file in a resource, so the rules exist twice; a test fails if the copy is outdated.

    python deploy/monitoring/prometheusrule.py
"""

from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
RULES: Final = HERE / "rules" / "ortserve.yaml"
RESOURCE: Final = HERE / "prometheusrule.yaml"

_HEAD: Final = """\
# Generated from rules/ortserve.yaml by prometheusrule.py: edit the rules instead.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ortserve
  labels:
    app.kubernetes.io/name: ortserve
spec:
"""


def render(rules: str) -> str:
    """The resource for the text of a rules file, whose only key is ``groups``."""
    return _HEAD + "".join(f"  {line}" if line.strip() else line for line in rules.splitlines(keepends=True))


if __name__ == "__main__":
    RESOURCE.write_text(render(RULES.read_text()))
