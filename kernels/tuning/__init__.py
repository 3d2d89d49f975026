"""The constants of the Triton kernels: block sizes, warps, stages, programs.

The JSON files in this folder are tables. default.json has every kernel. A device's file, named
after the device with underscores for spaces, has the kernels that were measured there, and wins. A
table has rules for each kernel; the first rule that fits counts:

    {"prefill": [{"where": {"head_dim": [129, 1024]}, "block_n": 32, ...}, {"block_n": 64, ...}]}

`where` has the lowest and the highest value of each argument of `constants`. The arguments describe
a model, never a batch: a constant may change the order of additions, and a token's bits must not
depend on the other requests in the batch. `most_rows` of "beside" is a number of rows up to which
LoRA runs beside the base's products, with the same bits as in line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DEFAULT = "default"
WHERE = "where"
MAY_BE_0 = {"most_rows"}
"""Constants that switch something off with 0."""

Rules = list[dict[str, Any]]
Table = dict[str, Rules]


def path_of(device_name: str) -> Path:
    """Returns the path of a device's table, which need not exist."""
    return FOLDER / f"{device_name.replace(' ', '_')}.json"


def read_table(path: Path, default: Table | None = None) -> Table:
    """Reads a table.

    Args:
        path: File of the table.
        default: Table that every rule must match in its constants. None: no check.

    Raises:
        ValueError: It is not a table, or does not match. The message names file and kernel.
    """
    table = json.loads(path.read_text())
    for kernel, rules in table.items():
        for rule in rules:
            fault = _fault(rule)
            if default is not None and not fault:
                known = default.get(kernel, [{}])[-1].keys()
                given = rule.keys() - {WHERE}
                fault = "" if given == known else f"has {sorted(given)}, needs {sorted(known)}"
            if fault:
                raise ValueError(f"{path.name}: a rule of {kernel} {fault}")
        if not rules or WHERE in rules[-1]:
            raise ValueError(f"{path.name}: the last rule of {kernel} must fit everything")
    return dict(table)


def _fault(rule: Mapping[str, Any]) -> str:
    for name, value in rule.items():
        if name == WHERE:
            continue
        least = 0 if name in MAY_BE_0 else 1
        if type(value) is not int or value < least:
            return f"has {name} {value!r}: it must be a whole number of {least} or more"
        if "block" in name and value & (value - 1):
            return f"has {name} {value}: it must be a power of 2"
    return ""


_default = read_table(path_of(DEFAULT))
_table = _default
_found: dict[tuple[str, tuple[tuple[str, int], ...]], dict[str, int]] = {}


def use_device(name: str) -> bool:
    """From now on the table of the device `name` counts, if there is one; returns whether there
    is. Called once, before anything is compiled. Raises ValueError as `read_table`."""
    path = path_of(name)
    _replace(_default | (read_table(path, _default) if path.is_file() else {}))
    return path.is_file()


def measured_devices() -> list[str]:
    """Returns the names of the devices that have a table."""
    stems = (path.stem for path in FOLDER.glob("*.json"))
    return sorted(stem.replace("_", " ") for stem in stems if stem != DEFAULT)


def constants(kernel: str, **model: int) -> Mapping[str, int]:
    """Returns the constants of `kernel` for a model with these sizes, such as `head_dim`. Raises
    KeyError for a kernel without a rule."""
    key = (kernel, tuple(model.items()))
    found = _found.get(key)
    if found is None:
        rule = next(rule for rule in _table[kernel] if _fits(rule, model))
        found = _found[key] = {name: value for name, value in rule.items() if name != WHERE}
    return found


def all_constants(kernel: str, **model: int) -> list[Mapping[str, int]]:
    """Returns the constants of every rule of `kernel` in any table: all constants with which it may
    run on a device that is not known yet. With sizes of a model, only of the rules that count for
    it."""
    found: list[Mapping[str, int]] = []
    for table in (*_tables_in(FOLDER), _table):
        rules = table.get(kernel, [])
        found += [rule for rule in rules if _fits(rule, model)][:1] if model else rules
    return found


@cache
def _tables_in(folder: Path) -> tuple[Table, ...]:
    """Reads all tables of a folder."""
    return tuple(read_table(path, _default) for path in sorted(folder.glob("*.json")))


def _fits(rule: Mapping[str, Any], model: Mapping[str, int]) -> bool:
    ranges = rule.get(WHERE, {})
    return all(lowest <= model[name] <= highest for name, (lowest, highest) in ranges.items())


@contextmanager
def overridden(kernel: str, **changed: int) -> Iterator[None]:
    """While it lasts, these constants of `kernel` count, for every model: to measure them."""
    before = _table
    unknown = changed.keys() - before[kernel][-1].keys()
    assert not unknown, f"{kernel} has no {sorted(unknown)}"
    _replace(before | {kernel: [rule | changed for rule in before[kernel]]})
    try:
        yield
    finally:
        _replace(before)


def _replace(table: Table) -> None:
    global _table
    _table = table
    _found.clear()
