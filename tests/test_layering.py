"""The architecture, as tables: who may import whom, and where a word or a library may stand.

The layers stand in tools/house.py, which measures them on any checkout.
ARCHITECTURE.md gives the reasons.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers
from transformers.utils import is_kernels_available

import kernels
from tests.support import forks
from tools.house import (
    LAYERS,
    LIMITS,
    PACKAGES,
    SERVICES,
    UNIFORM,
    Sizes,
    Tree,
    is_under,
    measure,
    num_files,
    read_table,
    shared_runs,
    shrunk,
    too_large,
)
from tools.syntax import nodes, parsed

ROOT = Path(__file__).parent.parent
STUBS = re.compile(r"loadout\.\w+\.v1(\.|$)")

MAY_IMPORT = {
    "contract": {"contract", "stubs"},
    "servicekit": {"servicekit", "contract", "stubs"},
    "adapter_store": {"adapter_store", "servicekit", "contract", "stubs"},
    "inference_svc": {"inference_svc", "servicekit", "kernels", "contract", "stubs"},
    "kernels": {"kernels"},
    "loadout": {"loadout", "contract", "stubs"},
}


NEVER = ("tests", "tools", "bench", "fuzz", "deploy", "examples")
"""What packages never import: it is not installed with them."""


class Confined(NamedTuple):
    """Libraries that only these modules import; a `*` stands for any one name."""

    name: str
    libraries: str
    modules: tuple[str, ...]


CONFINED = (
    Confined(
        "grpc",
        r"grpc|grpc_\w+|google\.(rpc|protobuf)|.*_pb2(_grpc)?",
        (
            "contract.protobuf",
            "servicekit.rpc",
            "adapter_store.api",
            "adapter_store.app",
            "inference_svc.api.grpc",
            "inference_svc.store",
            "inference_svc.app",
            "loadout",
        ),
    ),
    Confined("starlette", r"starlette|fastapi|uvicorn", ("inference_svc.api.http",)),
    Confined("triton", r"triton", ("kernels",)),
    Confined("opentelemetry", r"opentelemetry", ("servicekit.telemetry.otlp", "loadout")),
    Confined(
        "torch",
        r"torch",
        (
            "kernels",
            "loadout.demo",
            "loadout.verify",
            "adapter_store.images",
            "adapter_store.checkpoint",
            "inference_svc.adapters",
            "inference_svc.backends",
            "inference_svc.host",
            "inference_svc.model",
            "inference_svc.engine.build",
            "inference_svc.engine.compute.penalties",
            "inference_svc.engine.compute.profiler",
            "inference_svc.engine.compute.runner",
            "inference_svc.engine.compute.sampler",
            "inference_svc.engine.compute.scorer",
            "inference_svc.app",
            "inference_svc.__main__",
        ),
    ),
)

FLAT = {
    "contract": "__init__ adapter_files base_model_names folders protobuf side_files tensor_names "
    "tokenizer_extract words",
    "kernels": "__init__ dispatch host_memory streams triton_launchers",
    "loadout": "__init__ aio client errors prometheus retry security signing types upload",
    "adapter_store": "__init__ __main__ app config core errors service store store_status debug "
    "garbage_collector",
    "inference_svc": "__init__ __main__ app config core errors debug",
    "servicekit": "__init__ errors heap hub_client interpreter_gc refs shares work_budget",
}
"""What may lie at a package's root; all else has a folder."""

READ_ENVIRONMENT = re.compile(
    r".*\.__main__|(adapter_store|inference_svc|loadout\.cli)\.config|servicekit\.settings\.(load|secrets)|loadout\.(cli|demo|benchmark)\..*"
)
CUDA_PLACES = (
    "kernels",
    "inference_svc.backends",
    "inference_svc.host",
    "inference_svc.config",
    "adapter_store.images.tiers.buffers",
)

TREE = Tree(ROOT)


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Syntax trees are forgotten at the end: the collector would look at their million objects.
    While they are made, it takes most of the time."""
    gc.disable()
    yield
    gc.enable()
    parsed.cache_clear()
    nodes.cache_clear()


def importers(*packages: str) -> Iterator[tuple[str, str]]:
    """Pairs of a module under `packages` and what it imports."""
    for name in TREE.under(*packages):
        for imported in TREE.imports(name):
            yield name, imported


def check(rule: str, found: Iterable[str]) -> None:
    """Fails with every violation of a rule that was found."""
    violations = sorted(set(found))
    assert not violations, f"{rule}: {violations}"


def test_packages_import_only_what_they_may() -> None:
    def kind(imported: str) -> str | None:
        if STUBS.match(imported):
            return "stubs"
        return next((each for each in (*PACKAGES, *NEVER) if is_under(imported, [each])), None)

    check(
        "packages",
        (
            f"{name} -> {imported}"
            for name, imported in importers(*PACKAGES)
            if kind(imported) not in {None, *MAY_IMPORT[name.split(".")[0]]}
        ),
    )


@pytest.mark.parametrize("service", SERVICES)
def test_layers_import_downwards(service: str) -> None:
    check(f"layers of {service}", TREE.upward_imports(service))


@pytest.mark.parametrize("service", SERVICES)
def test_every_folder_has_a_layer(service: str) -> None:
    layers = set(re.findall(r"\w+", LAYERS[service]))
    parts = {name.split(".")[1] for name in TREE.under(service) if "." in name}
    check(f"layers of {service}", layers ^ parts)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circles(package: str) -> None:
    """Modules that import each other, at start or in functions, are one module."""
    check(f"circles in {package}", TREE.circles(package))


@pytest.mark.parametrize("rule", CONFINED, ids=lambda rule: rule.name)
def test_libraries_stay_where_they_belong(rule: Confined) -> None:
    pattern = re.compile(rf"({rule.libraries})(\.|$)")
    check(
        f"library {rule.name}",
        {
            name
            for name, imported in importers(*PACKAGES)
            if pattern.match(imported) and not is_under(name, rule.modules)
        },
    )


@pytest.mark.parametrize("package", sorted(FLAT))
def test_only_the_named_files_lie_flat(package: str) -> None:
    flat = {path.stem for path in (ROOT / package).glob("*.py") if "_pb2" not in path.stem}
    check(f"flat files of {package}", flat - set(FLAT[package].split()))


def test_environment_and_arguments_are_read_in_settings_only() -> None:
    def found() -> Iterator[str]:
        for name, path in TREE.paths.items():
            for node in nodes(path):
                used = set()
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    used = {f"{node.value.id}.{node.attr}"}
                elif isinstance(node, ast.ImportFrom):
                    used = {f"{node.module}.{alias.name}" for alias in node.names}
                reads = {"os.environ", "os.environb", "os.getenv", "sys.argv"} & used
                if reads and not READ_ENVIRONMENT.fullmatch(name):
                    yield name

    check("environment", found())


def test_devices_are_told_apart_in_few_places() -> None:
    word = re.compile(r"cuda|\.is_cpu\b", re.IGNORECASE)

    def found() -> Iterator[str]:
        for name, path in TREE.paths.items():
            if is_under(name, CUDA_PLACES) or not is_under(name, SERVICES):
                continue
            # Few files have the word even in a comment.
            if word.search(path.read_text()) and word.search(code_of(path)):
                yield name

    check("cuda", found())


def test_backends_own_their_memory() -> None:
    """Nothing outside them holds or calls the arena, or has the host tier's bytes."""

    def found() -> Iterator[str]:
        for name, path in TREE.under("inference_svc").items():
            if is_under(name, ["inference_svc.backends"]):
                continue
            if "inference_svc.backends.arena" in TREE.imports(name):
                yield f"{name} imports it"
            used = (node.attr for node in nodes(path) if isinstance(node, ast.Attribute))
            yield from (f"{name} uses .{each}" for each in used if each in ("arena", "slab"))

    check("the arena", found())


HALL = {
    "residency": "Residency",
    "loader": "Loader",
    "memory.tiers": "MemoryTiers",
    "load_states": "Loads",
    "memory.placement": "Placement",
}
"""The parts of residency, by module of `inference_svc.adapters`."""


def test_parts_of_residency_repeat_no_method() -> None:
    """Callers reach the part that does a thing; no other one passes the call on."""
    owners: dict[str, list[str]] = {}
    for module, name in HALL.items():
        classes = {
            node.name: node
            for node in nodes(TREE.paths[f"inference_svc.adapters.{module}"])
            if isinstance(node, ast.ClassDef)
        }
        for method in classes[name].body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                owners.setdefault(method.name, []).append(name)
    del owners["check_integrity"]
    check(
        "methods of residency",
        (f"{method} of {found}" for method, found in owners.items() if len(found) > 1),
    )


def code_of(path: Path) -> str:
    """The text of a module without docstrings and comments."""
    copy = ast.parse(path.read_text())
    for node in ast.walk(copy):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not is_text(each)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(copy)


def is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def imports_at_start(name: str) -> set[str]:
    """The part of a module's imports that importing it runs."""
    later: set[str] = set()
    for node in nodes(TREE.paths[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.If):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import):
                    later.update(alias.name for alias in inner.names)
                elif isinstance(inner, ast.ImportFrom) and inner.module:
                    later.add(inner.module)
    return TREE.imports(name) - later


def test_opentelemetry_is_loaded_on_demand() -> None:
    """Where no traces are wanted its packages need not be installed."""
    for name in TREE.paths:
        wanted = imports_at_start(name)
        assert not any(each.endswith(".otlp") for each in wanted), f"{name} imports it at start"
        if not name.endswith(".otlp"):
            assert not any(is_under(each, ["opentelemetry"]) for each in wanted), name


WITHOUT_GRPC = """
import importlib, sys
REFUSED = {"grpc", "grpc_health", "grpc_status", "google"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED:
            raise ImportError("no " + name + " here")
for name in list(sys.modules):
    if name.split(".")[0] in REFUSED | {"inference_svc", "kernels", "servicekit", "loadout"}:
        del sys.modules[name]
sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.processes
def test_computing_runs_without_grpc(tmp_path: Path) -> None:
    """In a process in which importing grpc fails, and which has forgotten all that may use it."""
    parts = ["kernels", "servicekit.telemetry"]
    parts += [f"inference_svc.{each}" for each in ("engine", "backends", "adapters", "model")]
    parts += ["inference_svc.api.http", "inference_svc.text", "inference_svc.host"]
    optional = re.compile(r".*triton.*|servicekit\.telemetry\.otlp")
    wanted = [name for name in TREE.paths if is_under(name, parts) and not optional.fullmatch(name)]
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_GRPC)
    done = forks.run(str(program), *sorted(wanted))
    assert done.returncode == 0, done.stderr
    refused = forks.run(str(program), "inference_svc.app")
    assert "ImportError: no google here" in refused.stderr


def test_kernels_does_not_disturb_transformers() -> None:
    """`transformers` probes for a package of the name `kernels`; ours must not be taken for it."""
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        assert getattr(transformers, f"{family}ForCausalLM")
    assert not is_kernels_available()
    assert not hasattr(kernels, "__version__")


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


NAMING_FAMILIES = {
    "inference_svc.model.rope": "kinds of rotation are called by who made them",
}
"""Modules that may name families, and why."""


def test_families_of_models_are_known_by_their_descriptions_alone() -> None:
    """Neither an architecture's name nor a family's stands outside the modules that describe them,
    but in prose, as where something is from."""
    modules = {path.stem for path in TREE.under("inference_svc.model.architectures").values()}
    families = "|".join(modules - {"__init__", "whole"})
    # Of code: names of architectures anywhere, and those of families in quotes or as identifiers.
    pattern = re.compile(
        r"\w+For(?:CausalLM|ConditionalGeneration)\b"
        rf"|[\"'](?:{families})[a-z0-9_]*[\"']|\b(?:is|for|has)_(?:{families})\w*"
    )

    def found() -> Iterator[str]:
        for name, path in TREE.under("inference_svc", "kernels", "tools", "servicekit").items():
            if not is_under(name, [*NAMING_FAMILIES, "inference_svc.model.architectures"]):
                yield from (f"{name}: {each}" for each in pattern.findall(path.read_text()))

    check("names of families", found())


SMALL_ON_PURPOSE = {
    "adapter_store.catalog.expiry": "the part of the catalog that the collector holds",
    "adapter_store.catalog.layout_usage": "has a thread of its own; its neighbours are queries",
    "adapter_store.registration.rate_limit": "one algorithm, with tests of its own",
    "adapter_store.replication.pin_refresh": "reacts to changes that other replicas make",
    "adapter_store.service.reading": "a use case, as its neighbours",
    "adapter_store.service.watching": "a use case, as its neighbours",
    "inference_svc.api.grpc.bounds": "a table, which is to be found",
    "inference_svc.engine.policy.expiries": "one data structure, with tests of its own",
    "inference_svc.frontend.watchdog": "only checks that the engine still answers",
    "inference_svc.metrics.store": "metrics of the store's client; metrics.engine has the engine's",
    "inference_svc.text.stop": "one algorithm, with tests of its own",
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
    house = measure(ROOT)
    assert house.fragment_docstrings < 20
    assert house.shared_lines <= 60
    assert house.readme_lines <= 150
    assert house.readme_longest_line <= 120
