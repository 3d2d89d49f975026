"""Chooses the cells of a matrix that `make test` runs; `make test-long` runs all.

Each family of models meets each backend and each dtype, but not each backend in each dtype. So a
fault of a family, a backend or a dtype shows in `make test`. A fault of one crossing shows in
`make test-long`, and for the families in BOTH in `make test`, too.

A test with the mark `matrix` makes one claim of many cells, such as of each family of models or of
each size for each kernel. Of a large matrix `make test` runs half of the cells, chosen by their
names, and of a very large one a quarter, with each value of each parameter that many cells share;
`make test-long` runs the others. `make test-unit` runs every fifth of the cells that `make test`
runs. Tests choose differently, so that each family and each kernel is in some matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import combinations, product
from typing import Any
from zlib import crc32

import pytest

PATHS = {"native": True, "torch": False}
"""Backends for CPUs, by the setting `native_kernels`."""
PAIRS = {("float32", "native"), ("bfloat16", "torch")}
BOTH = ("llama", "gpt-oss", "Llama", "GptOss", "Gemma3")
"""A dense family and a mixture, as the zoo and as transformers call them, and a whole model."""

LARGE, VERY_LARGE = 12, 36
"""Matrices of at least so many cells are halved, and quartered."""
STEP = 5
"""No number of kernel variants, or of dtypes, is a multiple of it: each is among the chosen."""


def thin(items: Iterable[pytest.Item]) -> None:
    """Marks the cells that `make test` leaves to `make test-long` as `long`, and the cells that
    `make test-unit` leaves to `make test` as `slow`."""
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("matrix") and not item.get_closest_marker("long"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cells in matrices.items():
        if len(cells) >= LARGE:
            kept = chosen({cell.nodeid: values_of(cell) for cell in cells})
            for cell in cells:
                if cell.nodeid not in kept:
                    cell.add_marker(pytest.mark.long)
        quick = [cell for cell in cells if not cell.get_closest_marker("long")]
        for index in left_out(name.partition("::")[0], len(quick)):
            quick[index].add_marker(pytest.mark.slow)


def values_of(cell: pytest.Item) -> set[tuple[str, str]]:
    """Returns the parameters of a cell with their values, as text."""
    callspec = getattr(cell, "callspec", None)
    return {(name, repr(value)) for name, value in callspec.params.items()} if callspec else set()


def chosen(cells: Mapping[str, Collection[Hashable]]) -> set[str]:
    """Returns the cells of a large matrix that `make test` runs, by node id. Neighbours in the
    matrix are chosen independently, so a half or a quarter of each family's and of each kernel's
    are. Of a value that many cells have, there is one at least."""
    parts = 4 if len(cells) >= VERY_LARGE else 2
    order = sorted(cells, key=_digest)
    kept = {name for name in order if _digest(name)[0] % parts == 0}
    met = {value for name in kept for value in cells[name]}
    counts = Counter(value for values in cells.values() for value in values)
    for name in order:
        missing = {each for each in cells[name] if counts[each] >= 2 * parts} - met
        if missing:
            kept.add(name)
            met |= missing
    return kept


def _digest(cell: str) -> bytes:
    return sha256(cell.encode()).digest()


def left_out(file: str, num_cells: int) -> list[int]:
    """Returns the cells of a file's matrix that are not chosen; none of a small matrix."""
    first = crc32(file.encode()) % STEP
    return [each for each in range(num_cells) if num_cells >= STEP and each % STEP != first]


def pairs(families: Iterable[str]) -> list[Any]:
    """Returns cells (family, dtype, path)."""
    return [
        _cell((family, dtype, path), (dtype, path) in PAIRS or family in BOTH)
        for family in families
        for dtype in ("float32", "bfloat16")
        for path in PATHS
    ]


def by_path(families: Iterable[str]) -> list[Any]:
    """Returns cells (family, path): all of the native kernels, some of torch."""
    return [
        _cell((family, path), path == "native" or family in BOTH)
        for family in families
        for path in PATHS
    ]


def long_but(quick: Sequence[str], families: Iterable[str]) -> list[Any]:
    """Returns the families, of which `make test` runs the quick ones alone."""
    return [_cell((family,), family in quick) for family in families]


def crossed(quick: Collection[tuple[Any, ...]], *values: Iterable[Any]) -> list[Any]:
    """Returns each crossing of values, of which `make test` runs the quick ones alone."""
    return [_cell(each, each in quick) for each in product(*values)]


def in_turns(cases: Sequence[tuple[Any, ...]], values: Sequence[Any]) -> list[Any]:
    """Returns each case with each value, appended. `make test` runs one of the values with a case,
    in turns; `make test-long` runs the others, too."""
    return [
        pytest.param(
            *(*case, value),
            marks=() if case_at % len(values) == value_at else pytest.mark.long,
            id="-".join(str(getattr(each, "__name__", each)) for each in (*case, value)),
        )
        for case_at, case in enumerate(cases)
        for value_at, value in enumerate(values)
    ]


def pairwise(**axes: Sequence[Any]) -> Any:
    """Parametrizes a test by all combinations of the axes' values. `make test` runs so many of them
    that each two values of two axes meet; `make test-long` runs the others, too."""
    cells = list(product(*(range(len(values)) for values in axes.values())))
    quick = _covering(cells)
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(
                *(values[at] for values, at in zip(axes.values(), cell, strict=True)),
                marks=() if cell in quick else pytest.mark.long,
                id="-".join(
                    str(values[at]) for values, at in zip(axes.values(), cell, strict=True)
                ),
            )
            for cell in cells
        ],
    )


def _covering(cells: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Returns cells in which each two values of two axes meet, chosen greedily."""
    pairs_of = {cell: set(combinations(enumerate(cell), 2)) for cell in cells}
    open_pairs = set().union(*pairs_of.values())
    chosen: set[tuple[int, ...]] = set()
    while open_pairs:
        best = max(cells, key=lambda cell: len(pairs_of[cell] & open_pairs))
        chosen.add(best)
        open_pairs -= pairs_of[best]
    return chosen


def _cell(values: tuple[Any, ...], is_quick: bool) -> Any:
    marks = () if is_quick else (pytest.mark.long,)
    return pytest.param(*values, marks=marks, id="-".join(map(str, values)))
