"""The rules of Prometheus, as tests look at them."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.deploy.manifests import ROOT
from tools.packaging.prometheus_package import programs
from tools.prometheus_rule import rule_files

Rule = dict[str, Any]

UNIT_TESTS = sorted((ROOT / "tests" / "deploy" / "prometheus").glob("*.test.yml"))

_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)(\{[^}]*\})?")
_OURS = re.compile(r"(instance|instance_tier):loadout_|loadout_|vllm:|process_|(up|ALERTS)$")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_STRING = re.compile(r'"[^"]*"')


@cache
def groups() -> list[dict[str, Any]]:
    """Returns the groups of all files."""
    return [each for path in rule_files() for each in yaml.safe_load(path.read_text())["groups"]]


def rules(kind: str) -> dict[str, Rule]:
    """All rules of a kind, "alert" or "record", by name."""
    found = [rule for group in groups() for rule in group["rules"] if kind in rule]
    by_name = {rule[kind]: rule for rule in found}
    assert len(by_name) == len(found), "a name is there twice"
    return by_name


@cache
def unit_tests() -> list[dict[str, Any]]:
    """Returns the unit tests of all files."""
    return [test for path in UNIT_TESTS for test in yaml.safe_load(path.read_text())["tests"]]


def selectors(expression: str) -> set[str]:
    """The series that an expression is made of, each with its matchers: a name that is not one of
    ours, of what is recorded or Prometheus' own is a function or a label."""
    return {
        match[0]
        for match in _SELECTOR.finditer(expression)
        if _OURS.match(match[1]) and not _is_quoted(expression, match.start())
    }


def metric(selector: str) -> str:
    """A selector without its matchers."""
    return selector.partition("{")[0]


def matchers(selector: str) -> list[tuple[str, str, str]]:
    """Returns label, operator and value of each matcher of a selector."""
    return [(found[1], found[2], found[3]) for found in _MATCHER.finditer(selector)]


def promtool(*words: str | Path) -> None:
    """Fails with what it says."""
    command = [str(programs().promtool), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _is_quoted(text: str, position: int) -> bool:
    return any(match.start() < position < match.end() for match in _STRING.finditer(text))
