"""Both images as they are started without any manifest: by whom, with what to write to, and with
no component that their bill of materials leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import canonicalize_name

from tests.containers.inspect_image import SBOM
from tools.containers.engine import podman
from tools.containers.images import CPU_IMAGE, CUDA_IMAGE

pytestmark = [pytest.mark.containers, pytest.mark.processes, pytest.mark.timeout(300)]

SCRIPT = (Path(__file__).parent / "inspect_image.py").read_text()
WRITABLE = {"/tmp", "/var/tmp", "/var/lib/loadout"}


@pytest.fixture(scope="module", params=[CPU_IMAGE, CUDA_IMAGE])
def image(request) -> str:
    return str(request.param)


def inspect(image: str, *options: str) -> dict[str, Any]:
    ran = podman("run", "--rm", "--network", "none", *options, image, "python", "-c", SCRIPT)
    found: dict[str, Any] = json.loads(ran)
    return found


@pytest.fixture(scope="module")
def inside(image) -> dict[str, Any]:
    return inspect(image)


def test_nobody_is_root_and_no_program_changes_that(inside):
    assert set(inside["ids"]) == {65532}
    assert inside["set_ids"] == []
    assert inside["installers"] == []


def test_nothing_of_the_image_can_be_written(inside):
    """By its user, even where the root is not read-only; a cache of the entry point's lies in
    /tmp."""
    written = {each for each in inside["writable"] if not each.startswith("/tmp/")}
    assert written - {"/var/lock", "/run/lock"} <= WRITABLE


def test_it_runs_with_a_read_only_root(image):
    inside = inspect(image, "--read-only", "--cap-drop", "ALL")
    assert inside["root_is_read_only"]
    written = {each for each in inside["writable"] if not each.startswith("/tmp/")}
    assert written <= {"/tmp", "/var/tmp"}


def test_every_component_is_in_the_bill_of_materials(image, inside):
    text = podman("run", "--rm", "--network", "none", image, "cat", SBOM)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert components(inside, "pypi") == {normalised(each) for each in inside["python"]}
    assert components(inside, "deb/debian") == set(inside["debian"])
    assert len(components(inside, "generic")) == 1, "Python itself"


def components(inside: dict[str, Any], kind: str) -> set[str]:
    """Those of a kind of package, as NAME=VERSION."""
    start = f"pkg:{kind}/"
    found = [each.removeprefix(start) for each in inside["components"] if each.startswith(start)]
    return {unquote(each.partition("?")[0]).replace("@", "=") for each in found}


def normalised(package: str) -> str:
    name, _, version = package.partition("=")
    return f"{canonicalize_name(name)}={version}"
