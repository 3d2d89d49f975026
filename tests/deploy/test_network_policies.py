"""Who reaches whom: nobody, but for what is needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.deploy.manifests import Labels, Manifests, Object, Workload
from tests.deploy.test_references import matches


def rules(manifests: Manifests, workload: Workload, direction: str) -> Iterator[Object]:
    """The rules, all policies together, for a pod. `direction` is ingress or egress."""
    for policy in manifests.of_kind("NetworkPolicy"):
        spec = policy["spec"]
        is_for_it = matches(spec["podSelector"], workload.labels)
        if is_for_it and direction.capitalize() in spec["policyTypes"]:
            yield from spec.get(direction, [])


def allows(rule: Object, peer: str, labels: Labels, port: str | int) -> bool:
    """Whether a rule lets pods of this namespace with such labels through. `peer`: from or to."""
    if port not in [each["port"] for each in rule["ports"]]:
        return False
    selectors = [each["podSelector"] for each in rule.get(peer, []) if "podSelector" in each]
    return peer not in rule or any(matches(each, labels) for each in selectors)


def test_every_pod_is_closed_by_default(manifests):
    policy = manifests.named("NetworkPolicy", "loadout-default-deny")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert not {"ingress", "egress"} & policy.keys()
    for workload in manifests.workloads:
        assert matches(policy["podSelector"], workload.labels)


def test_every_policy_is_for_somebody(manifests):
    for policy in manifests.of_kind("NetworkPolicy"):
        selector = policy["spec"]["podSelector"]
        assert any(matches(selector, each.labels) for each in manifests.workloads)


def test_named_ports_are_the_pods(manifests):
    for workload in manifests.workloads:
        for rule in rules(manifests, workload, "ingress"):
            assert all(each["port"] in workload.ports for each in rule["ports"])


def test_inference_reaches_the_store_and_nobody_else_does_unasked(manifests):
    services = [each for each in manifests.workloads if each.module == "inference_svc"]
    stores = [each for each in manifests.workloads if each.module == "adapter_store"]
    assert services
    assert stores
    for inference, store in itertools.product(services, stores):
        out = list(rules(manifests, inference, "egress"))
        assert any(allows(rule, "to", store.labels, store.ports["grpc"]) for rule in out)
        into = list(rules(manifests, store, "ingress"))
        assert any(allows(rule, "from", inference.labels, "grpc") for rule in into)
        assert not any(allows(rule, "from", {"app": "stranger"}, "grpc") for rule in into)


@pytest.mark.parametrize(
    ("module", "label"),
    [
        ("adapter_store", "loadout/adapter-store-client"),
        ("inference_svc", "loadout/inference-client"),
    ],
)
def test_clients_are_let_in_by_label(manifests, module, label):
    for workload in [each for each in manifests.workloads if each.module == module]:
        into = list(rules(manifests, workload, "ingress"))
        assert any(allows(rule, "from", {label: "true"}, "grpc") for rule in into)
        assert not any(allows(rule, "from", {label: "true"}, "metrics") for rule in into)


def test_everybody_resolves_names_and_is_scraped(manifests):
    for workload in manifests.workloads:
        out = list(rules(manifests, workload, "egress"))
        assert any(allows(rule, "to", {}, 53) for rule in out)
        scraped = [
            peer["namespaceSelector"]["matchLabels"]
            for rule in rules(manifests, workload, "ingress")
            for peer in rule["from"]
            if "metrics" in [each["port"] for each in rule["ports"]]
        ]
        assert scraped == [{"kubernetes.io/metadata.name": "monitoring"}]


def test_a_store_with_a_catalog_elsewhere_reaches_it(workload):
    if "LOADOUT_STORE_CATALOG_DSN" in workload.secret_variables:
        out = list(rules(workload.manifests, workload, "egress"))
        assert any(allows(rule, "to", {}, 5432) for rule in out)
        assert any(allows(rule, "to", {}, 443) for rule in out), "S3"


def test_inference_reaches_the_hub_only_where_it_downloads(workload):
    if workload.module == "inference_svc":
        out = list(rules(workload.manifests, workload, "egress"))
        reaches = any(allows(rule, "to", {}, 443) for rule in out)
        assert reaches == bool(workload.init_containers)
