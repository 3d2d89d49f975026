"""The architecture, as tables: who may import whom, and where a word or a library may stand.

ARCHITECTURE.md gives the reasons. `PENDING` lists what is still to be mended: it only ever shrinks.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("servicekit", "adapter_store", "inference_svc", "kernels", "loadout")
SERVICES = ("adapter_store", "inference_svc")
STUBS = re.compile(r"loadout\.\w+\.v1(\.|$)")

LAYERS = {
    "inference_svc": """
        __main__ > app > api > debug > metrics > frontend > engine > backends | store > adapters
        > model | text > host > core | errors | config
    """,
    "adapter_store": """
        __main__ > app > api > debug > service > store_status | garbage_collector
        > registration | images > blobs > sources | replication > checkpoint | catalog > metrics
        > core | errors | config
    """,
}
"""A module imports only what stands right of it; those with a bar between them not each other."""

MAY_IMPORT = {
    "servicekit": {"servicekit", "stubs"},
    "adapter_store": {"adapter_store", "servicekit", "stubs"},
    "inference_svc": {"inference_svc", "servicekit", "kernels", "stubs"},
    "kernels": {"kernels"},
    "loadout": {"loadout", "stubs"},
}


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
            "adapter_store.images",
            "adapter_store.checkpoint",
            "inference_svc.adapters",
            "inference_svc.backends",
            "inference_svc.host",
            "inference_svc.model",
            "inference_svc.engine.build",
            "inference_svc.engine.memory_budget",
            "inference_svc.engine.penalties",
            "inference_svc.engine.process_main",
            "inference_svc.engine.profiler",
            "inference_svc.engine.runner",
            "inference_svc.engine.sampler",
            "inference_svc.app",
            "inference_svc.__main__",
        ),
    ),
)

FLAT = {
    "adapter_store": "__init__ __main__ app config core errors service store_status debug "
    "garbage_collector",
    "inference_svc": "__init__ __main__ app config core errors debug",
    "servicekit": "__init__ errors settings refs",
}
"""What may lie at a package's root; all else has a folder."""

READ_ENVIRONMENT = re.compile(
    r"(.*\.)?(__main__|config)|servicekit\.settings|loadout\.(cli|demo|benchmark)\..*"
)
CUDA_PLACES = (
    "kernels",
    "inference_svc.backends",
    "inference_svc.host",
    "inference_svc.config",
    "inference_svc.adapters.arena",
    "adapter_store.images.buffers",
)

PENDING: dict[str, set[str]] = {
    "circles in adapter_store": {"adapter_store.otlp", "adapter_store.tracing"},
    "circles in inference_svc": {"inference_svc.otlp", "inference_svc.tracing"},
    "circles in servicekit": {"servicekit.telemetry.otlp", "servicekit.telemetry.tracing"},
    "layers of inference_svc": {
        "inference_svc.adapters.load_metrics -> inference_svc.engine.status_types",
        "inference_svc.backends.select -> inference_svc.engine.config",
        "inference_svc.store.recipe -> inference_svc.engine.process_main",
    },
    "library grpc": {"adapter_store.server", "inference_svc.server"},
    "library opentelemetry": {"adapter_store.otlp", "inference_svc.otlp"},
    "library torch": {
        "adapter_store.debug.info",
        "adapter_store.debug",
        "adapter_store.server",
        "inference_svc.debug.info",
        "inference_svc.debug",
        "inference_svc.engine.trace_file",
    },
    "flat files of adapter_store": {
        "access",
        "audit",
        "gate",
        "log",
        "log_writer",
        "otlp",
        "policy",
        "refs",
        "reload",
        "scrub",
        "server",
        "sharing",
        "spans",
        "tls",
        "tracing",
    },
    "flat files of inference_svc": {
        "access",
        "audit",
        "gate",
        "histogram",
        "log",
        "log_writer",
        "metrics_server",
        "otlp",
        "policy",
        "refs",
        "reload",
        "scrub",
        "server",
        "spans",
        "tls",
        "tracing",
    },
    "cuda": {
        "adapter_store.debug.info",
        "adapter_store.debug",
        "inference_svc.app",
        "inference_svc.debug.info",
        "inference_svc.debug",
        "inference_svc.engine.build",
        "inference_svc.engine.config",
        "inference_svc.engine.memory_budget",
        "inference_svc.engine.profiler",
        "inference_svc.engine.sampler",
        "inference_svc.metrics.definitions",
        "inference_svc.model.decoder",
    },
}
"""Violations by rule, "importer -> imported" or a module's name, that are being mended."""


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name, generated stubs left out."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if "_pb2" not in path.stem:
                found[name.removesuffix(".__init__")] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module named by an import, also inside functions and for type checking."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level or None]
            base = ".".join((*package, *filter(None, [node.module]))) if node.level else node.module
            assert base is not None
            known = [f"{base}.{alias.name}" for alias in node.names]
            submodules = [each for each in known if each in modules() or "_pb2" in each]
            names.update(submodules)
            if len(submodules) < len(node.names):
                names.add(base)
    return frozenset(names)


def imports_at_start(path: Path) -> set[str]:
    """The part of `imports` that importing the module runs."""
    later: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.If):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import):
                    later.update(alias.name for alias in inner.names)
                elif isinstance(inner, ast.ImportFrom) and inner.module:
                    later.add(inner.module)
    return {each for each in imports(path) if each not in later}


def is_under(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def importers(*packages: str) -> Iterator[tuple[str, str]]:
    """Pairs of a module under `packages` and what it imports."""
    for name, path in modules().items():
        if is_under(name, packages):
            for imported in imports(path):
                yield name, imported


def check(rule: str, found: Iterable[str]) -> None:
    violations = set(found) - PENDING.get(rule, set())
    assert not violations, f"{rule}: {sorted(violations)}"


def test_packages_import_only_what_they_may() -> None:
    def kind(imported: str) -> str | None:
        if STUBS.match(imported):
            return "stubs"
        return next((each for each in PACKAGES if is_under(imported, [each])), None)

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
    levels = [level.split(" | ") for level in " ".join(LAYERS[service].split()).split(" > ")]
    rank = {part: number for number, level in enumerate(levels) for part in level}

    def found() -> Iterator[str]:
        for name, imported in importers(service):
            if name == service or not is_under(imported, [service]) or imported == service:
                continue
            above, below = name.split(".")[1], imported.split(".")[1]
            is_placed = above in rank and below in rank  # else it lies flat: a rule of its own
            if is_placed and above != below and rank[above] >= rank[below]:
                yield f"{name} -> {imported}"

    check(f"layers of {service}", found())


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circles(package: str) -> None:
    """Modules that import each other, at start or in functions, are one module."""
    graph = {
        name: {each for each in imports(path) if each in modules() and each != name}
        for name, path in modules().items()
        if is_under(name, [package])
    }

    def circles() -> Iterator[str]:
        for name in graph:
            seen: set[str] = set()
            todo = list(graph[name])
            while todo:
                each = todo.pop()
                if each == name:
                    yield name
                    break
                if each in graph and each not in seen:
                    seen.add(each)
                    todo += graph[each]

    check(f"circles in {package}", circles())


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
        for name, path in modules().items():
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    used = f"{node.value.id}.{node.attr}"
                    reads = used in {"os.environ", "os.getenv", "sys.argv"}
                    if reads and not READ_ENVIRONMENT.fullmatch(name):
                        yield name

    check("environment", found())


def test_cuda_is_named_in_few_places() -> None:
    word = re.compile(r"cuda", re.IGNORECASE)

    def found() -> Iterator[str]:
        for name, path in modules().items():
            if is_under(name, SERVICES) and not is_under(name, CUDA_PLACES):
                code = ast.unparse(without_docstrings(path))
                if word.search(code):
                    yield name

    check("cuda", found())


def without_docstrings(path: Path) -> ast.Module:
    copy = ast.parse(path.read_text())
    for node in ast.walk(copy):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not is_text(each)] or [ast.Pass()]  # type: ignore[attr-defined]
    return copy


def is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def test_opentelemetry_is_loaded_on_demand() -> None:
    """Where no traces are wanted its packages need not be installed."""
    for name, path in modules().items():
        wanted = imports_at_start(path)
        assert not any(each.endswith(".otlp") for each in wanted), f"{name} imports it at start"
        if not name.endswith(".otlp"):
            assert not any(is_under(each, ["opentelemetry"]) for each in wanted), name


def run(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_computing_runs_without_grpc() -> None:
    """In a process in which importing grpc fails."""
    parts = ["kernels", "servicekit.telemetry"]
    parts += [f"inference_svc.{each}" for each in ("engine", "backends", "adapters", "model")]
    parts += ["inference_svc.api.http", "inference_svc.text", "inference_svc.host"]
    wanted = [name for name in modules() if is_under(name, parts) and "triton" not in name]
    run(
        f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("grpc", "grpc_health", "grpc_status", "google"):
            raise ImportError("no " + name + " here")
sys.meta_path.insert(0, Refuse())
for name in {sorted(wanted)!r}:
    importlib.import_module(name)
"""
    )


def test_kernels_does_not_disturb_transformers() -> None:
    """`transformers` probes for a package of the name `kernels`; ours must not be taken for it."""
    run(
        """
import transformers
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.utils import is_kernels_available
import kernels
assert not is_kernels_available()
assert not hasattr(kernels, "__version__")
"""
    )


def test_files_and_functions_stay_short() -> None:
    """Functions of at most 60 lines outside kernels; files of at most 600."""

    def found() -> Iterator[str]:
        for name, path in modules().items():
            if len(path.read_text().splitlines()) > 600:
                yield name
            if is_under(name, ["kernels"]):
                continue
            for node in ast.walk(tree(path)):
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                if is_function and (node.end_lineno or 0) - node.lineno + 1 > 60:
                    yield f"{name}.{node.name}"

    check("lengths", found())
