"""The overlay `dev` from the images: what its containers have, what users do, how it is drained,
and that it goes on when its store is killed."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests.containers.callers import Callers
from tests.containers.cluster import Cluster
from tests.containers.pod_checks import CHECKS
from tests.containers.pods import Pod
from tests.containers.reach_checks import check_pods, check_visitors
from tests.support.deploy.manifests import overlay

pytestmark = [pytest.mark.containers, pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def dev(cluster: Cluster) -> Cluster:
    cluster.apply(overlay("dev"), replicas={"inference": 2})
    return cluster


@pytest.fixture(scope="module")
def adapters(dev, command) -> tuple[str, ...]:
    """Two that are registered, and the base model."""
    for name in ("upper", "reverse"):
        said = command("loadout", "register", name, f"/opt/loadout/demo/adapters/{name}")
        assert "\nservable by" in said
    return ("upper", "reverse", "")


@pytest.fixture(params=["adapter-store", "inference"])
def pod(request, dev) -> Pod:
    return dev.pods[request.param][0]


def test_generates(adapters, command):
    text = command("loadout", "generate", "--adapter", "upper", "--temperature", "0", "hello=")
    assert text.startswith("HELLO")


def test_answers_over_http(dev, adapters):
    [first, _second] = dev.pods["inference"]
    with urllib.request.urlopen(f"http://{first.ip}:8000/v1/models", timeout=30) as response:
        names = {each["id"] for each in json.load(response)["data"]}
    assert "loadout-demo" in names


@pytest.mark.parametrize("check", CHECKS)
def test_containers_are_as_the_manifest_says(pod, check):
    check(pod)


@pytest.mark.parametrize("check", [check_pods, check_visitors])
def test_connections_are_those_of_the_policies(dev, check):
    check(dev)


def test_inference_goes_on_when_the_store_is_killed(dev, adapters):
    """It is started again with its data, and what is registered afterwards is served."""
    [store] = dev.pods["adapter-store"]
    with Callers(dev, *adapters) as callers:
        store.kill()
        dev.wait_ready(store)
    assert callers.failures == []
    assert set(callers.texts) == set(adapters)


def test_after_the_kill_adapters_are_there_and_new_ones_are_served(dev, adapters, command):
    assert "upper" in command("loadout", "adapters")
    command("loadout", "register", "sort", "/opt/loadout/demo/adapters/sort")
    assert command("loadout", "generate", "--adapter", "sort", "--temperature", "0", "dcba=")


def test_a_drained_replica_ends_its_requests_within_the_grace(dev, adapters):
    """Other callers go to the replica that remains; nobody notices."""
    leaving = dev.pods["inference"][0]
    with Callers(dev, *adapters) as callers:
        dev.terminate(leaving)
    assert callers.failures == []
    assert callers.answered > 0
