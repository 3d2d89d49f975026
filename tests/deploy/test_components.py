"""Components that no overlay has, over the one they are for."""

from __future__ import annotations

import re

import pytest

from inference_svc.config import InferenceSettings
from tests.support.deploy.manifests import COMPONENTS, EVERYTHING, Manifests, compose, overlay

pytestmark = pytest.mark.processes  # kubectl builds what they read


@pytest.fixture(scope="module")
def everything() -> Manifests:
    return overlay(EVERYTHING)


def test_everything_has_them_all(everything):
    """Each leaves something of its own."""
    kinds = {each["kind"] for each in everything.objects}
    assert {"ServiceMonitor", "HorizontalPodAutoscaler", "Certificate"} <= kinds
    names = {each["metadata"]["name"] for each in everything.objects}
    assert {"inference-http", "loadout-tracing", "loadout-dashboard-fleet"} <= names
    assert "model-cache" in names
    assert len(COMPONENTS) == 11, "say what another one leaves"


def test_http_is_a_port_of_pods_and_services(everything):
    [inference] = [each for each in everything.workloads if each.module == "inference_svc"]
    assert "http" in InferenceSettings.model_fields
    assert set(inference.ports) == {"grpc", "metrics", "http"}
    address = inference.environment["LOADOUT_INFERENCE_HTTP"]
    assert address == f"0.0.0.0:{inference.ports['http']}"
    for name in ("inference", "inference-replicas"):
        service = everything.named("Service", name)["spec"]
        [port] = [each for each in service["ports"] if each["name"] == "http"]
        assert (port["port"], port["targetPort"]) == (inference.ports["http"], "http")
    for name in ("adapter-store", "adapter-store-replicas"):
        ports = everything.named("Service", name)["spec"]["ports"]
        assert "http" not in [each["name"] for each in ports]


def test_another_namespace_reaches_names_within_texts():
    components = [
        f"kubernetes/components/{each}" for each in ("cert-manager", "keda-scale-to-zero")
    ]
    others = {"namespace": "elsewhere", "transformers": ["deploy/kubernetes/namespace"]}
    made = compose("production-keda", *components, **others)
    assert made.of_kind("Namespace")[0]["metadata"]["name"] == "elsewhere"
    before = {
        name
        for each in overlay(EVERYTHING).of_kind("Certificate")
        for name in each["spec"].get("dnsNames", [])
    }
    names = {
        name for each in made.of_kind("Certificate") for name in each["spec"].get("dnsNames", [])
    }
    assert names == {name.replace(".loadout.", ".elsewhere.") for name in before} != before
    [scaled] = made.of_kind("ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert len(queries) == 4
    for query in queries:
        assert re.findall(r'namespace="(\w+)"', query) == ["elsewhere"]


def test_another_namespace_reaches_the_claim_that_a_volume_is_for():
    others = {"namespace": "elsewhere", "transformers": ["deploy/kubernetes/namespace"]}
    [volume] = compose("node-local-store", **others).of_kind("PersistentVolume")
    assert volume["spec"]["claimRef"]["namespace"] == "elsewhere"


@pytest.mark.parametrize("name", ["production", "two-models"])
def test_where_nothing_is_to_be_replaced_that_is_no_mistake(name):
    made = compose(name, namespace="elsewhere", transformers=["deploy/kubernetes/namespace"])
    assert {each["metadata"].get("namespace") for each in made.objects} == {None, "elsewhere"}
