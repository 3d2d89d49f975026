"""Who reaches whom: nobody, but for the connections that services make."""

from __future__ import annotations

import itertools

import pytest

from tests.support.deploy.manifests import Manifests, Object, matches
from tests.support.deploy.policies import (
    ELSEWHERE,
    OUTSIDE_PORTS,
    Peer,
    connections,
    is_open,
    lets_through,
    may_enter,
    visitors,
)


def policies(manifests: Manifests) -> list[Object]:
    return manifests.of_kind("NetworkPolicy")


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
        pods = (*manifests.workloads, *manifests.workers)
        assert any(matches(selector, each.labels) for each in pods)


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
