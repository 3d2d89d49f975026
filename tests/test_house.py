"""The house in order: sizes, maps, what is written once, and what tests may use.

tools/house.py measures it on any checkout; tools/house.toml lists sizes above their limits.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.house import ROOT, TREE, check, syntax_trees
from tools.house import (
    LIMITS,
    PACKAGES,
    SERVICES,
    UNIFORM,
    Sizes,
    is_under,
    num_files,
    num_fragments,
    read_table,
    shared_runs,
    shrunk,
    too_large,
)
from tools.syntax import nodes, parsed


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    with syntax_trees():
        yield


@pytest.fixture(scope="module")
def large() -> Sizes:
    return too_large(ROOT)


@pytest.mark.parametrize("kind", LIMITS)
def test_sizes_stay_within_their_limits(kind: str, large: Sizes) -> None:
    """Sizes above a limit stand in tools/house.toml, and shrink."""
    table = read_table(ROOT)[kind]
    check(
        f"{kind} above {LIMITS[kind]}",
        (f"{name}: {size}" for name, size in large[kind].items() if size > table.get(name, 0)),
    )


def test_the_table_of_sizes_shrinks(large: Sizes) -> None:
    """What is within its limit leaves the table, and the numbers of files, methods and calls fall
    with it; lines of files and functions may rise again to their number in the table."""
    table = read_table(ROOT)
    now = shrunk(table, large)
    exact = ("folders", "classes", "star_tuples")
    check(
        "`python -m tools.house --shrink` removes or lowers",
        (
            f"{kind}: {name}"
            for kind, sizes in table.items()
            for name, size in sizes.items()
            if name not in now[kind] or (kind in exact and size > now[kind][name])
        ),
    )


def test_tables_name_folders_that_exist() -> None:
    check("uniform folders", UNIFORM.keys() - num_files(ROOT).keys())


def test_sizes_are_measured(tmp_path: Path) -> None:
    """Lines of functions without docstrings, methods, files, and calls that unpack a tuple."""
    folder = tmp_path / "bench"
    folder.mkdir()
    for number in range(LIMITS["folders"]):
        (folder / f"small_{number}.py").write_text("")
    assert not any(too_large(tmp_path).values())
    lines = ["f(*(a, b), *[c])", "f(*a, *(b for b in c))", "class A:", "    def long(self):"]
    lines += ['        """One.', "", '        Two."""', *["        x = 1"] * LIMITS["functions"]]
    lines += [f"    def f{number}(self): ..." for number in range(LIMITS["classes"])]
    lines += [""] * LIMITS["files"]
    large = folder / "large.py"
    large.write_text("\n".join(lines))
    assert too_large(tmp_path) == {
        "folders": {"bench": LIMITS["folders"] + 1},
        "files": {"bench/large.py": len(large.read_text().splitlines())},
        "classes": {"bench.large.A": LIMITS["classes"] + 1},
        "functions": {"bench.large.A.long": LIMITS["functions"] + 1},
        "star_tuples": {"bench/large.py": 1},
    }


MAPPED = {
    **TREE.paths,
    **{
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for name in ("bench", "tools")
        for path in sorted((ROOT / name).rglob("*.py"))
    },
}


@pytest.mark.parametrize("package", [*PACKAGES, "bench", "tools"])
def test_packages_map_their_modules(package: str) -> None:
    """Each `__init__` has a line for each module, `name  what it is`, so that readers find it."""

    def found() -> Iterator[str]:
        for name in [name for name in MAPPED if is_under(name, [package])]:
            path = MAPPED[name]
            if path.name != "__init__.py" or re.search(r"\.(versions|v1)$", name):
                continue  # revisions are numbered, and stubs generated
            if name == "inference_svc.model.architectures":
                continue  # a family is one module, and docs/models.md, which is generated, a map
            text = ast.get_docstring(parsed(path)) or ""
            mapped = set(re.findall(r"^(\w+)(?: {2,}|$)", text, re.MULTILINE))
            inner = {each for each in MAPPED if is_under(each, [name])} - {name}
            modules = {each.removeprefix(name + ".").split(".")[0] for each in inner}
            if not is_under(name, PACKAGES):
                modules -= {"__main__"}  # the commands in it are in the package's first words
                mapped -= {"__main__"}
            yield from (f"{name}: {each} is not mapped" for each in modules - mapped)
            yield from (f"{name}: {each} is no module" for each in mapped - modules)

    check(f"maps of {package}", found())


TESTS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "tests").rglob("*.py"))
}
"""Modules of the tests, those of packages with their `__init__`."""
MAX_SUPPORT_FILES = 15


def test_tests_import_no_other_tests() -> None:
    """A helper of several modules stands in tests.support: who changes a test, or a fixture, then
    sees all that depends on it."""

    def found() -> Iterator[str]:
        for name, path in TESTS.items():
            for node in nodes(path):
                imported = set()
                if isinstance(node, ast.Import):
                    imported = {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    # Where `from tests.a import test_b` imports a module, and not a name of one.
                    inner = {f"{node.module}.{alias.name}" for alias in node.names}
                    imported = {node.module or "", *(inner & TESTS.keys())}
                for each in imported:
                    last = each.rpartition(".")[2]
                    if each.startswith("tests.") and (last == "conftest" or last[:5] == "test_"):
                        yield f"{name} -> {each}"

    check("imports of tests", found())


MAX_PRIVATE_USES = 84
"""Lower it when there are fewer."""
OTHERS_NAMES = {"_replace", "_fields", "_asdict", "_request_id"}
"""Of named tuples and of OpenAI's client, whose callers may use them."""


def test_tests_use_what_is_public() -> None:
    """Private names of the packages, used of other objects than `self`, do not become more: such a
    test hinders a change that no caller would notice."""
    own = {
        node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else node.attr
        for path in TREE.under(*PACKAGES).values()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    }

    def is_private_use(node: ast.AST) -> bool:
        if not isinstance(node, ast.Attribute) or not re.match("_[^_]", node.attr):
            return False
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return node.attr in own - OTHERS_NAMES and not is_own

    uses = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in TESTS.values()
        for node in nodes(path)
        if is_private_use(node)
    ]
    assert len(uses) <= MAX_PRIVATE_USES, "\n".join(uses)


def test_support_is_mapped() -> None:
    """Each `__init__` in tests/support has a line for each module of its folder, and a folder has
    few enough of them to be read."""

    def found() -> Iterator[str]:
        for folder in {path.parent for path in (ROOT / "tests" / "support").rglob("*.py")}:
            name, files = folder.relative_to(ROOT), set(folder.glob("*.py"))
            text = ast.get_docstring(parsed(folder / "__init__.py")) or ""
            mapped = set(re.findall(r"^(\w+) {2,}", text, re.MULTILINE))
            shelves = {path.parent.name for path in folder.glob("*/__init__.py")}
            modules = {path.stem for path in files} - {"__init__"} | shelves
            yield from (f"{name}: {each} is not mapped" for each in modules - mapped)
            yield from (f"{name}: {each} is no module" for each in mapped - modules)
            if len(files) > MAX_SUPPORT_FILES:
                yield f"{name}: {len(files)} files"

    check("maps of tests/support", found())


SMALL_ON_PURPOSE = {
    **{
        f"inference_svc.text.answers.{name}": "a syntax is one module"
        for name in ("command_r", "granite", "hermes", "llama3", "mistral", "phi")
    },
    "adapter_store.catalog.expiry": "the part of the catalog that the collector holds",
    "adapter_store.catalog.layout_usage": "has a thread of its own; its neighbours are queries",
    "adapter_store.registration.rate_limit": "one algorithm, with tests of its own",
    "adapter_store.replication.pin_refresh": "reacts to changes that other replicas make",
    "adapter_store.service.watching": "a use case, as its neighbours",
    "inference_svc.api.life_cycle": "use cases, as its neighbours",
    "inference_svc.frontend.watchdog": "only checks that the engine still answers",
    "inference_svc.model.mixers.in_torch": "mixers; transformer has all other operations",
    "inference_svc.model.sharding.norms": "of ranks alone; the walk has all other operations",
    "inference_svc.metrics.store": "metrics of the store's client; metrics.engine has the engine's",
}
"""Modules of less than 60 lines that one module imports, and why they are not merged into it."""


def test_small_modules_are_merged_into_their_only_importer() -> None:
    used_by: dict[str, set[str]] = {}
    for name in TREE.paths:
        for imported in TREE.imports(name):
            used_by.setdefault(imported, set()).add(name)
    small = {
        name
        for name, path in TREE.under(*SERVICES, "servicekit").items()
        if not path.stem.startswith("__")
        and len(path.read_text().splitlines()) < 60
        and len(used_by.get(name, ())) == 1
    }
    check("small modules", small ^ SMALL_ON_PURPOSE.keys())


def test_services_do_not_repeat_each_other() -> None:
    """No two of their modules share 15 lines in a row; what they share is servicekit's."""
    pairs = shared_runs(TREE, min_run=15)
    check("shared lines", (f"{one} ~ {other}" for one, other in pairs))


def test_what_can_be_counted() -> None:
    """Docstrings begin with a verb or name their subject; a README is read in one go."""
    assert num_fragments(TREE) < 20
    assert sum(shared_runs(TREE).values()) <= 60
    readme = (ROOT / "README.md").read_text().splitlines()
    assert len(readme) <= 150
    assert max(map(len, readme)) <= 120
