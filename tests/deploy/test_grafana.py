"""Grafana finds its data source and the dashboards, with compose and in a cluster."""

from __future__ import annotations

import json
import os
import re
from pathlib import PurePosixPath

import pytest
import yaml

from tests.support.deploy.compose import COMPOSE, FOLDER
from tests.support.deploy.manifests import KUBERNETES, ROOT, Manifests

GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").iterdir())


def provisioned(kind: str):
    [path] = (GRAFANA / "provisioning" / kind).iterdir()
    document = yaml.safe_load(path.read_text())
    assert document.pop("apiVersion") == 1
    [[only]] = document.values()
    return only


def mounts() -> dict[PurePosixPath, object]:
    """Path in the container -> folder here."""
    volumes = [each.split(":") for each in COMPOSE["services"]["grafana"]["volumes"]]
    return {
        PurePosixPath(inside): (FOLDER / source).resolve()
        for source, inside, *_ in volumes
        if source.startswith(".")
    }


def test_compose_mounts_what_is_provisioned():
    path = PurePosixPath(provisioned("dashboards")["options"]["path"])
    assert mounts() == {
        PurePosixPath("/etc/grafana/provisioning"): GRAFANA / "provisioning",
        path: GRAFANA / "dashboards",
    }


def test_grafana_opens_with_a_dashboard_that_there_is():
    environment = COMPOSE["services"]["grafana"]["environment"]
    home = PurePosixPath(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounts()[home.parent] / home.name) in DASHBOARDS


def test_the_data_source_is_the_prometheus_beside_it():
    source = provisioned("datasources")
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    assert COMPOSE["services"]["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]


@pytest.fixture(scope="module")
def with_grafana(tmp_path_factory) -> Manifests:
    """`dev` with the dashboards."""
    folder = tmp_path_factory.mktemp("grafana")
    here = os.path.relpath(KUBERNETES, folder)
    kustomization = {
        "kind": "Kustomization",
        "namespace": "loadout-dev",
        "resources": [f"{here}/overlays/dev"],
        "components": [f"{here}/components/grafana"],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return Manifests.build(folder)


@pytest.mark.processes
def test_sidecars_find_the_same_dashboards(with_grafana):
    found = {}
    for each in with_grafana.of_kind("ConfigMap"):
        labels = each["metadata"].get("labels", {})
        if labels.get("grafana_dashboard") == "1":
            assert labels["app.kubernetes.io/part-of"] == "loadout"
            assert each["metadata"]["annotations"]["grafana_folder"] == "Loadout"
            found |= each["data"]
    assert found == {path.name: path.read_text() for path in DASHBOARDS}
    assert len({json.loads(text)["uid"] for text in found.values()}) == len(DASHBOARDS)


def test_the_page_names_panels_and_files_that_there_are():
    page = (ROOT / "docs" / "observability" / "dashboards.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", page):
        assert (ROOT / "docs" / "observability" / target).exists(), target
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    for board in boards:
        assert f"`/d/{board['uid']}`" in page
    titles = {panel["title"] for board in boards for panel in board["panels"]}
    named = {"Share of hits by replica", "Waiting for an adapter", "Idle before eviction"}
    named |= {"Queue time", "Adapter wait", "Thrash", "Share pinned", "Fragmentation"}
    assert all(name in page for name in named)
    assert named <= titles
