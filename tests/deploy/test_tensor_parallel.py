"""The overlays whose servers have several processes in their containers, on CPUs and on GPUs."""

from __future__ import annotations

import pytest

from inference_svc.engine.ranks.group import FIRST_ANSWER_S, STALL_S
from loadout.demo.train import SHAPE
from tests.support.deploy.manifests import Manifests, Workload, gibibytes, overlay

pytestmark = pytest.mark.processes  # kubectl builds what they read


@pytest.fixture(scope="module")
def manifests() -> Manifests:
    return overlay("dev-tensor-parallel")


@pytest.fixture
def inference(manifests: Manifests) -> Workload:
    [found] = [each for each in manifests.workloads if each.name == "inference"]
    return found


@pytest.fixture
def num_ranks(manifests: Manifests) -> int:
    maps = {each["metadata"]["name"]: each["data"] for each in manifests.of_kind("ConfigMap")}
    [settings] = [data for name, data in maps.items() if name.startswith("inference-config")]
    return int(settings["LOADOUT_INFERENCE_TENSOR_PARALLEL"])


def test_each_rank_has_processors_of_its_own(inference: Workload, num_ranks: int) -> None:
    requests, limits = (inference.container["resources"][each] for each in ("requests", "limits"))
    assert int(limits["cpu"]) % num_ranks == 0
    assert {name: requests[name] for name in limits} == limits, "else they are shared"


def test_a_start_that_hangs_says_why_before_its_probe_ends_it(inference: Workload) -> None:
    probe = inference.container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > FIRST_ANSWER_S + STALL_S


def test_the_demos_model_divides(num_ranks: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        assert SHAPE[name] % num_ranks == 0


@pytest.fixture(scope="module")
def on_devices() -> Workload:
    [found] = [
        each for each in overlay("production-tensor-parallel").workloads if each.name == "inference"
    ]
    return found


def test_each_rank_has_a_device_and_a_processor(on_devices: Workload) -> None:
    """And four processors are left, as for one device."""
    num_ranks = int(on_devices.environment["LOADOUT_INFERENCE_TENSOR_PARALLEL"])
    resources = on_devices.container["resources"]
    assert int(resources["limits"]["nvidia.com/gpu"]) == num_ranks > 1
    assert int(resources["requests"]["cpu"]) >= num_ranks + 4


def test_ranks_on_devices_have_no_host_tier(on_devices: Workload) -> None:
    """A server refuses to start otherwise. What it pins in its place fits in the pod's memory."""
    environment = on_devices.environment
    assert environment["LOADOUT_INFERENCE_HOST_MEMORY"] == "0"
    num_ranks = int(environment["LOADOUT_INFERENCE_TENSOR_PARALLEL"])
    adapter_memory = environment["LOADOUT_INFERENCE_ADAPTER_MEMORY"]
    assert adapter_memory.endswith("GiB")
    pinned_gib = num_ranks * int(adapter_memory.removesuffix("GiB"))
    memory_gib = gibibytes(on_devices.container["resources"]["limits"]["memory"])
    volume = on_devices.mount_of("/dev/shm")["emptyDir"]
    assert volume["medium"] == "Memory"
    assert pinned_gib + gibibytes(volume["sizeLimit"]) < memory_gib / 2
