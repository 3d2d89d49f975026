"""Who reaches whom: nobody, but for the connections that services make."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.deploy.manifests import Manifests, Object, Workload
from tests.deploy.policies import ELSEWHERE, Peer, is_open, lets_through, may_enter, visitors
from tests.deploy.test_references import matches

DNS, HTTPS, POSTGRES, OTLP = 53, 443, 5432, 4317
OUTSIDE_PORTS = (22, 25, DNS, 80, HTTPS, OTLP, POSTGRES, 6443, 7070, 7080, 10250)


def policies(manifests: Manifests) -> list[Object]:
    return manifests.of_kind("NetworkPolicy")


def connections(workload: Workload) -> Iterator[tuple[str, int, str]]:
    """What a pod opens by its configuration: the Service, or "" for what is outside, with port and
    protocol. Names must be resolved first."""
    settings = workload.environment
    yield from (("", DNS, "UDP"), ("", DNS, "TCP"))
    if store := settings.get("LOADOUT_INFERENCE_STORE"):
        host, _, port = store.partition(":")
        yield host, int(port), "TCP"
    for name in ("LOADOUT_STORE_OTLP_ENDPOINT", "LOADOUT_INFERENCE_OTLP_ENDPOINT"):
        if name in settings:
            yield "", urlsplit(settings[name]).port or 0, "TCP"
    if "LOADOUT_STORE_CATALOG_DSN" in workload.secret_variables:
        yield "", POSTGRES, "TCP"
    # S3 and the hub: sources and shared images of a store, the models of an init container.
    if workload.module == "adapter_store" or workload.init_containers:
        yield "", HTTPS, "TCP"


def reached(manifests: Manifests, host: str) -> list[Peer]:
    """The pods of a Service of the cluster, or a machine outside."""
    if not host:
        return [ELSEWHERE]
    selector = manifests.named("Service", host)["spec"]["selector"]
    return [Peer.of(each) for each in manifests.workloads_with(selector)]


def test_every_pod_is_closed_by_default(manifests):
    policy = manifests.named("NetworkPolicy", "loadout-default-deny")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert not {"ingress", "egress"} & policy.keys()
    for workload in manifests.workloads:
        assert matches(policy["podSelector"], workload.labels)


def test_every_policy_is_for_somebody(manifests):
    for policy in policies(manifests):
        selector = policy["spec"]["podSelector"]
        assert any(matches(selector, each.labels) for each in manifests.workloads)


def test_a_service_makes_its_connections(workload):
    manifests = workload.manifests
    for host, port, protocol in connections(workload):
        found = reached(manifests, host)
        assert found, f"it connects to {host}, which nobody is"
        for peer in found:
            allowed = lets_through(policies(manifests), Peer.of(workload), peer, port, protocol)
            assert allowed, f"it does not reach {peer.name}:{port}"


def test_a_service_makes_no_others(workload):
    """Out of the cluster, and to other pods of ours."""
    manifests, own = workload.manifests, Peer.of(workload)
    wanted = {(port, protocol) for host, port, protocol in connections(workload) if not host}
    for protocol, port in itertools.product(("TCP", "UDP"), OUTSIDE_PORTS):
        allowed = lets_through(policies(manifests), own, ELSEWHERE, port, protocol)
        assert allowed == ((port, protocol) in wanted), (port, protocol)
    for other in manifests.workloads:
        for name, port in other.ports.items():
            allowed = lets_through(policies(manifests), own, Peer.of(other), port)
            # A policy is for all stores alike, though a server asks those of one Service.
            is_asked = other.module == "adapter_store" and name == "grpc"
            assert allowed == (is_asked and workload.module == "inference_svc"), (other.name, name)


def test_others_enter_by_label_and_prometheus_by_namespace(workload):
    own = Peer.of(workload)
    for kind, visitor in {**visitors(own.namespace), "elsewhere": ELSEWHERE}.items():
        for name, port in own.ports.items():
            allowed = lets_through(policies(workload.manifests), visitor, own, port)
            assert allowed == may_enter(kind, workload.module, name), (kind, name)


@pytest.mark.parametrize("direction", ["ingress", "egress"])
def test_a_pod_that_no_policy_selects_is_open(direction):
    """So that what Kubernetes leaves open does not look closed here."""
    assert is_open([], direction, Peer("a", "x"), ELSEWHERE, 1)
