"""The runbook, or the page on ranks, has every message with which ranks end, or do not start."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.ranks.memory import RankFault

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs/operations/runbook.md", ROOT / "docs/operations/ranks.md")
PAGE = " ".join(word for page in PAGES for word in page.read_text().split())
FILES = (
    *(ROOT / "inference_svc/engine/ranks").rglob("*.py"),
    ROOT / "inference_svc/backends/exchange.py",
)
ERRORS = ("EngineFailed", "ExchangeFailed", "HandshakeFailed", "NotAccepted", "Unavailable")
SAYING = ("because", "error", "warning", "_ending", "_fail")
"""Methods that are given a message."""
ANSWERING = ("fault", "_how")
"""Functions that return one."""


def messages(file: Path) -> Iterator[str]:
    """Yields the constant parts of messages."""
    for node in ast.walk(ast.parse(file.read_text())):
        said: list[ast.AST] = []
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            said = list(node.args) if name in (*ERRORS, *SAYING) else []
        elif isinstance(node, ast.FunctionDef) and node.name in ANSWERING:
            said = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
        for each in (found for one in said for found in ast.walk(one)):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield from re.split(r"%[a-z]+", each.value)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_messages_are_in_the_pages(file: Path) -> None:
    parts = [part.strip(" :;") for part in messages(file)]
    missing = [part for part in parts if " " in part and part not in PAGE]
    assert missing == []


def test_messages_are_found() -> None:
    found = [part for file in FILES for part in messages(file)]
    assert len([part for part in found if " " in part.strip()]) > 20


@pytest.mark.parametrize("fault", RankFault, ids=lambda fault: fault.name)
def test_faults_of_shared_memory_are_in_the_pages(fault: RankFault) -> None:
    assert str(fault) in PAGE
