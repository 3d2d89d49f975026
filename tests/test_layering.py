"""The architecture, one assertion per rule."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("loadout", "adapter_store", "inference_svc", "kernels")
TRANSPORT = {"server", "servicer", "convert", "status"}
TRANSPORT |= {"store_client", "store_channels", "store_convert"}  # the client of the other service
HTTP = ("starlette", "fastapi", "uvicorn")
GRPC = re.compile(r"^(grpc|grpc_\w+|google\.(rpc|protobuf))(\.|$)|_pb2(_grpc)?$")


@cache
def modules() -> dict[str, Path]:
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


def imports(path: Path) -> set[str]:
    """Every module named by an import, also inside functions; TYPE_CHECKING imports too."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level or None]
            base = ".".join((*package, *filter(None, [node.module]))) if node.level else node.module
            assert base is not None
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def imports_at_start(path: Path) -> set[str]:
    """Of `imports`, those that importing the module runs."""
    inner = [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.If)
    ]
    later = {id(each) for node in inner for each in ast.walk(node)}
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if id(node) in later:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def starts(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def test_services_share_only_the_stubs() -> None:
    for name, path in modules().items():
        service = name.split(".")[0]
        others = {"inference_svc": "adapter_store", "adapter_store": "inference_svc"}
        for imported in imports(path):
            if service in others:
                assert not starts(imported, others[service]), f"{name} imports {imported}"
                if starts(imported, "loadout"):
                    assert re.match(r"loadout\.\w+\.v1", imported), f"{name} imports {imported}"
            if service == "kernels":
                assert not starts(imported, "loadout", *others), f"{name} imports {imported}"
            if service == "loadout":
                assert not starts(imported, *others), f"{name} imports {imported}"


def test_words_import_nothing_of_ours() -> None:
    for name, path in modules().items():
        if re.fullmatch(r"(inference_svc|adapter_store)\.(core|errors|config)", name):
            ours = [imported for imported in imports(path) if starts(imported, *PACKAGES)]
            assert not ours, f"{name} imports {ours}"


def test_grpc_stops_at_the_transport() -> None:
    for name, path in modules().items():
        if starts(name, "loadout") or name.split(".")[-1] in TRANSPORT:
            continue
        found = [imported for imported in imports(path) if GRPC.search(imported)]
        assert not found, f"{name} imports {found}"


def test_http_stays_in_its_package_and_knows_no_grpc() -> None:
    """However its modules are named."""
    for name, path in modules().items():
        is_front = starts(name, "inference_svc.api.http")
        for imported in imports(path):
            assert is_front or not starts(imported, *HTTP), f"{name} imports {imported}"
            assert not is_front or not GRPC.search(imported), f"{name} imports {imported}"


def test_opentelemetry_is_loaded_where_traces_are_sent() -> None:
    """By two modules, which nothing loads as it is imported; and by the client, on demand."""
    for name, path in modules().items():
        is_sender = re.fullmatch(r"(inference_svc|adapter_store)\.otlp", name)
        wanted = imports_at_start(path)
        if not is_sender:
            found = {each for each in wanted if starts(each, "opentelemetry")}
            assert not found, f"{name} imports {found}"
        assert not any(each.endswith(".otlp") for each in wanted), f"{name} imports it at start"
        if name != "loadout.tracing" and not is_sender:
            typed = {"loadout.client", "loadout.aio"}
            found = {each for each in imports(path) if starts(each, "opentelemetry")}
            assert not found or name in typed, f"{name} imports {found}"


def test_triton_lives_under_kernels_and_policy_has_no_tensors() -> None:
    for name, path in modules().items():
        for imported in imports(path):
            if not starts(name, "kernels"):
                assert not starts(imported, "triton"), f"{name} imports {imported}"
            if name.split(".")[-1] in {"core", "config", "scheduler", "pages"}:
                assert not starts(imported, "torch"), f"{name} imports {imported}"


def test_environment_and_arguments_are_read_in_config_and_main_only() -> None:
    for name, path in modules().items():
        if name.split(".")[-1] in {"config", "__main__"}:
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = f"{node.value.id}.{node.attr}"
                assert used not in {"os.environ", "os.getenv", "sys.argv"}, f"{name} reads {used}"


def test_core_of_inference_runs_without_grpc() -> None:
    """And so does its HTTP front. In a process in which importing grpc fails."""
    wanted = [name for name in modules() if starts(name, "kernels")]
    for package in ("engine", "adapters", "model", "http"):
        wanted += [name for name in modules() if starts(name, f"inference_svc.{package}")]
    wanted = [name for name in wanted if "triton" not in name]
    script = f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("grpc", "grpc_health", "grpc_status", "google"):
            raise ImportError("no " + name + " here")
sys.meta_path.insert(0, Refuse())
for name in {sorted(wanted)!r}:
    importlib.import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_kernels_does_not_disturb_transformers() -> None:
    """`transformers` probes for a package of the name `kernels`; ours must not be taken for it."""
    script = """
import transformers
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.utils import is_kernels_available
import kernels
assert not is_kernels_available()
assert not hasattr(kernels, "__version__")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_functions_and_files_stay_short() -> None:
    """Functions over 60 lines only in kernels; no file over 400 lines."""
    for name, path in modules().items():
        assert len(path.read_text().splitlines()) <= 400, f"{name} is over 400 lines"
        if starts(name, "kernels"):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{name}.{node.name} has {length} lines"
