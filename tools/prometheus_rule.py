"""Writes the rules of Prometheus as the object that its operator on Kubernetes reads.

    python -m tools.prometheus_rule

Kustomize reads no file outside its folder: so there is a copy, and a test compares.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

DEPLOY = Path(__file__).parent.parent / "deploy"
RULES = DEPLOY / "prometheus"
PATH = DEPLOY / "kubernetes" / "components" / "monitoring" / "prometheus-rule.yaml"

HEADER = """# Made of deploy/prometheus/*.rules.yml by `make docs`: change those.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: loadout
  labels:
    app.kubernetes.io/part-of: loadout
spec:
  groups:
"""


def rule_files() -> list[Path]:
    """The files that Prometheus reads, by name."""
    return sorted(RULES.glob("*.rules.yml"))


def render() -> str:
    """The object, with all groups."""
    return HEADER + "\n".join(_groups(path.read_text()) for path in rule_files())


def _groups(text: str) -> str:
    """Returns the lines below `groups:`, two columns deeper."""
    _, found, groups = text.partition("\ngroups:\n")
    assert found, "no groups"
    return textwrap.indent(groups, "  ")


def main() -> None:
    PATH.write_text(render())


if __name__ == "__main__":
    main()
