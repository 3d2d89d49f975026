"""The overlay `dev-several-machines`: two pods of a LeaderWorkerSet compute one model, and start
again together."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable

import pytest

from tests.containers.cluster import GROUP, Cluster
from tests.containers.reach_checks import reached_by_pod, reached_by_visitor
from tests.support.deploy.manifests import overlay

Command = Callable[..., str]

pytestmark = [pytest.mark.containers, pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> Cluster:
    token = secrets.token_hex(32).encode()
    cluster.provided.put_secret("inference-rendezvous", {"token": token}, GROUP)
    cluster.apply(overlay("dev-several-machines"))
    return cluster


@pytest.fixture(scope="module")
def adapter(group: Cluster, command: Command) -> str:
    said = command("loadout", "register", "upper", "/opt/loadout/demo/adapters/upper")
    assert said.count("\nservable by") == 1, "one verdict for both pods"
    return "upper"


def generate(command: Command, adapter: str) -> str:
    return command("loadout", "generate", "--adapter", adapter, "--temperature", "0", "hello=")


def test_both_pods_compute(group: Cluster, adapter: str, command: Command) -> None:
    assert generate(command, adapter).startswith("HELLO")
    ranks = json.loads(command("loadout", "info", "--json"))["server"]["ranks"]
    assert [each["answers"] for each in ranks] == [True, True]
    assert all(each["num_steps"] and each["pulled_bytes"] for each in ranks)
    leader, worker = group.pods["inference"]
    assert leader.ip != worker.ip


def test_only_the_group_reaches_its_ranks(group: Cluster, adapter: str) -> None:
    """Their rendezvous, and the ports that the system chooses; in both directions."""
    leader, worker = group.pods["inference"]
    [store] = group.pods["adapter-store"]
    rendezvous, chosen = f"{leader.ip}:29500", f"{worker.ip}:40000"
    assert reached_by_pod(worker, {rendezvous}) == {rendezvous}
    assert reached_by_pod(leader, {chosen}) == {chosen}
    assert reached_by_pod(store, {rendezvous, chosen}) == set()
    assert reached_by_visitor(group, "inference client", {rendezvous, chosen}) == set()


@pytest.mark.parametrize("index", [0, 1], ids=["leader", "worker"])
def test_pods_start_again_together(
    group: Cluster, adapter: str, command: Command, index: int
) -> None:
    """Containers of a group, where they are: its pods stay."""
    killed, other = group.pods["inference"][index], group.pods["inference"][1 - index]
    running = other.process_id
    killed.kill()
    other.wait_restarted(running)
    for pod in (killed, other):
        group.wait_ready(pod)
    assert generate(command, adapter).startswith("HELLO")
