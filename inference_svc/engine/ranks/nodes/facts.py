"""The facts that all nodes must agree on: settings, code, processors and the model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import contract
import inference_svc
import kernels
import servicekit
from inference_svc.backends.base import RankFactory
from inference_svc.core import EngineConfig
from inference_svc.host.device_info import RECORDING_SETTING
from inference_svc.model.checkpoint.headers import stored_tensors

_OWN = frozenset(
    {
        "model_dir",
        "memory_limit_bytes",
        "host_limit_bytes",
        "frontend_bytes",
        "tokenizer_bytes",
        "num_threads",
        "pull_workers",
        "nodes",
        # Only rank 0 decides by these, or takes this memory.
        "max_queue",
        "max_tenant_queue",
        "tenant_share",
        "fair_quantum",
        "fair_ageing_s",
        "adapter_wait_s",
        "prefetch",
        "prompt_image_bytes",
    }
)
"""Fields of `EngineConfig` in which nodes may differ."""
_FLAGS = {
    "kv_bytes": "--kv-memory",
    "arena_bytes": "--adapter-memory",
    "max_lora_rank": "--max-rank",
    "state_pages": "--state-interval-tokens",
    "num_stored_states": "--stored-states",
    "native_kernels": "native-kernels",
    "record_steps": RECORDING_SETTING,
}
_CODE = (contract, inference_svc, kernels, servicekit)
"""The packages that a rank runs."""
_SOURCES = (".py", ".cpp", ".h")
SAMPLE_BYTES = 64
"""The bytes of each tensor that are compared: two versions of a model differ almost everywhere."""


def facts_of(config: EngineConfig) -> dict[str, str]:
    """Returns the facts of this node by their names in messages, all but `computing_of`. Reads a
    little of each tensor. Raises UnsupportedModel and OSError."""
    facts = {
        _FLAGS.get(name, f"--{name.replace('_', '-')}"): str(value)
        for name, value in _fields(config)
    }
    assert config.nodes is not None
    facts["--nnodes"] = str(config.nodes.count)
    facts["the version of Loadout"] = _version("loadout")
    facts["a digest of Loadout's code"] = _code_digest()
    facts["the version of torch"] = _version("torch")
    facts["the model's config.json"] = _config_digest(config)
    facts["a digest of the model's tensors"] = _tensors_digest(config)
    return facts


def computing_of(factory: RankFactory) -> dict[str, str]:
    """Returns the fact of what a rank computes with, which asks its device."""
    return {"the code that computes": f"{factory.name} {factory.instructions}"}


def differences(own: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Returns a sentence of the facts that differ, such as "--dtype is bfloat16, and float32 on
    rank 0"; empty if all are equal."""
    names = sorted(own.keys() | others.keys())
    found = [
        f"{name} is {others.get(name, 'unknown')}, and {own.get(name, 'unknown')} on rank 0"
        for name in names
        if own.get(name) != others.get(name)
    ]
    return "; ".join(found)


def _fields(config: EngineConfig) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        if field.name not in _OWN:
            yield field.name, getattr(config, field.name)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a source tree that is not installed
        return "unknown"


def _code_digest() -> str:
    """Returns a digest of Loadout's sources: two builds may have the same version, and ranks send
    each other objects."""
    digest = hashlib.sha256()
    for package in _CODE:
        folder = Path(package.__path__[0])
        for path in sorted(folder.rglob("*")):
            if path.suffix in _SOURCES:
                name = f"{package.__name__}/{path.relative_to(folder)}"
                digest.update(f"{name}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
    return _short(digest)


def _config_digest(config: EngineConfig) -> str:
    """Returns a digest of the values, but for where they were saved."""
    values = json.loads((config.model_dir / "config.json").read_bytes())
    values.pop("_name_or_path", None)
    return _short(hashlib.sha256(json.dumps(values, sort_keys=True).encode()))


def _tensors_digest(config: EngineConfig) -> str:
    """Returns a digest of all tensors' names, shapes and types, and of some bytes of each, however
    they lie in files."""
    digest = hashlib.sha256()
    for name, tensor in sorted(stored_tensors(config.model_dir)):
        digest.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        with tensor.path.open("rb") as file:
            file.seek(tensor.start + max(0, tensor.num_bytes - SAMPLE_BYTES) // 2)
            digest.update(file.read(min(SAMPLE_BYTES, tensor.num_bytes)))
    return _short(digest)


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:16])
