"""Components that no overlay has, over the one they are for."""

from __future__ import annotations

import os

import pytest
import yaml

from inference_svc.config import Config
from tests.deploy.manifests import KUBERNETES, Manifests
from tests.deploy.test_network_policies import allows, rules


@pytest.fixture(scope="module")
def with_http(tmp_path_factory) -> Manifests:
    """`production` with the HTTP front."""
    folder = tmp_path_factory.mktemp("http")
    here = os.path.relpath(KUBERNETES, folder)
    kustomization = {
        "kind": "Kustomization",
        "namespace": "loadout",
        "resources": [f"{here}/overlays/production"],
        "components": [f"{here}/components/http"],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return Manifests.build(folder)


def test_http_is_a_port_of_pods_and_services(with_http):
    [inference] = [each for each in with_http.workloads if each.module == "inference_svc"]
    assert "http" in Config.model_fields
    assert set(inference.ports) == {"grpc", "metrics", "http"}
    address = inference.environment["LOADOUT_INFERENCE_HTTP"]
    assert address == f"0.0.0.0:{inference.ports['http']}"
    for name in ("inference", "inference-replicas"):
        service = with_http.named("Service", name)["spec"]
        [port] = [each for each in service["ports"] if each["name"] == "http"]
        assert (port["port"], port["targetPort"]) == (inference.ports["http"], "http")
    for name in ("adapter-store", "adapter-store-replicas"):
        ports = with_http.named("Service", name)["spec"]["ports"]
        assert "http" not in [each["name"] for each in ports]


def test_http_is_for_those_who_may_generate(with_http):
    [inference] = [each for each in with_http.workloads if each.module == "inference_svc"]
    into = list(rules(with_http, inference, "ingress"))
    label = {"loadout/inference-client": "true"}
    for labels, is_let_in in ((label, True), ({"app": "stranger"}, False)):
        assert any(allows(rule, "from", labels, "http") for rule in into) == is_let_in
