"""Measures the architecture from the source alone: `python -m tools.house [--root DIR] [--json]`.

It reads imports, definitions and docstrings of the packages in a checkout, so that you can compare
two commits. tests/test_layering.py and tests/test_house.py check it against their rules.

tools/house.toml lists everything that was too large when its limit was set. None of it may grow,
and nothing may be added: `python -m tools.house --shrink` lowers the numbers, and removes what is
within its limit.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from tools.syntax import nodes, parsed

PACKAGES = ("contract", "servicekit", "adapter_store", "inference_svc", "kernels", "loadout")
SERVICES = ("adapter_store", "inference_svc")
LAYERS = {
    "inference_svc": """
        __main__ > app > server > api > debug > metrics > frontend > engine > backends | store
        > adapters > model | text > host > auto_settings > config > core > grammars
        > pictures > results | errors
    """,
    "adapter_store": """
        __main__ > app > api > debug | build > service > store_status | garbage_collector
        > registration | images > blobs > sources | replication > checkpoint | catalog > metrics
        > core | errors | config
    """,
}
"""A module imports only modules to its right; modules with a bar between them do not import each
other."""
SIZED = (*PACKAGES, "tools", "bench", "fuzz")
"""The folders whose sizes have limits."""
COMPUTING = ("kernels",)
"""Folders whose functions may be long: a kernel is one function."""
LIMITS = {"folders": 15, "files": 500, "classes": 25, "functions": 50, "star_tuples": 0}
"""How many files a folder may have, how many lines a file, how many methods a class, and how many
lines a function; and how many calls of a file may unpack a tuple that is written out."""
UNIFORM = {
    "inference_svc/model/architectures": "a family is one module",
    "adapter_store/catalog/migrations/versions": "a revision is one module",
}
"""Folders with a file for each member of a list, of any number, and why."""
TABLE = "tools/house.toml"
MIN_SHARED_RUN = 5
FRAGMENT = re.compile(r"(Of|It|As|Those|For people)\b")
"""The beginning of docstrings that are no sentence about their subject."""


Sizes: TypeAlias = dict[str, dict[str, int]]
"""Sizes above each of `LIMITS`, by name."""


@dataclass(frozen=True, slots=True)
class House:
    """The results of `measure`: counts, and lists of the offending modules."""

    modules: int
    lines: int
    flat_files: dict[str, int]
    circles: list[str]
    upward_imports: list[str]
    shared_lines: int
    shared_by: list[str]
    fragment_docstrings: int
    too_large: Sizes
    readme_lines: int
    readme_longest_line: int


class Tree:
    """The Python modules of a checkout by dotted name, without generated stubs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._imports: dict[str, set[str]] = {}
        self.paths = {
            self._name(path): path
            for package in PACKAGES
            for path in sorted((root / package).rglob("*.py"))
            if "_pb2" not in path.stem
        }

    def _name(self, path: Path) -> str:
        name = ".".join(path.relative_to(self.root).with_suffix("").parts)
        return name.removesuffix(".__init__")

    def under(self, *packages: str) -> dict[str, Path]:
        return {name: path for name, path in self.paths.items() if is_under(name, packages)}

    def imports(self, name: str) -> set[str]:
        """Returns every module named in an import, also inside functions and for type checking."""
        if name not in self._imports:
            self._imports[name] = self._find_imports(self.paths[name])
        return self._imports[name]

    def _find_imports(self, path: Path) -> set[str]:
        found: set[str] = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(path, node)
                known = {f"{base}.{alias.name}" for alias in node.names}
                submodules = {each for each in known if each in self.paths or "_pb2" in each}
                found |= submodules
                if len(submodules) < len(node.names):
                    found.add(base)
        return found

    def _base(self, path: Path, node: ast.ImportFrom) -> str:
        package = path.relative_to(self.root).parts[: -node.level or None]
        return ".".join((*(package if node.level else ()), *filter(None, [node.module])))

    def circles(self, package: str) -> set[str]:
        """Returns the modules from which a chain of imports leads back to them."""
        graph = {name: self.imports(name) & self.paths.keys() for name in self.under(package)}
        return {name for name in graph if name in _reachable(graph, name)}

    def upward_imports(self, service: str) -> set[str]:
        """Returns each `importer -> imported` that breaks `LAYERS`. Modules outside of its folders
        do not count."""
        levels = [level.split(" | ") for level in " ".join(LAYERS[service].split()).split(" > ")]
        rank = {part: number for number, level in enumerate(levels) for part in level}
        found = set()
        for name in self.under(service):
            for imported in self.imports(name):
                above, below = name.split(".")[1:2], imported.split(".")[1:2]
                if not above or not below or not is_under(imported, [service]) or above == below:
                    continue
                if above[0] in rank and rank[above[0]] >= rank.get(below[0], len(levels)):
                    found.add(f"{name} -> {imported}")
        return found


def is_under(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def too_large(root: Path) -> Sizes:
    """Returns the sizes above `LIMITS`, by folder, file, or name of a class or function. Docstrings
    of functions do not count, because public functions have a line for each parameter."""
    found: Sizes = {kind: {} for kind in LIMITS}
    for path in sized_files(root):
        name = path.relative_to(root).as_posix()
        for kind, subject, size in (
            ("files", name, len(path.read_text().splitlines())),
            ("star_tuples", name, num_star_tuples(path)),
            *_definitions(parsed(path), name.removesuffix(".py").replace("/", ".")),
        ):
            if size > LIMITS[kind] and not (kind == "functions" and name.startswith(COMPUTING)):
                found[kind][subject] = size
    found["folders"] = {
        folder: size
        for folder, size in num_files(root).items()
        if size > LIMITS["folders"] and folder not in UNIFORM
    }
    return found


def sized_files(root: Path) -> list[Path]:
    """Returns the Python files that have limits, without generated stubs."""
    paths = (path for folder in SIZED for path in sorted((root / folder).rglob("*.py")))
    return [path for path in paths if "_pb2" not in path.stem]


def num_files(root: Path) -> dict[str, int]:
    """Counts the modules in each folder, without its `__init__`."""
    names = [path.relative_to(root) for path in sized_files(root)]
    return Counter(name.parent.as_posix() for name in names if name.stem != "__init__")


def num_star_tuples(path: Path) -> int:
    """Counts calls like `f(*(a, b), c)`. They are plain calls, bent to take fewer lines."""

    def is_star_tuple(argument: ast.expr) -> bool:
        return isinstance(argument, ast.Starred) and isinstance(
            argument.value, ast.Tuple | ast.List
        )

    calls = (node for node in nodes(path) if isinstance(node, ast.Call))
    return sum(any(map(is_star_tuple, call.args)) for call in calls)


def _definitions(tree: ast.AST, name: str) -> Iterator[tuple[str, str, int]]:
    """Yields the kind, the name and the size of each class and function in a tree."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue  # no expression has a statement in it
        inner = name
        if isinstance(node, ast.ClassDef):
            inner = f"{name}.{node.name}"
            yield "classes", inner, sum(map(_is_function, node.body))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{name}.{node.name}"
            num_lines = _num_lines(node)
            if ast.get_docstring(node, clean=False) is not None:
                num_lines -= _num_lines(node.body[0])
            yield "functions", inner, num_lines
        yield from _definitions(node, inner)


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def read_table(root: Path) -> Sizes:
    """Returns the sizes that are above `LIMITS` for now."""
    return tomllib.loads((root / TABLE).read_text())


def shrunk(table: Sizes, found: Sizes) -> Sizes:
    """Returns the table with lower numbers where sizes have become smaller, and without what is
    within its limit."""
    return {
        kind: {
            name: min(size, found[kind][name])
            for name, size in sizes.items()
            if name in found[kind]
        }
        for kind, sizes in table.items()
    }


def write_table(root: Path, table: Sizes) -> None:
    lines = [
        "# Everything that was too large when its limit was set (LIMITS in tools/house.py).",
        "# `python -m tools.house --shrink` lowers the numbers; none may rise, and none be added.",
    ]
    for kind, sizes in table.items():
        lines += ["", f"[{kind}]", *(f'"{name}" = {size}' for name, size in sorted(sizes.items()))]
    (root / TABLE).write_text("\n".join(lines) + "\n")


def _num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def shared_runs(tree: Tree, min_run: int = MIN_SHARED_RUN) -> dict[tuple[str, str], int]:
    """Counts the lines that a module of each service shares with a module of the other, by pair, in
    runs of `min_run` or more. Blank lines, comments and imports do not count."""
    ours, theirs = (tree.under(service) for service in SERVICES)
    modules_with: dict[tuple[str, ...], set[str]] = {}
    for name, path in theirs.items():
        for _, run in _runs(path, min_run):
            modules_with.setdefault(run, set()).add(name)
    covered: dict[tuple[str, str], set[int]] = {}
    for name, path in ours.items():
        for first, run in _runs(path, min_run):
            for other in modules_with.get(run, ()):
                covered.setdefault((name, other), set()).update(range(first, first + min_run))
    return {pair: len(covered[pair]) for pair in sorted(covered)}


def _runs(path: Path, length: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields every `length` lines of code that follow each other, and the number of the first."""
    lines = _code_lines(path)
    for first in range(len(lines) - length + 1):
        yield first, tuple(lines[first : first + length])


def measure(root: Path) -> House:
    """Reads the checkout at `root`."""
    tree = Tree(root)
    files = {name: path.read_text().splitlines() for name, path in tree.paths.items()}
    shared = shared_runs(tree)
    readme = (root / "README.md").read_text().splitlines()
    return House(
        modules=len(files),
        lines=sum(map(len, files.values())),
        flat_files={each: len(_flat(root / each)) for each in SERVICES},
        circles=sorted(name for package in PACKAGES for name in tree.circles(package)),
        upward_imports=sorted(
            each for service in SERVICES for each in tree.upward_imports(service)
        ),
        shared_lines=sum(shared.values()),
        shared_by=[f"{one} ~ {other}: {number}" for (one, other), number in shared.items()],
        fragment_docstrings=num_fragments(tree),
        too_large=too_large(root),
        readme_lines=len(readme),
        readme_longest_line=max(map(len, readme)),
    )


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        each = todo.pop()
        if each in graph and each not in seen:
            seen.add(each)
            todo += graph[each]
    return seen


def _flat(package: Path) -> list[Path]:
    return [path for path in package.glob("*.py") if path.stem != "__init__"]


def num_fragments(tree: Tree) -> int:
    """Counts the docstrings that are no sentence about their subject."""
    texts = (
        node.value.value
        for path in tree.paths.values()
        for node in nodes(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
    return sum(isinstance(text, str) and bool(FRAGMENT.match(text.strip())) for text in texts)


def _code_lines(path: Path) -> list[str]:
    text = path.read_text()
    skipped: set[int] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    stripped = [
        line.strip()
        for number, line in enumerate(text.splitlines(), start=1)
        if number not in skipped
    ]
    return [line for line in stripped if line and not line.startswith("#")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout to measure")
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    parser.add_argument("--shrink", action="store_true", help=f"lower the numbers of {TABLE}")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    house = measure(root)
    if arguments.shrink:
        write_table(root, shrunk(read_table(root), house.too_large))
    if arguments.json:
        print(json.dumps(asdict(house), indent=2))
        return
    for name, value in asdict(house).items():
        if name not in ("shared_by", "too_large"):
            print(f"{name:20} {len(value) if isinstance(value, list) else value}")
    for kind, limit in LIMITS.items():
        sizes = house.too_large[kind]
        largest = max(sizes.items(), key=lambda item: item[1], default=("none", 0))
        count = sum(sizes.values()) if kind == "star_tuples" else len(sizes)
        print(f"{kind + f' > {limit}':20} {count}, largest {largest[0]}: {largest[1]}")


if __name__ == "__main__":
    main()
