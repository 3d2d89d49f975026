"""The compose file with the images: both services and Prometheus, upgraded from the release before.
Grafana is not in Debian."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from loadout import Client
from tests.containers.shared_pulls import pulls_by_way
from tests.support.deploy.manifests import DEPLOY, ROOT
from tools.containers import bases
from tools.containers.engine import default_limits, environment, podman
from tools.containers.images import CPU_IMAGE, PREVIOUS_IMAGE

pytestmark = [pytest.mark.containers, pytest.mark.processes, pytest.mark.timeout(600)]

ASSETS = ROOT / "loadout" / "demo" / "assets"
START_S = 120.0
SERVED = ("adapter-store", "inference")


def compose(variables: Path, *arguments: str, overrides: Sequence[Path] = ()) -> str:
    program = str(Path(sys.executable).parent / "podman-compose")
    files = [DEPLOY / "compose" / "compose.yaml", *overrides]
    options = [part for file in files for part in ("--file", str(file))]
    command = [program, "--env-file", str(variables), *options, *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def is_healthy(service: str) -> bool:
    command = ["podman", "healthcheck", "run", f"loadout_{service}_1"]
    done = subprocess.run(command, env=environment(), capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Up with the release before, with an adapter; then upgraded."""
    folder = tmp_path_factory.mktemp("compose")
    variables = folder / "versions.env"
    pins = {
        "PYTHON_IMAGE": bases.PYTHON.name,
        "PYTHON_DIGEST": bases.digest(bases.PYTHON),
        "CPU_TORCH_INDEX": "unused",
        "PROMETHEUS_IMAGE": bases.PROMETHEUS.name,
        "PROMETHEUS_DIGEST": bases.digest(bases.PROMETHEUS),
        "GRAFANA_IMAGE": "unused",
        "GRAFANA_DIGEST": "unused",
    }
    variables.write_text("".join(f"{name}={value}\n" for name, value in pins.items()))
    machine, previous = folder / "machine.yaml", folder / "previous.yaml"
    # With one limit of its own a container has none of the engine's defaults.
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    store = {"ulimits": {"memlock": memlock, **default_limits()}}
    machine.write_text(yaml.safe_dump({"services": {"adapter-store": store}}))
    services = {service: {"image": PREVIOUS_IMAGE} for service in SERVED}
    previous.write_text(yaml.safe_dump({"services": services}))
    start(variables, machine, previous)
    with Client("127.0.0.1:7080", "127.0.0.1:7070") as client:
        client.register("before", str(ASSETS / "adapters" / "upper"))
    start(variables, machine)
    yield
    compose(variables, "down", "--volumes")


def start(variables: Path, *overrides: Path) -> None:
    """Returns when both are healthy by the checks of the file. The first override has the limits of
    this machine, which its engine may not raise."""
    up = ("up", "--detach", "--no-build", *SERVED, "prometheus")
    compose(variables, *up, overrides=overrides)
    end = time.monotonic() + START_S
    for service in SERVED:
        while not is_healthy(service):
            assert time.monotonic() < end, podman("logs", f"loadout_{service}_1")
            time.sleep(1)


@pytest.mark.parametrize("service", SERVED)
def test_services_are_of_the_new_image(composed, service):
    [found] = json.loads(podman("inspect", f"loadout_{service}_1"))
    assert found["ImageName"] == CPU_IMAGE


def test_registers_and_generates(composed):
    """What was registered before the upgrade is there."""
    with Client("127.0.0.1:7080", "127.0.0.1:7070") as client:
        client.register("after", str(ASSETS / "adapters" / "upper"))
        for adapter in ("before", "after"):
            chunks = client.generate("hello=", adapter=adapter, temperature=0, max_tokens=8)
            assert "".join(chunk.text for chunk in chunks).startswith("HELLO")


def test_images_cross_as_files_in_memory(composed):
    """From the second load on: the first may come while the store builds the image."""
    with Client("127.0.0.1:7080", "127.0.0.1:7070") as client:
        client.register("sort", str(ASSETS / "adapters" / "sort"))
        client.load("sort")
        client.unload("sort")
        before = pulls_by_way("127.0.0.1:7081")
        client.load("sort")
        assert set(pulls_by_way("127.0.0.1:7081") - before) == {"shared"}


def test_prometheus_scrapes_both(composed):
    end = time.monotonic() + START_S
    while (health := target_health()) != dict.fromkeys(SERVED, "up"):
        assert time.monotonic() < end, health
        time.sleep(1)


def target_health() -> dict[str, str]:
    url = "http://127.0.0.1:9090/api/v1/targets"
    with urllib.request.urlopen(url, timeout=10) as response:
        targets = json.load(response)["data"]["activeTargets"]
    return {each["labels"]["job"]: each["health"] for each in targets}


@pytest.mark.parametrize("service", SERVED)
def test_roots_are_read_only_and_nothing_is_gained(composed, service):
    name = f"loadout_{service}_1"
    [found] = json.loads(podman("inspect", name))
    assert found["HostConfig"]["ReadonlyRootfs"]
    lines = podman("exec", name, "cat", "/proc/1/status").splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    assert status["Uid"].split() == ["65532"] * 4
    assert int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"


@pytest.mark.parametrize("service", SERVED)
def test_services_end_cleanly(composed, service):
    """Within the grace of the file. The last test: they are not started again."""
    name = f"loadout_{service}_1"
    podman("stop", "--time", "45", name)
    [found] = json.loads(podman("inspect", name))
    assert found["State"]["ExitCode"] == 0
