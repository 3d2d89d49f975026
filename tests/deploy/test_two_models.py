"""Two base models over one store: inference twice, each with everything of its own, and nothing
else twice."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import Manifests, overlay

pytestmark = pytest.mark.processes  # kubectl builds what they read

PAIRS = {"two-models": "production", "dev-two-models": "dev"}


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
