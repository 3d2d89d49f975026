"""A tiny base model's layout, and a builder of PEFT adapters for it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import botocore.loaders
import botocore.session
import pytest
import torch
from hypothesis import settings
from safetensors.torch import save_file

from adapter_store.catalog import follower
from adapter_store.catalog.catalog import Catalog
from adapter_store.core import DataType, Layout, Target, TargetKind
from loadout.demo.process import Process
from tests.support.postgres import PostgresServer

# A busy machine is not a failure.
settings.register_profile("adapter_store", deadline=None)
settings.load_profile("adapter_store")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real server, for all tests of a session that ask for it. Catalogs over it close quickly."""
    with PostgresServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower, "STOP_SECONDS", 0.02)
        yield server


@pytest.fixture(scope="session")
def migrated_dsn(postgres: PostgresServer) -> str:
    """The database of an empty catalog, to be copied: migrations take longer than most tests."""
    dsn = postgres.create_database()
    Catalog(dsn, event_retention=1).close()
    return dsn


@pytest.fixture
def catalog_dsn(postgres: PostgresServer, migrated_dsn: str) -> Iterator[str]:
    """An empty catalog's database for one test."""
    dsn = postgres.create_database(copy_of=migrated_dsn)
    yield dsn
    postgres.drop_database(dsn)


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an empty catalog, to be copied."""
    path = tmp_path_factory.mktemp("catalog") / "catalog.sqlite3"
    Catalog(path, event_retention=1).close()
    return path


@pytest.fixture
def catalog_file(migrated_file: Path, tmp_path: Path) -> Path:
    """An empty catalog's file for one test."""
    return Path(shutil.copyfile(migrated_file, tmp_path / "catalog.sqlite3"))


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory) -> Iterator[str]:
    """An S3 server in a process of its own."""
    folder = tmp_path_factory.mktemp("s3")
    command = [sys.executable, "-m", "loadout.demo.s3", str(folder / "ready.json")]
    process = Process("s3", command, folder, folder / "ready.json")
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Each client would read the descriptions of S3 anew, a megabyte of JSON.
            loader = botocore.loaders.create_loader()
            patch.setattr(botocore.session, "create_loader", lambda *_: loader)
            yield process.wait_ready(120)["url"]
    finally:
        process.stop(30)


BASE_MODEL = "org/tiny"
HIDDEN, KV, MLP, VOCAB, LAYERS = 16, 8, 24, 32, 2

# Last component of a module: (path in its layer, group, in, out)
MODULES = {
    "q_proj": ("self_attn.q_proj", "qkv", HIDDEN, HIDDEN),
    "k_proj": ("self_attn.k_proj", "qkv", HIDDEN, KV),
    "v_proj": ("self_attn.v_proj", "qkv", HIDDEN, KV),
    "o_proj": ("self_attn.o_proj", "o", HIDDEN, HIDDEN),
    "gate_proj": ("mlp.gate_proj", "gate_up", HIDDEN, MLP),
    "up_proj": ("mlp.up_proj", "gate_up", HIDDEN, MLP),
    "down_proj": ("mlp.down_proj", "down", MLP, HIDDEN),
}

MakeAdapter = Callable[..., Path]
MakeLayout = Callable[..., Layout]


def all_targets() -> tuple[Target, ...]:
    embedding = Target("model.embed_tokens", None, "embed", TargetKind.EMBEDDING, VOCAB, HIDDEN)
    head = Target("lm_head", None, "head", TargetKind.LINEAR, HIDDEN, VOCAB)
    layers = [
        Target(
            f"model.layers.{layer}.{path}",
            layer,
            f"layers.{layer}.{group}",
            TargetKind.LINEAR,
            in_features,
            out_features,
        )
        for layer in range(LAYERS)
        for path, group, in_features, out_features in MODULES.values()
    ]
    return (embedding, *layers, head)


def random_tensors(
    names: Mapping[str, int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """A and B, as PEFT names and shapes them, for {target name: rank}."""
    generator = torch.Generator().manual_seed(seed)
    by_name = {target.name: target for target in all_targets()}
    tensors = {}
    for name, rank in names.items():
        target = by_name[name]
        a = torch.randn(rank, target.in_features, generator=generator).to(dtype)
        b = torch.randn(target.out_features, rank, generator=generator).to(dtype)
        kind = "embedding_" if target.kind is TargetKind.EMBEDDING else ""
        end = "" if kind else ".weight"
        tensors[f"base_model.model.{name}.lora_{kind}A{end}"] = a
        tensors[f"base_model.model.{name}.lora_{kind}B{end}"] = b
    return tensors


def save_adapter(
    path: Path,
    modules: tuple[str, ...] = ("q_proj", "v_proj"),
    rank: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tensors: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Makes the folder `path` as PEFT saves an adapter. `tensors` replaces the random ones; a
    config value of `...` drops the key."""
    path.mkdir()
    if tensors is None:
        names = [t.name for t in all_targets() if t.name.rpartition(".")[2] in modules]
        tensors = random_tensors(dict.fromkeys(names, rank), dtype, seed)
    save_file(dict(tensors), path / "adapter_model.safetensors", metadata={"format": "pt"})
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": BASE_MODEL,
        "r": rank,
        "lora_alpha": 8,
        "target_modules": list(modules),
        **config,
    }
    fields = {key: value for key, value in fields.items() if value is not ...}
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return path


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeAdapter:
    """make_adapter(folder="adapter", modules=("q_proj",), rank=4, dtype=float32, seed=0,
    tensors=None, **config): see save_adapter."""

    def make(
        modules: tuple[str, ...] = ("q_proj", "v_proj"), folder: str = "adapter", **fields: Any
    ) -> Path:
        return save_adapter(tmp_path / folder, modules, **fields)

    return make


def tiny_layout(
    dtype: DataType = DataType.FLOAT32,
    targets: tuple[Target, ...] | None = None,
    base_model: str = BASE_MODEL,
) -> Layout:
    """By default of all of the tiny model's targets."""
    return Layout(
        base_model=base_model,
        config_sha256="0" * 64,
        dtype=dtype,
        image_format=1,
        targets=all_targets() if targets is None else targets,
    )


@pytest.fixture
def make_layout() -> MakeLayout:
    """See tiny_layout."""
    return tiny_layout
