"""Two base models over one store: inference twice, each with everything of its own, and nothing
else twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests.support.deploy.manifests import KUBERNETES, Manifests, overlay

pytestmark = pytest.mark.processes  # kubectl builds what they read

PAIRS = {"two-models": "production", "dev-two-models": "dev"}


OWN = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: gateway}
spec: {template: {spec: {containers: [{name: gateway, image: gateway}]}}}
---
apiVersion: v1
kind: Service
metadata: {name: gateway}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: gateway}
---
apiVersion: batch/v1
kind: CronJob
metadata: {name: cleaning}
"""


@pytest.fixture(params=PAIRS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def objects(manifests: Manifests) -> set[tuple[str, str]]:
    """Returns kinds and names, those of config maps without their hash."""
    return {
        (each["kind"], each["metadata"]["name"].rpartition("-")[0])
        if each["kind"] == "ConfigMap"
        else (each["kind"], each["metadata"]["name"])
        for each in manifests.objects
    }


def test_only_inference_is_there_twice(name: str) -> None:
    first = objects(overlay(PAIRS[name]))
    own = {("Deployment", ""), ("Service", ""), ("Service", "-replicas")}
    own |= {("PodDisruptionBudget", ""), ("ConfigMap", "-config")}
    own |= {("HorizontalPodAutoscaler", "")} if name == "two-models" else set()
    assert {(kind, f"inference{part}") for kind, part in own} <= first
    second = {(kind, f"inference{part}-second") for kind, part in own}
    assert objects(overlay(name)) - first == second
    assert first <= objects(overlay(name))


def test_what_an_overlay_of_ones_own_adds_is_not_there_twice(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    kubernetes = os.path.relpath(KUBERNETES, first)
    (first / "own.yaml").write_text(OWN)
    write(
        first,
        resources=[f"{kubernetes}/overlays/dev", "own.yaml"],
        secretGenerator=[{"name": "hf-token", "literals": ["token=secret"]}],
        components=[f"{kubernetes}/components/model-download"],
    )
    inference_only = f"{kubernetes}/components/inference-only"
    write(second, nameSuffix="-second", resources=["../first"], components=[inference_only])
    built = Manifests.build(second)
    assert not built.of_kind("CronJob", "StatefulSet", "Role", "PersistentVolumeClaim")
    [deployment] = built.workloads
    assert deployment.name == "inference-second"
    # What inference may refer to stays, or its name would lead nowhere.
    [kept] = built.of_kind("Secret")
    assert kept["metadata"]["name"] in deployment.secrets


def write(folder: Path, **fields: object) -> None:
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump({"namespace": "loadout-dev", **fields})
    )


def test_they_are_two_models_over_one_store(name: str) -> None:
    manifests = overlay(name)
    first, second = (
        next(each for each in manifests.workloads if each.name == deployment).environment
        for deployment in ("inference", "inference-second")
    )
    [changed] = {key for key in first if first[key] != second[key]}
    assert changed == "LOADOUT_INFERENCE_BASE_MODEL"
    assert first.keys() == second.keys()


def test_each_is_called_by_services_of_its_own(name: str) -> None:
    manifests = overlay(name)
    for deployment in ("inference", "inference-second"):
        [workload] = [each for each in manifests.workloads if each.name == deployment]
        suffix = deployment.removeprefix("inference")
        for service in (f"inference{suffix}", f"inference-replicas{suffix}"):
            selector = manifests.named("Service", service)["spec"]["selector"]
            assert manifests.workloads_with(selector) == [workload]


def test_each_model_has_a_volume_of_its_own() -> None:
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for workload in overlay("two-models").workloads
        for volume in workload.pod["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert sorted(claims) == ["base-model", "base-model-second"]
