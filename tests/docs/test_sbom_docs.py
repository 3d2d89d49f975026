"""docs/sbom: what the images have of Python, as CycloneDX, and as constraints.txt pins it."""

from __future__ import annotations

import json
import platform
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.machine.installed import closure
from tools.packaging import constraints, sbom
from tools.packaging.requirements import CONSTRAINTS, requirements
from tools.pages import sbom_docs

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
EXTRAS = sbom_docs.EXTRAS
PINS = constraints.read((ROOT / CONSTRAINTS).read_text())
DPKG = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u9
Description: GNU C Library
 Status: of a description

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""
OS_RELEASE = 'NAME="Debian GNU/Linux"\nVERSION_CODENAME=bookworm\n'


def check_schema(text: str) -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None


@pytest.fixture(params=EXTRAS)
def image(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def text(image: str) -> str:
    return (sbom_docs.FOLDER / f"{image}.cdx.json").read_text()


@pytest.fixture
def components(text: str) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads(text)["components"]}


def test_documents_are_cyclonedx_of_this_version(image, text):
    check_schema(text)
    component = json.loads(text)["metadata"]["component"]
    assert (component["name"], component["version"]) == (image, VERSION)


def test_versions_and_hashes_are_those_that_are_pinned(components):
    for name, component in components.items():
        version = component["version"].partition("+")[0]
        assert version in PINS[name].specifier, f"{name}: run `make constraints`"
        assert {each["content"] for each in component["hashes"]} <= PINS[name].hashes, name


def test_every_component_is_there_because_something_needs_it(image, text, components):
    document = json.loads(text)
    needs = {each["ref"]: each.get("dependsOn", []) for each in document["dependencies"]}
    asked = {
        canonicalize_name(Requirement(each).name) for each in requirements(ROOT, EXTRAS[image])
    }
    direct = {each.removeprefix("pkg:pypi/").partition("@")[0] for each in needs[image]}
    assert direct == asked & components.keys()
    assert asked - direct <= {"triton"}, "torch for CUDA brings it"
    reached, left = set(), [image]
    while left:
        ref = left.pop()
        if ref not in reached:
            reached.add(ref)
            left += needs[ref]
    assert reached == {image, *(each["bom-ref"] for each in components.values())}


def test_the_image_for_cpus_has_what_is_installed_here(components, image):
    """By the metadata of the packages themselves; torch is its build for CPUs, here too. The other
    image has CUDA's libraries besides."""
    names = closure(requirements(ROOT, EXTRAS["loadout-cpu"]))
    if image == "loadout-cpu":
        assert set(components) == names
    else:
        more = set(components) - names
        assert {"triton", "nvidia-cublas", "nvidia-cudnn-cu13"} <= more
        assert all(re.match("triton|nvidia-|cuda-", name) for name in more)


def package(name: str, *needs: str, is_requested: bool = False, **fields: Any) -> sbom.Package:
    described = {"name": name, "version": "1.0", "requires_dist": [*needs], **fields}
    return sbom.Package(described, "ab" * 32, is_requested, ())


def test_an_images_document_has_python_and_debian():
    others = [sbom.python_itself(), *sbom.debian_components(DPKG, OS_RELEASE)]
    text = sbom.document("x", "9", [package("a", is_requested=True)], {}, others)
    check_schema(text)
    assert {each["purl"] for each in json.loads(text)["components"]} == {
        "pkg:pypi/a@1.0",
        f"pkg:generic/cpython@{platform.python_version()}",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u9?arch=amd64&distro=bookworm",
    }


def test_dependencies_are_those_of_the_extras_that_are_asked_for():
    found = {
        each.name: each
        for each in (
            package("Top", "mid[more]>=1", "absent", "other; extra == 'not-asked'"),
            package("mid", "low; extra == 'more'", "windows; sys_platform == 'win32'"),
            *(package(name) for name in ("low", "other", "windows")),
        )
    }
    environment = {"sys_platform": "linux"}
    assert sbom.dependencies(found, environment) == {
        "top": {"mid"},
        "mid": {"low"},
        **dict.fromkeys(("low", "other", "windows"), frozenset()),
    }


def test_the_same_components_give_the_same_document():
    first, second = (package(name, is_requested=True) for name in "ab")
    texts = {sbom.document("x", "1", found, {}) for found in ([first, second], [second, first])}
    assert len(texts) == 1
    assert sbom.document("x", "1", [first], {}) not in texts


@pytest.mark.parametrize(
    ("fields", "stated"),
    [
        ({"license_expression": "MIT OR Apache-2.0"}, {"expression": "MIT OR Apache-2.0"}),
        ({"license": "MIT"}, {"license": {"id": "MIT"}}),
        ({"license": "Some words"}, {"license": {"name": "Some words"}}),
        (
            {
                "license": "The text\nof a licence",
                "classifier": ["License :: OSI Approved :: Zlib"],
            },
            {"license": {"name": "Zlib"}},
        ),
    ],
)
def test_licences_are_as_the_package_states_them(fields, stated):
    text = sbom.document("x", "1", [package("a", is_requested=True, **fields)], {})
    check_schema(text)
    [component] = json.loads(text)["components"]
    assert component["licenses"] == [stated]
