"""A group of pods is one server: its workers compute for its leader, and serve nobody."""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import pytest

from inference_svc.config import InferenceSettings
from inference_svc.core import EngineConfig, Nodes
from tests.support.deploy.manifests import Manifests, Workload, overlay
from tests.support.deploy.policies import (
    ELSEWHERE,
    OUTSIDE_PORTS,
    Peer,
    connections,
    lets_through,
    visitors,
)
from tests.support.deploy.probes import END_SECONDS, LAST_SECONDS
from tests.support.deploy.schemas import VERSIONS
from tests.support.deploy.settings import SAMPLE_SECRETS

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("schemas_are_read_once")]

RANK_PORTS = (29500, 32768, 60999)
"""The rendezvous, and ports that Linux chooses."""


OVERLAYS = ("dev-several-machines", "production-several-machines")


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return overlay(request.param)


@pytest.fixture
def leader(manifests: Manifests) -> Workload:
    [found] = [each for each in manifests.workloads if each.name == "inference"]
    return found


@pytest.fixture
def worker(manifests: Manifests) -> Workload:
    [found] = manifests.workers
    return found


def settings_of(
    workload: Workload, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: str
) -> InferenceSettings:
    """Returns the settings of a pod as its service reads them, of which some are others."""
    (folder / "config.json").write_text("{}")
    environment = workload.environment | {
        name: SAMPLE_SECRETS[name] for name in workload.secret_variables
    }
    environment |= {f"LOADOUT_INFERENCE_{name.upper()}": value for name, value in more.items()}
    with monkeypatch.context() as patch:
        for name, value in (environment | {"LOADOUT_INFERENCE_MODEL": str(folder)}).items():
            patch.setenv(name, value)
        return InferenceSettings()  # type: ignore[call-arg]


def test_leader_and_worker_are_one_server(
    leader: Workload, worker: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They differ in their numbers alone, and meet where the leader is."""
    first, second = (settings_of(each, tmp_path, monkeypatch) for each in (leader, worker))
    assert (first.nnodes, first.node_rank, second.node_rank) == (2, 0, 1)
    assert re.fullmatch(r"inference-0\.inference\.loadout(-dev)?:29500", first.rendezvous)
    assert first.model_copy(update={"node_rank": 1}) == second
    assert first.num_ranks % first.nnodes == 0
    assert leader.container["resources"] == worker.container["resources"]


def test_each_rank_has_a_device_and_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage of each pod, whose ranks its devices connect. NCCL is told about the network between
    pods, and what it needs of one is there as in a pod alone."""
    found, alone = (overlay(each) for each in (OVERLAYS[1], "production-tensor-parallel"))
    [of_one] = (each for each in alone.workloads if each.name == "inference")
    pods = [each for each in found.workloads if each.name == "inference"] + found.workers
    assert len(pods) == 2
    for stage, pod in enumerate(pods):
        settings = settings_of(pod, tmp_path, monkeypatch)
        ranks = local_ranks(settings)
        assert {rank // settings.tensor_parallel for rank in ranks} == {stage}
        resources = pod.container["resources"]
        assert int(resources["limits"]["nvidia.com/gpu"]) == len(ranks) == settings.tensor_parallel
        assert int(resources["requests"]["cpu"]) >= len(ranks) + 4
        assert settings.host_memory == 0
        assert pod.mount_of("/dev/shm") == of_one.mount_of("/dev/shm")
        environment = pod.environment
        nccl = {name for name in environment if name.startswith("NCCL_")}
        assert nccl == {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME"}
        assert {name for name in of_one.environment if name.startswith("NCCL_")} <= nccl


def test_the_autoscaler_scales_groups() -> None:
    [scaler] = overlay(OVERLAYS[1]).of_kind("HorizontalPodAutoscaler")
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("LeaderWorkerSet", "inference")


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_each_pod_may_have_a_stage(
    leader: Workload,
    worker: Workload,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
) -> None:
    """With the two settings that docs/kubernetes.md names."""
    shape = {"pipeline_parallel": "2", "tensor_parallel": str(num_ranks)}
    pods = [settings_of(each, tmp_path, monkeypatch, **shape) for each in (leader, worker)]
    ranks = [rank for each in pods for rank in local_ranks(each)]
    assert ranks == [*range(2 * num_ranks)]
    for stage, each in enumerate(pods):
        assert {rank // num_ranks for rank in local_ranks(each)} == {stage}


def local_ranks(settings: InferenceSettings) -> range:
    """Returns the ranks of a pod with these settings."""
    nodes = Nodes(settings.nnodes, settings.node_rank, settings.rendezvous, 1.0, "")
    return EngineConfig(
        settings.model,
        "model",
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        nodes=nodes,
    ).local_ranks


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_templates_are_valid_pods(leader: Workload, worker: Workload, version: str) -> None:
    for each in (leader, worker):
        pod = {"apiVersion": "v1", "kind": "Pod", **each.spec["template"]}
        pod["metadata"] = {**pod["metadata"], "name": each.name}
        assert kubernetes_validate.validate(pod, version, strict=True) == version


def test_no_service_selects_a_worker(manifests: Manifests, worker: Workload) -> None:
    for service in manifests.of_kind("Service"):
        assert not service["spec"]["selector"].items() <= worker.labels.items()
    assert worker.ports == {"metrics": 7081}


def test_ranks_reach_each_other(manifests: Manifests, leader: Workload, worker: Workload) -> None:
    """Nobody else reaches them, and workers reach what inference does."""
    policies = manifests.of_kind("NetworkPolicy")
    first, second = Peer.of(leader), Peer.of(worker)
    for port in RANK_PORTS:
        for source, destination in ((first, second), (second, first), (second, second)):
            assert lets_through(policies, source, destination, port)
        assert not lets_through(policies, first, first, port), "leaders are servers of their own"
        for visitor in (*visitors(first.namespace).values(), ELSEWHERE):
            for own in (first, second):
                assert not lets_through(policies, visitor, own, port), visitor.name
    assert lets_through(policies, visitors("")["Prometheus"], second, 7081)
    for host, port, protocol in connections(worker):
        selector = manifests.named("Service", host)["spec"]["selector"] if host else None
        pods = manifests.workloads_with(selector) if selector else []
        for destination in [Peer.of(each) for each in pods] or [ELSEWHERE]:
            assert lets_through(policies, second, destination, port, protocol)
    for port in {*OUTSIDE_PORTS} - {53}:
        assert not lets_through(policies, second, ELSEWHERE, port)


def test_a_worker_outlives_its_leaders_drain(
    leader: Workload, worker: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grace_seconds = settings_of(worker, tmp_path, monkeypatch).grace_seconds
    sleeps = [
        each.container["lifecycle"]["preStop"]["sleep"]["seconds"] for each in (leader, worker)
    ]
    assert sleeps[0] == sleeps[1]
    needed = sleeps[1] + grace_seconds + LAST_SECONDS + END_SECONDS
    assert worker.pod["terminationGracePeriodSeconds"] >= needed


def test_probes_of_a_worker(worker: Workload) -> None:
    """As patient as a leader's; a busy page of metrics does not end it."""
    asked = {kind: probe["httpGet"] for kind, probe in worker.probes.items()}
    health = {"path": "/health", "port": "metrics"}
    assert asked == {
        "startup": health,
        "readiness": health,
        "liveness": {"path": "/metrics", "port": "metrics"},
    }
    startup = worker.probes["startup"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600, "--rendezvous-timeout"
