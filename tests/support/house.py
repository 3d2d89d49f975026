"""The product's modules by name, and how a rule about them fails."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.house import Tree
from tools.syntax import nodes, parsed

ROOT = Path(__file__).parents[2]
TREE = Tree(ROOT)


@contextmanager
def syntax_trees() -> Iterator[None]:
    """Forgets the syntax trees at the end: the collector would look at their million objects. While
    they are made, it takes most of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        parsed.cache_clear()
        nodes.cache_clear()


def check(rule: str, found: Iterable[str]) -> None:
    """Fails with every violation of a rule that was found."""
    violations = sorted(set(found))
    assert not violations, f"{rule}: {violations}"
