"""A cluster of the release before, upgraded to this one while callers generate."""

from __future__ import annotations

import pytest

from tests.containers.callers import Callers
from tests.support.deploy.manifests import compose, overlay

pytestmark = [pytest.mark.containers, pytest.mark.processes, pytest.mark.timeout(900)]

REPLICAS = {"inference": 2}
PREVIOUS = {"name": "loadout-cpu", "newTag": "previous"}


def test_store_and_inference_are_upgraded_under_load(cluster, command):
    cluster.apply(compose("dev", images=[PREVIOUS]), REPLICAS)
    command("loadout", "register", "upper", "/opt/loadout/demo/adapters/upper")
    command("loadout", "register", "reverse", "/opt/loadout/demo/adapters/reverse")
    old = [pod.inspect()["Image"] for pods in cluster.pods.values() for pod in pods]
    with Callers(cluster, "upper", "reverse", "") as callers:
        cluster.apply(overlay("dev"), REPLICAS)
    new = [pod.inspect()["Image"] for pods in cluster.pods.values() for pod in pods]
    assert len(new) == len(old) == 3
    assert set(old).isdisjoint(new)
    assert callers.failures == []
    for adapter, texts in callers.texts.items():
        assert len(texts) == 1, f"{adapter or 'the base model'}: {texts}"
    assert callers.answered > 100
