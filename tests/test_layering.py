"""The architecture, as tables: who may import whom, and where a word or a library may stand.

The layers stand in tools/house.py, which measures them on any checkout.
ARCHITECTURE.md gives the reasons.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers
from transformers.utils import is_kernels_available

import kernels
from tests.support import forks
from tests.support.house import ROOT, TREE, check, syntax_trees
from tools.house import (
    LAYERS,
    PACKAGES,
    SERVICES,
    is_under,
)
from tools.syntax import nodes

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
            "inference_svc.server",
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
            "inference_svc.engine.costs",
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
    "adapter_store": "__init__ __main__ app build config core errors service store_status debug "
    "garbage_collector",
    "inference_svc": "__init__ __main__ app auto_settings config core errors debug server",
    "servicekit": "__init__ errors heap hub_client interpreter_gc pace refs shared_memory shares "
    "work_budget",
}
"""What may lie at a package's root; all else has a folder."""

READ_ENVIRONMENT = re.compile(
    r".*\.__main__|(adapter_store|inference_svc|loadout\.cli)\.config|servicekit\.settings\.(load|secrets)|loadout\.(cli|demo|benchmark)\..*"
)
CUDA_PLACES = (
    "kernels",
    "inference_svc.backends",
    "inference_svc.host",
    "inference_svc.auto_settings",
    "inference_svc.config",
    "adapter_store.images.tiers.buffers",
)


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    with syntax_trees():
        yield


def importers(*packages: str) -> Iterator[tuple[str, str]]:
    """Pairs of a module under `packages` and what it imports."""
    for name in TREE.under(*packages):
        for imported in TREE.imports(name):
            yield name, imported


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


@pytest.mark.slow
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


NAMING_FAMILIES = {
    "inference_svc.config": "operators choose the parser of answers by its family",
    "inference_svc.text.answers": "families write calls of tools in syntaxes of their own",
    "inference_svc.model.gguf": "files name their family in words of their own",
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
