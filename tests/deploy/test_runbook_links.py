"""What the page of alerts says to make links of its paths does so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.deploy.manifests import KUBERNETES, ROOT, Manifests
from tests.support.deploy.rules import rules
from tools.prometheus_rule import rule_files

pytestmark = pytest.mark.processes

PAGE = (ROOT / "docs" / "observability" / "alerts.md").read_text()
BASE = "https://git.example/loadout/docs/operations/runbook.md#"
WANTED = {BASE + name.lower() for name in rules("alert")}


def snippet(name: str) -> str:
    """Returns the part of the page that a comment marks."""
    [found] = re.findall(rf"<!-- try: {name} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def links(groups: list[dict[str, list[dict[str, dict[str, str]]]]]) -> set[str]:
    rules_of_all = [rule for group in groups for rule in group["rules"]]
    return {rule["annotations"]["runbook_url"] for rule in rules_of_all if "alert" in rule}


def test_in_rule_files(tmp_path: Path) -> None:
    for path in rule_files():
        shutil.copy(path, tmp_path)
    subprocess.run(["sh", "-ec", snippet("runbook files")], cwd=tmp_path, check=True)
    copies = [yaml.safe_load(path.read_text())["groups"] for path in tmp_path.iterdir()]
    assert links([group for groups in copies for group in groups]) == WANTED


def test_in_a_kustomization(tmp_path: Path) -> None:
    whole = {
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUBERNETES / "overlays" / "production", tmp_path)],
        **yaml.safe_load(snippet("runbook kustomization")),
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    made = Manifests.build(tmp_path)
    [rule] = made.of_kind("PrometheusRule")
    assert links(rule["spec"]["groups"]) == WANTED
    assert "runbook" not in {each["metadata"]["name"] for each in made.of_kind("ConfigMap")}
