"""One version, in every place that names it, and an entry for it in the changelog."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import loadout

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
MAX_LINES = 60
"""Of a release, which is for users: details go into the pages."""


def test_package_and_changelog_have_the_version() -> None:
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", CHANGELOG, re.MULTILINE)
    assert loadout.__version__ == VERSION == versions[0]
    assert versions == sorted(versions, key=lambda each: tuple(map(int, each.split("."))))[::-1]


def test_a_release_is_read_in_one_go() -> None:
    sections = {each.partition("\n")[0]: each for each in CHANGELOG.split("\n## ")[1:]}
    lines = {name: sum(map(bool, text.splitlines()[1:])) for name, text in sections.items()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_images_in_deploy_have_the_version() -> None:
    texts = [path.read_text() for path in (ROOT / "deploy").rglob("*.yaml")]
    tags = {tag for text in texts for tag in re.findall(r"loadout-\w+:(\d[\w.]*)", text)}
    tags |= {tag for text in texts for tag in re.findall(r"newTag: (\d[\w.]*)", text)}
    assert tags == {VERSION}
