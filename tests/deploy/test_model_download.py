"""The component model-download: what it adds to inference's pod, and that a pod which has run it
serves the model without network."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadout import Client
from tests.deploy.pods import SMALL, Places, Pod
from tests.support import forks
from tests.support.deploy.manifests import (
    EVERYTHING,
    HUB_MODEL,
    HUB_SETTINGS,
    ROOT,
    Manifests,
    Object,
    Workload,
    compose,
    overlay,
    variables,
)
from tests.support.forks import ForkedProcess
from tests.support.servers.hub_server import HUB_VARIABLES, HubServer, Repo

pytestmark = pytest.mark.processes

COMPONENT = "kubernetes/components/model-download"
NAME = "team/demo"
TOKEN = "hf_ours"


def over_dev(model: str) -> Manifests:
    settings = HUB_SETTINGS | {"literals": [f"LOADOUT_INFERENCE_MODEL={model}"]}
    return compose("dev", COMPONENT, configMapGenerator=[settings])


def inference_of(manifests: Manifests) -> Workload:
    [found] = [each for each in manifests.workloads if each.module == "inference_svc"]
    return found


@pytest.fixture(scope="module", params=["dev", EVERYTHING])
def inference(request: pytest.FixtureRequest) -> Workload:
    made = overlay(EVERYTHING) if request.param == EVERYTHING else over_dev(HUB_MODEL)
    return inference_of(made)


@pytest.fixture
def downloader(inference: Workload) -> Object:
    [found] = inference.init_containers
    return found


def test_it_downloads_what_is_served(inference: Workload, downloader: Object) -> None:
    assert downloader["args"] == ["loadout", "download", "$(LOADOUT_INFERENCE_MODEL)"]
    assert downloader["envFrom"] == inference.container["envFrom"], "one setting for both"
    assert inference.environment["LOADOUT_INFERENCE_MODEL"] == HUB_MODEL


def test_it_downloads_to_where_inference_reads(inference: Workload, downloader: Object) -> None:
    home = variables(downloader)["HF_HOME"]
    assert variables(inference.container)["HF_HOME"] == home
    claimed = [each for each in inference.pod["volumes"] if "persistentVolumeClaim" in each]
    assert [each["persistentVolumeClaim"]["claimName"] for each in claimed] == ["model-cache"]
    into, of = inference.mounts_in(downloader)[home], inference.mounts[home]
    assert "readOnly" not in into["mount"]
    assert of["mount"]["readOnly"] is True
    assert into["persistentVolumeClaim"] == of["persistentVolumeClaim"]
    assert "readOnly" not in into["persistentVolumeClaim"]


def test_the_hubs_token_is_optional_and_its_only_secret(
    inference: Workload, downloader: Object
) -> None:
    mounted = inference.mounts_in(downloader)
    [secret] = [volume["secret"] for volume in mounted.values() if "secret" in volume]
    assert secret == {"secretName": "hf-token", "optional": True, "defaultMode": 0o440}
    path = Path(variables(downloader)["HF_TOKEN_PATH"])
    assert mounted[str(path.parent)]["mount"]["readOnly"] is True
    assert path.name == "token", "the Secret's key"
    assert not [each for each in downloader["envFrom"] if "secretRef" in each]
    assert not [each for each in downloader["env"] if "valueFrom" in each]
    assert str(path.parent) not in inference.mounts


@pytest.fixture
def hub() -> Iterator[HubServer]:
    server = HubServer()
    yield server
    server.stop()


def run_downloader(inference: Workload, places: Places, hub: HubServer) -> str:
    """Runs the init container's command with its environment here; returns the folder."""
    [container] = inference.init_containers
    own = {name: places.locate(value) for name, value in variables(container).items()}
    ours = {name: value for name, value in os.environ.items() if name not in HUB_VARIABLES}
    environment = {**ours, **hub.environment(Path()), **own}
    model = inference.environment["LOADOUT_INFERENCE_MODEL"]
    command, *arguments = [
        each.replace("$(LOADOUT_INFERENCE_MODEL)", model) for each in container["args"]
    ]
    done = subprocess.run(
        [forks.programs() / command, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def files(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.slow
def test_what_was_downloaded_is_served_without_network(hub: HubServer, tmp_path: Path) -> None:
    """A gated model, by its commit; the hub is gone when inference starts, and when the pod is
    started once more."""
    model = ROOT / "loadout" / "demo" / "assets" / "model"
    hub.repos[NAME] = repo = Repo(token=TOKEN)
    commit = repo.commit({path.name: path.read_bytes() for path in model.iterdir()})
    repo.commit({"config.json": b"{}"})  # a newer one, which is not asked for
    cache, token = tmp_path / "cache", tmp_path / "token"
    cache.mkdir()
    token.mkdir()
    (token / "token").write_text(f"{TOKEN}\n")
    places = Places({"/models/huggingface": cache, "/etc/loadout/hf-token": token})
    inference = inference_of(over_dev(f"{NAME}@{commit}"))
    folder = run_downloader(inference, places, hub)
    assert Path(folder).is_relative_to(cache)
    assert Path(folder).name == commit

    hub.repos.clear()
    assert run_downloader(inference, places, hub) == folder
    before = files(cache)
    changes = {**SMALL, "LOADOUT_INFERENCE_STORE": None, "HF_ENDPOINT": "http://127.0.0.1:1"}
    pod = Pod(inference, places, tmp_path, changes, ForkedProcess)
    try:
        pod.wait_ready()
        with Client(inference=pod.address) as client:
            assert client.complete("hello=", temperature=0, max_tokens=4).text
    finally:
        pod.stop()
    assert files(cache) == before, "its volume is mounted read-only"
