"""Puts off grammars that take more than a second to read, of addresses, until one is needed.

`jsonschema` imports `rfc3987_syntax` for a check of formats that the schemas of few tests ask for,
and every process that collects tests imports `jsonschema`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

NAME = "rfc3987_syntax"
FUNCTION = "is_valid_syntax"
"""All that `jsonschema` imports of it."""


def install() -> None:
    """Stands in for the package, unless it is imported already."""
    if NAME not in sys.modules:
        stand_in = ModuleType(NAME)
        setattr(stand_in, FUNCTION, _is_valid_syntax)
        sys.modules[NAME] = stand_in


def _is_valid_syntax(term: str, value: str) -> bool:
    found = sys.modules[NAME]
    if getattr(found, FUNCTION) is _is_valid_syntax:
        del sys.modules[NAME]
        found = importlib.import_module(NAME)
    return bool(getattr(found, FUNCTION)(term, value))
