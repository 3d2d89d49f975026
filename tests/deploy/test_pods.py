"""The commands and environments of pods, run for real: they start, answer their probes, export
what the autoscaler watches, find each other, and end in time."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadout import Client, TlsConfig
from loadout.demo.process import Process
from tests.deploy.pods import SMALL, Places, Pod
from tests.support.access.certificates import Authority
from tests.support.access.policies import token_lines, token_of
from tests.support.deploy.manifests import ROOT, Manifests, overlay
from tests.support.deploy.scaling import targets
from tests.support.forks import ForkedProcess

ASSETS = ROOT / "loadout" / "demo" / "assets"
IMAGE = {"/opt/loadout/demo": ASSETS, "/models/base": ASSETS / "model"}

SMALL_STORE: dict[str, str | None] = {"LOADOUT_STORE_IMAGE_MEMORY": "64MiB"}
ALONE: dict[str, str | None] = {
    **SMALL_STORE,
    "LOADOUT_STORE_SHARED_S3": None,
    "LOADOUT_STORE_S3_BUCKETS": None,
}
"""A store over SQLite: tests/adapter_store has those over PostgreSQL and S3."""

Run = Callable[..., Pod]


@pytest.fixture
def run(tmp_path, request) -> Iterator[Run]:
    """`run(manifests, name, folders, changes)`: a pod of the workload, forked unless the test is a
    long one; ended with the test."""
    process = Process if request.node.get_closest_marker("long") else ForkedProcess
    pods: list[Pod] = []

    def start(manifests: Manifests, name: str, folders: dict[str, Path], changes) -> Pod:
        [workload] = [each for each in manifests.workloads if each.name == name]
        work_dir = tmp_path / name
        (work_dir / "data").mkdir(parents=True)
        places = Places({**IMAGE, "/var/lib/loadout": work_dir / "data", **folders})
        pods.append(Pod(workload, places, work_dir, changes, process))
        return pods[-1]

    yield start
    for pod in pods:
        pod.stop()


def served(pod: Pod) -> str:
    with urllib.request.urlopen(pod.metrics_url, timeout=10) as response:
        return str(response.read().decode())


def check_life(pods: list[Pod]) -> None:
    """Every probe is answered with yes; the end is in time, and clean."""
    for pod in pods:
        for kind in ("startup", "readiness", "liveness"):
            done = pod.probe(kind)
            assert done.returncode == 0, done.stderr
    for pod in reversed(pods):
        code, seconds = pod.stop()
        sleep = pod.workload.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert code == 0
        assert seconds + sleep < pod.workload.pod["terminationGracePeriodSeconds"]
        assert pod.probe("readiness").returncode == 1


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.processes
def test_dev(run):
    """What test_production shows of the other overlay, without tokens and TLS."""
    manifests = overlay("dev")
    store = run(manifests, "adapter-store", {}, SMALL_STORE)
    store.wait_ready()
    changes = {**SMALL, "LOADOUT_INFERENCE_STORE": store.address}
    inference = run(manifests, "inference", {}, changes)
    inference.wait_ready()
    with Client(inference=inference.address, store=store.address) as client:
        client.register("shout", str(ASSETS / "adapters" / "upper"))
        chunks = client.generate("hello=", adapter="shout", temperature=0, max_tokens=8)
        assert "".join(chunk.text for chunk in chunks).startswith("HELLO")
    check_life([store, inference])


def secrets(folder: Path) -> tuple[dict[str, Path], Authority]:
    """What the Secrets of production hold, as docs/kubernetes.md says; and who signed."""
    authority = Authority(folder)
    places = {}
    for name, service in (("adapter-store-tls", "adapter-store"), ("inference-tls", "inference")):
        chain, key = authority.issue(service, service)
        places[name] = folder / name
        places[name].mkdir()
        (places[name] / "tls.crt").write_bytes(chain.read_bytes())
        (places[name] / "tls.key").write_bytes(key.read_bytes())
        (places[name] / "ca.crt").write_bytes(authority.pem)
    places["loadout-policy"] = folder / "policy"
    places["loadout-policy"].mkdir()
    lines = (
        token_lines("inference", ["server"], ["*"]),
        token_lines("trainer", ["publisher"], ["default"]),
        token_lines("backend", ["caller"], ["default"]),
    )
    (places["loadout-policy"] / "policy.toml").write_text("\n".join(lines))
    places["inference-store-token"] = folder / "token"
    places["inference-store-token"].mkdir()
    (places["inference-store-token"] / "token").write_text(token_of("inference"))
    return places, authority


def mounted(manifests: Manifests, name: str, found: dict[str, Path]) -> dict[str, Path]:
    """Path of a mount -> the Secret's folder."""
    [workload] = [each for each in manifests.workloads if each.name == name]
    return {
        path: found[volume["secret"]["secretName"]]
        for path, volume in workload.mounts.items()
        if "secret" in volume
    }


@pytest.mark.slow
@pytest.mark.processes
def test_production(run, tmp_path):
    """With tokens and TLS; on CPU, and over SQLite."""
    manifests = overlay("production")
    found, authority = secrets(tmp_path)
    folders = mounted(manifests, "adapter-store", found)
    store = run(manifests, "adapter-store", folders, ALONE)
    store.wait_ready()
    folders = mounted(manifests, "inference", found)
    changes = {**SMALL, "LOADOUT_INFERENCE_STORE": store.address}
    inference = run(manifests, "inference", folders, changes)
    inference.wait_ready()
    addresses = {"inference": inference.address, "store": store.address}
    tls = TlsConfig(ca_file=authority.path)
    with Client(**addresses, token=token_of("trainer"), tls=tls) as client:
        client.register("shout", str(ASSETS / "adapters" / "upper"))
    with Client(**addresses, token=token_of("backend"), tls=tls) as client:
        chunks = client.generate("hello=", adapter="shout", temperature=0, max_tokens=8)
        assert "".join(chunk.text for chunk in chunks).startswith("HELLO")
    [autoscaler] = manifests.of_kind("HorizontalPodAutoscaler")
    for metric in targets(autoscaler):
        assert re.search(rf"^{metric} \d", served(inference), re.MULTILINE)
    check_life([store, inference])
