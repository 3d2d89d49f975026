"""A cluster for each module, and commands in pods of its users. Run by `make test-containers`,
which builds the images first."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.containers.cluster import Cluster
from tools.containers.engine import environment
from tools.containers.images import CPU_IMAGE

Command = Callable[..., str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Empty at first."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def command(cluster: Cluster) -> Command:
    """Runs `command("loadout", "adapters", ...)` in a pod of the cluster, which knows the services
    by their names: its output. Fails as it fails."""

    def run(*arguments: str, token: str = "") -> str:
        done = subprocess.run(
            ["podman", "run", *cluster.run_options(token), CPU_IMAGE, *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
