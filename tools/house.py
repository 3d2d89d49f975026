"""Measures the architecture from the source alone: `python -m tools.house [--root DIR] [--json]`.

It reads imports, definitions and docstrings of the packages in a checkout, so that you can compare
two commits. tests/test_layering.py checks the same graph against its rules.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.syntax import nodes

PACKAGES = ("contract", "servicekit", "adapter_store", "inference_svc", "kernels", "loadout")
SERVICES = ("adapter_store", "inference_svc")
LAYERS = {
    "inference_svc": """
        __main__ > app > api > debug > metrics > frontend > engine > backends | store > adapters
        > model | text > host > config > core > results | errors
    """,
    "adapter_store": """
        __main__ > app > api > debug > service > store_status | garbage_collector
        > registration | images > blobs > sources | replication > checkpoint | catalog > metrics
        > core | errors | config
    """,
}
"""A module imports only modules to its right; modules with a bar between them do not import each
other."""
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MIN_SHARED_RUN = 5
FRAGMENT = re.compile(r"(Of|It|As|Those|For people)\b")
"""The beginning of docstrings that are no sentence about their subject."""


@dataclass(frozen=True, slots=True)
class House:
    """The results of `measure`: counts, and lists of the offending modules and functions."""

    modules: int
    lines: int
    flat_files: dict[str, int]
    circles: list[str]
    upward_imports: list[str]
    shared_lines: int
    shared_by: list[str]
    fragment_docstrings: int
    long_files: list[str]
    long_functions: list[str]
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


def long_functions(path: Path) -> Iterator[str]:
    """Yields the functions that are too long. Docstrings do not count, because public functions
    have a line for each parameter."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = _num_lines(node)
            if ast.get_docstring(node, clean=False) is not None:
                num_lines -= _num_lines(node.body[0])
            if num_lines > MAX_FUNCTION_LINES:
                yield node.name


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
        fragment_docstrings=sum(len(list(_fragments(path))) for path in tree.paths.values()),
        long_files=[name for name, lines in files.items() if len(lines) > MAX_FILE_LINES],
        long_functions=[
            f"{name}.{function}"
            for name, path in tree.paths.items()
            if not is_under(name, ["kernels"])
            for function in long_functions(path)
        ],
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


def _fragments(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str) and FRAGMENT.match(text.strip()):
                yield text


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
    arguments = parser.parse_args()
    house = asdict(measure(arguments.root.resolve()))
    if arguments.json:
        print(json.dumps(house, indent=2))
        return
    for name, value in house.items():
        if name != "shared_by":
            print(f"{name:20} {len(value) if isinstance(value, list) else value}")


if __name__ == "__main__":
    main()
