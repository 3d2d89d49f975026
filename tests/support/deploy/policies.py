"""Which connections NetworkPolicies let through, as Kubernetes defines them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.support.deploy.manifests import Labels, Object, Workload, matches


@dataclass(frozen=True)
class Peer:
    """An end of a connection: a pod of a namespace, or with no namespace something outside."""

    name: str
    namespace: str = ""
    labels: Labels = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    """Those of its containers, by name."""

    @classmethod
    def of(cls, workload: Workload) -> Peer:
        namespace = workload.object["metadata"]["namespace"]
        return cls(workload.name, namespace, workload.labels, workload.ports)


ELSEWHERE = Peer("elsewhere")
"""A machine outside the cluster."""
_STORE_CLIENT = {"loadout/adapter-store-client": "true"}
_INFERENCE_CLIENT = {"loadout/inference-client": "true"}


def visitors(namespace: str) -> dict[str, Peer]:
    """Pods that are not ours, in our namespace and in others, by what they are."""
    name = {"kubernetes.io/metadata.name": namespace}
    return {
        "stranger": Peer("stranger", "team-a", {"app": "stranger"}),
        "stranger beside it": Peer("stranger", namespace, {"app": "stranger"}),
        "false namespace": Peer("false", "team-a", name),
        "false inference": Peer("false", "team-a", {"app.kubernetes.io/component": "inference"}),
        "store client": Peer("trainer", "team-a", _STORE_CLIENT),
        "store client beside it": Peer("trainer", namespace, _STORE_CLIENT),
        "inference client": Peer("backend", "team-a", _INFERENCE_CLIENT),
        "inference client beside it": Peer("backend", namespace, _INFERENCE_CLIENT),
        "both": Peer("operator", "team-a", _STORE_CLIENT | _INFERENCE_CLIENT),
        "Prometheus": Peer("prometheus", "monitoring", {"app": "prometheus"}),
    }


def may_enter(visitor: str, module: str, port: str) -> bool:
    """Whether a visitor should reach a port of a pod that runs a module: what tests compare with,
    in words of their own."""
    if port == "metrics":
        return visitor == "Prometheus"
    client = "store client" if module == "adapter_store" else "inference client"
    return visitor == "both" or visitor.startswith(client)


def lets_through(
    policies: list[Object], source: Peer, destination: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Whether the source may open a connection: its own egress and the other's ingress count."""
    return is_open(policies, "egress", source, destination, port, protocol) and is_open(
        policies, "ingress", destination, source, port, protocol
    )


def is_open(
    policies: list[Object], direction: str, own: Peer, other: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Whether policies of `own` allow one direction. A pod that none selects is open."""
    selecting = [each for each in policies if _is_for(each, own, direction)]
    listening = own if direction == "ingress" else other
    return not selecting or any(
        _has_peer(rule, direction, other, policy)
        and any(_is_port(each, port, protocol, listening) for each in rule["ports"])
        for policy in selecting
        for rule in _rules(policy, direction)
    )


def _is_for(policy: Object, pod: Peer, direction: str) -> bool:
    spec = policy["spec"]
    return (
        policy["metadata"]["namespace"] == pod.namespace
        and matches(spec["podSelector"], pod.labels)
        and direction.capitalize() in spec["policyTypes"]
    )


def _rules(policy: Object, direction: str) -> Iterator[Object]:
    for rule in policy["spec"].get(direction, []):
        assert rule.keys() <= {"from", "to", "ports"}, "a rule that this does not know"
        yield rule


def _has_peer(rule: Object, direction: str, other: Peer, policy: Object) -> bool:
    peers = rule.get("from" if direction == "ingress" else "to")
    return peers is None or any(_is_peer(each, other, policy) for each in peers)


def _is_peer(selected: Object, other: Peer, policy: Object) -> bool:
    assert selected.keys() <= {"podSelector", "namespaceSelector"}, "a peer that this does not know"
    if not other.namespace:
        return False
    if "namespaceSelector" in selected:
        named = {"kubernetes.io/metadata.name": other.namespace}
        is_in = matches(selected["namespaceSelector"], named)
    else:
        is_in = other.namespace == policy["metadata"]["namespace"]
    return is_in and matches(selected.get("podSelector", {}), other.labels)


def _is_port(allowed: Object, port: int, protocol: str, listening: Peer) -> bool:
    assert allowed.keys() - {"endPort"} == {"port", "protocol"}, "a port that this does not know"
    number = allowed["port"]
    if isinstance(number, str):
        number = listening.ports.get(number)
    if allowed["protocol"] != protocol or number is None:
        return False
    return bool(number <= port <= allowed.get("endPort", number))


DNS, HTTPS, POSTGRES, OTLP = 53, 443, 5432, 4317
OUTSIDE_PORTS = (22, 25, DNS, 80, HTTPS, OTLP, POSTGRES, 6443, 7070, 7080, 10250)


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
