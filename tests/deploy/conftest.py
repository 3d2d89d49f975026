"""Each overlay once; each of its workloads once."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import BUILDS, Manifests, Workload, all_workloads, overlay


@pytest.fixture(params=BUILDS)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    """What an overlay deploys."""
    return overlay(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`workload`: each of each overlay."""
    if "workload" in metafunc.fixturenames:
        found: list[tuple[str, Workload]] = list(all_workloads())
        ids = [f"{name}-{workload.name}" for name, workload in found]
        metafunc.parametrize("workload", [workload for _, workload in found], ids=ids)
