"""The overlay `dev-two-models`: an adapter is served by the service of its base model."""

from __future__ import annotations

import pytest

from tests.support.deploy.manifests import overlay

pytestmark = [pytest.mark.containers, pytest.mark.processes, pytest.mark.timeout(600)]


ADAPTERS = {"inference": "upper", "inference-second": "reverse"}


def test_each_base_model_has_its_service(cluster, command):
    manifests = overlay("dev-two-models")
    cluster.apply(manifests)
    for service, adapter in ADAPTERS.items():
        [workload] = [each for each in manifests.workloads if each.name == service]
        base = workload.environment["LOADOUT_INFERENCE_BASE_MODEL"]
        source = f"/opt/loadout/demo/adapters/{adapter}"
        register = ("register", adapter, source, "--base-model", base, "--require-servable")
        assert command("loadout", *register).count("\nservable by") == 1
    for service in ADAPTERS:
        for own, adapter in ADAPTERS.items():
            generate = ("--inference", f"{service}:7080", "--adapter", adapter, "hello=")
            if own == service:
                assert command("loadout", "generate", *generate).strip()
            else:
                with pytest.raises(AssertionError, match="is for base model"):
                    command("loadout", "generate", *generate)
