"""The overlay `dev` from the images: what its containers have, what users do, how it is drained,
and that it goes on when its store is killed."""

from __future__ import annotations

import pytest

from tests.containers.callers import Callers
from tests.containers.cluster import Cluster
from tests.containers.pods import Pod
from tests.deploy.manifests import gibibytes, overlay

pytestmark = [pytest.mark.containers, pytest.mark.processes, pytest.mark.timeout(900)]

STATUS = "/proc/1/status"


@pytest.fixture(scope="module")
def dev(cluster: Cluster) -> Cluster:
    cluster.apply(overlay("dev"), replicas={"inference": 2})
    return cluster


@pytest.fixture(scope="module")
def adapters(dev, command) -> tuple[str, ...]:
    """Two that are registered, and the base model."""
    for name in ("upper", "reverse"):
        said = command("loadout", "register", name, f"/opt/loadout/demo/adapters/{name}")
        assert "servable by" in said
    return ("upper", "reverse", "")


@pytest.fixture(params=["adapter-store", "inference"])
def pod(request, dev) -> Pod:
    return dev.pods[request.param][0]


def test_generates(adapters, command):
    text = command("loadout", "generate", "--adapter", "upper", "--temperature", "0", "hello=")
    assert text.startswith("HELLO")


def test_the_process_may_do_what_the_manifest_allows(pod):
    context = pod.workload.pod["securityContext"]
    status = dict(line.split(":\t", 1) for line in pod.execute("cat", STATUS).stdout.splitlines())
    assert set(status["Uid"].split()) == {str(context["runAsUser"])}
    assert set(status["Gid"].split()) == {str(context["runAsGroup"])}
    assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"  # filtered


def test_only_what_is_mounted_can_be_written(pod):
    probe = "import os, sys; print(os.access(sys.argv[1], os.W_OK))"
    writable = set()
    for folder in ("/", "/opt/loadout", "/etc", "/usr", "/var/lib/loadout", "/tmp"):
        if pod.execute("python", "-c", probe, folder).stdout.strip() == "True":
            writable.add(folder)
    mounted = {
        path for path, each in pod.workload.mounts.items() if not each["mount"].get("readOnly")
    }
    assert writable == mounted


def test_limits_are_those_of_the_container(pod):
    limits = pod.workload.container["resources"]["limits"]
    given = pod.inspect()["HostConfig"]
    assert given["Memory"] == gibibytes(limits["memory"]) * 2**30
    if "cpu" in limits:
        assert given["NanoCpus"] == int(limits["cpu"]) * 10**9


def test_command_is_the_manifests(pod):
    command = pod.execute("cat", "/proc/1/cmdline").stdout.rstrip("\0").split("\0")
    # Python is what the image's path finds.
    assert command[1:] == pod.workload.container["args"][1:]


@pytest.mark.parametrize("kind", ["startup", "readiness", "liveness"])
def test_probes_are_answered(pod, kind):
    assert pod.probe(kind)


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
        code, seconds = dev.terminate(leaving)
    assert code == 0
    assert seconds < leaving.workload.pod["terminationGracePeriodSeconds"]
    assert callers.failures == []
    assert callers.answered > 0
