"""The overlay whose server has several processes in its container."""

from __future__ import annotations

import pytest

from inference_svc.engine.ranks.group import FIRST_ANSWER_S, STALL_S
from loadout.demo.train import SHAPE
from tests.support.deploy.manifests import Manifests, Workload, overlay

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
