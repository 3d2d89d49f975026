"""NetworkPolicies of a cluster, enforced as rules in the network of each pod."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Network

from tests.containers.dns import GATEWAY
from tests.support.deploy.manifests import Object
from tests.support.deploy.policies import ELSEWHERE, Peer, is_open
from tools.containers.engine import ContainersFailed

VISITORS = IPv4Network("10.119.0.128/25")
"""Addresses of pods that are not ours, some for each kind of them."""
_REFUSED = "REJECT --reject-with icmp-admin-prohibited"
"""Not as a port that nobody listens on."""


def blocks(kinds: Iterable[str]) -> dict[str, IPv4Network]:
    """Returns the addresses of each kind of visitor."""
    return dict(zip(kinds, VISITORS.subnets(new_prefix=29), strict=False))


def enforce(policies: list[Object], process_id: int, own: Peer, others: Mapping[str, Peer]) -> None:
    """Replaces the rules of the pod whose network the process is in. `others` are by address."""
    lines = [
        "*filter",
        ":INPUT ACCEPT [0:0]",
        ":OUTPUT ACCEPT [0:0]",
        # An answer belongs to its connection, and a pod to itself. Kubernetes lets the node in.
        *(f"-A {chain} -m conntrack --ctstate ESTABLISHED -j ACCEPT" for chain in _CHAINS),
        "-A INPUT -i lo -j ACCEPT",
        "-A OUTPUT -o lo -j ACCEPT",
        f"-A INPUT -s {GATEWAY} -j ACCEPT",
        *_allowed(policies, own, others),
        *(f"-A {chain} -j {_REFUSED}" for chain in _CHAINS),
        "COMMIT",
        "",
    ]
    command = ["nsenter", f"--net=/proc/{process_id}/ns/net", "iptables-restore"]
    done = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ContainersFailed(f"{' '.join(command)}: {done.stderr}")


_CHAINS = ("INPUT", "OUTPUT")


def _allowed(policies: list[Object], own: Peer, others: Mapping[str, Peer]) -> Iterator[str]:
    named = _numbers(policies)
    for address, other in {**others, "0.0.0.0/0": ELSEWHERE}.items():
        ports = {*named, *((each, each) for each in (*own.ports.values(), *other.ports.values()))}
        for first, last in sorted(ports):
            for protocol in ("TCP", "UDP"):
                to = f"-p {protocol.lower()} --dport {first}:{last} -j ACCEPT"
                for direction, chain in (
                    ("ingress", f"INPUT -s {address}"),
                    ("egress", f"OUTPUT -d {address}"),
                ):
                    if all(
                        is_open(policies, direction, own, other, port, protocol)
                        for port in (first, last)
                    ):
                        yield f"-A {chain} {to}"


def _numbers(policies: list[Object]) -> set[tuple[int, int]]:
    """The ranges of ports that policies name by number."""
    rules = [
        rule
        for policy in policies
        for direction in ("ingress", "egress")
        for rule in policy["spec"].get(direction, [])
    ]
    ports = [each for rule in rules for each in rule["ports"]]
    return {
        (each["port"], each.get("endPort", each["port"]))
        for each in ports
        if isinstance(each["port"], int)
    }
