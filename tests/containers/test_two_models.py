"""The overlay `dev-two-models`: an adapter is served by the service of its base model."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import overlay

pytestmark = [pytest.mark.containers, pytest.mark.processes, pytest.mark.timeout(600)]


def test_each_base_model_has_its_service(cluster, command):
    manifests = overlay("dev-two-models")
    cluster.apply(manifests)
    for service, adapter in (("inference", "upper"), ("inference-second", "reverse")):
        [workload] = [each for each in manifests.workloads if each.name == service]
        base = workload.environment["LOADOUT_INFERENCE_BASE_MODEL"]
        source = f"/opt/loadout/demo/adapters/{adapter}"
        said = command("loadout", "register", adapter, source, "--base-model", base)
        assert said.count("servable by") == 1
        address = f"{service}:7080"
        arguments = ("--inference", address, "--adapter", adapter, "--temperature", "0", "hello=")
        assert command("loadout", "generate", *arguments)
