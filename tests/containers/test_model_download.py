"""The component `model-download` over `dev`: the init container downloads, inference serves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.containers.dns import GATEWAY, MACHINE
from tests.containers.pod_checks import is_mounted_read_only
from tests.containers.pods import Pod
from tests.support.deploy.manifests import ROOT, compose
from tests.support.servers.hub_server import HubServer, Repo

pytestmark = [pytest.mark.containers, pytest.mark.processes, pytest.mark.timeout(600)]

MODEL = ROOT / "loadout" / "demo" / "assets" / "model"
NAME = "team/demo"
TOKEN = "hf_ours"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A hub with the demo's model, for a token only."""
    hub = HubServer(GATEWAY, port=443)  # the one that the policy names
    hub.lfs_url = hub.url.replace(GATEWAY, MACHINE)  # another host, as a CDN is
    hub.repos[NAME] = repo = Repo(token=TOKEN)
    repo.commit({path.name: path.read_bytes() for path in MODEL.iterdir()})
    yield hub
    hub.stop()


def test_a_gated_model_is_downloaded_and_served(cluster, command, hub):
    literals = (
        *(f"LOADOUT_INFERENCE_MODEL={NAME}", f"HF_ENDPOINT={hub.url}"),
        f"LOADOUT_HF_REDIRECT_HOSTS={MACHINE}",
    )
    settings = {"name": "inference-config", "behavior": "merge", "literals": list(literals)}
    manifests = compose(
        "dev", "kubernetes/components/model-download", configMapGenerator=[settings]
    )
    cluster.provided.put_secret("hf-token", {"token": f"{TOKEN}\n".encode()}, group=65532)
    cluster.apply(manifests)
    assert command("loadout", "generate", "--temperature", "0", "hello=")
    assert hub.requests
    [pod] = cluster.pods["inference"]
    check_downloader(pod)


def check_downloader(pod: Pod) -> None:
    """It ran as the manifest says, as far as the engine tells of what has ended."""
    [declared] = pod.workload.init_containers
    ended = pod.inspect(declared["name"])
    assert ended["State"]["ExitCode"] == 0
    assert ended["Config"]["User"] == "65532:65532"
    assert ended["HostConfig"]["ReadonlyRootfs"]
    assert "no-new-privileges" in ended["HostConfig"]["SecurityOpt"]
    assert not ended["BoundingCaps"]
    mounted = {each["Destination"]: not each["RW"] for each in ended["Mounts"]}
    wanted = pod.workload.mounts_in(declared)
    assert {path: mounted[path] for path in wanted} == {
        path: is_mounted_read_only(each) for path, each in wanted.items()
    }
