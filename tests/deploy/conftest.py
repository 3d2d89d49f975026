"""Each overlay once, each of its workloads once, and the settings of their pods."""

from __future__ import annotations

import functools
import os

import pytest
from kubernetes_validate import utils

from tests.support.deploy.manifests import BUILDS, Manifests, Workload, all_workloads, overlay
from tests.support.deploy.settings import CLASSES, SAMPLE_SECRETS


@pytest.fixture(params=BUILDS)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    """What an overlay deploys."""
    return overlay(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`workload`: each of each overlay; in modules that say so, workers, too."""
    if "workload" in metafunc.fixturenames:
        found: list[tuple[str, Workload]] = list(all_workloads())
        if getattr(metafunc.module, "INCLUDES_WORKERS", False):
            found += [(f"{name}-worker", each) for name in BUILDS for each in overlay(name).workers]
        ids = [f"{name}-{workload.name}" for name, workload in found]
        metafunc.parametrize("workload", [workload for _, workload in found], ids=ids)


@pytest.fixture
def settings(workload, monkeypatch, tmp_path):
    """The pod's settings as its service reads them."""
    for name in [each for each in os.environ if each.startswith("LOADOUT_")]:
        monkeypatch.delenv(name)
    environment = dict(workload.environment)
    environment |= {name: SAMPLE_SECRETS[name] for name in workload.secret_variables}
    if workload.module == "inference_svc":
        # The service looks whether there is a model.
        (tmp_path / "config.json").write_text("{}")
        environment["LOADOUT_INFERENCE_MODEL"] = str(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return CLASSES[workload.module][1]()


@pytest.fixture(scope="module")
def schemas_are_read_once():
    """The package reads its definitions, megabytes of JSON, anew for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield
