"""A cluster for each module, and commands in pods of its users. Run by `make test-containers`,
which builds the images first."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.containers.cluster import Cluster
from tests.containers.pods import NETWORK
from tools.containers.engine import environment
from tools.containers.images import CPU_IMAGE

Command = Callable[..., str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Empty at first."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def command() -> Command:
    """Runs `command("loadout", "adapters", ...)` in a pod of the cluster, which knows the services
    by their names: its output. Fails as it fails."""

    def run(*arguments: str, mount: Path | None = None) -> str:
        options = ["--rm", "--network", NETWORK, "--label", "loadout-test"]
        if mount is not None:
            options += ["--volume", f"{mount}:/mnt/{mount.name}:ro"]
        for name, address in (("STORE", "adapter-store:7070"), ("INFERENCE", "inference:7080")):
            options += ["--env", f"LOADOUT_{name}={address}"]
        done = subprocess.run(
            ["podman", "run", *options, CPU_IMAGE, *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
