"""Write ``prometheusrule.yaml``, which hands ``rules/ortserve.yaml`` to the Prometheus operator.

Kustomize cannot put a file into a resource, so the rules stand twice; a test says when the copy is old.

    python deploy/monitoring/prometheusrule.py
"""

from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
RULES: Final = HERE / "rules" / "ortserve.yaml"
RESOURCE: Final = HERE / "prometheusrule.yaml"

_HEAD: Final = """\
# Made of rules/ortserve.yaml by prometheusrule.py: edit the rules instead.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ortserve
  labels:
    app.kubernetes.io/name: ortserve
spec:
"""


def render(rules: str) -> str:
    """The resource, for the text of a file of Prometheus' rules, whose only key is ``groups``."""
    return _HEAD + "".join(f"  {line}" if line.strip() else line for line in rules.splitlines(keepends=True))


if __name__ == "__main__":
    RESOURCE.write_text(render(RULES.read_text()))
