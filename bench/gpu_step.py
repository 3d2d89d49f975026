"""One decode step of the shape of Llama-3-8B as a GPU would run it: its launches on `meta`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu_launches import META, Launch, launches
from bench.gpu_run.sizes import LLAMA_8B
from inference_svc import core
from inference_svc.adapters.arena import Arena
from inference_svc.adapters.layout import ModelLayout, build_layout, lora_groups
from inference_svc.backends.cuda import CudaBackend, StepLimits
from inference_svc.model.decoder import Transformer
from inference_svc.model.geometry import ModelGeometry, load_geometry
from inference_svc.model.layers import Linear, RMSNorm
from inference_svc.model.weights import LayerWeights, ModelWeights
from kernels.attention import KVCache
from kernels.lora import TableEntry

DTYPE, PAGE_SIZE, MAX_LEN = torch.bfloat16, 16, 8192
ARENA_BYTES = 16 << 20


class Workload(NamedTuple):
    """A decode step of `rows` in equal parts of each of `adapters`; 0: of the base model."""

    rows: int
    adapters: int
    context: int = 512
    rank: int = 16


class Computed:
    """Stands for a recorded step: computes it anew."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute

    def replay(self) -> None:
        self._compute()


def make_geometry() -> ModelGeometry:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA_8B))
        return load_geometry(Path(folder))


def meta_weights(geometry: ModelGeometry) -> ModelWeights[Linear]:
    g = geometry

    def linear(num_out: int, num_in: int) -> Linear:
        return Linear(torch.empty(num_out, num_in, dtype=DTYPE, device=META))

    def norm() -> RMSNorm:
        return RMSNorm(torch.empty(g.hidden_size, dtype=DTYPE, device=META), g.rms_norm_eps)

    layers = tuple(
        LayerWeights(
            input_norm=norm(),
            qkv=linear(g.q_size + 2 * g.kv_size, g.hidden_size),
            q_norm=None,
            k_norm=None,
            o=linear(g.hidden_size, g.q_size),
            post_attention_norm=norm(),
            gate_up=linear(2 * g.intermediate_size, g.hidden_size),
            down=linear(g.hidden_size, g.intermediate_size),
        )
        for _ in range(g.num_layers)
    )
    embedding, head = (linear(g.vocab_size, g.hidden_size) for _ in range(2))
    return ModelWeights(embedding.weight, layers, norm(), head, num_bytes=0)


def tensors_of(part: Any) -> Iterator[Tensor]:
    """Yields the tensors of weights, or of a part of them."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from tensors_of(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from tensors_of(getattr(part, field.name))


def make_arena(layout: ModelLayout, work: Workload) -> Arena:
    arena = Arena(layout, ARENA_BYTES, max(1, work.adapters), work.rank, META)
    entries = [
        TableEntry(index, 0, 0, work.rank, target.in_features, target.out_features)
        for index, target in enumerate(layout.targets)
        if target.layer is not None
    ]
    for slot in range(work.adapters):
        arena.table.set_row(slot, entries)
    return arena


class Step(NamedTuple):
    """A step, and what it launches, in order. `adapter_targets` are those that adapters have."""

    work: Workload
    geometry: ModelGeometry
    launches: list[Launch]
    weights: list[Tensor]
    embedding: Tensor
    groups: list[str]
    """The group of each target, without its layer."""
    adapter_targets: frozenset[int]
    adapter_bytes: int
    item_bytes: int = DTYPE.itemsize

    @property
    def num_adapter_rows(self) -> int:
        return self.work.rows if self.work.adapters else 0


def trace(work: Workload) -> Step:
    """Launches the step on `meta`."""
    geometry = make_geometry()
    weights, layout = meta_weights(geometry), build_layout(geometry, "bench", (), DTYPE)
    arena = make_arena(layout, work)
    max_pages = MAX_LEN // PAGE_SIZE
    cache = KVCache.allocate(
        num_layers=geometry.num_layers, num_pages=work.rows * max_pages + 1, page_size=PAGE_SIZE,
        num_kv_heads=geometry.num_kv_heads, head_dim=geometry.head_dim, dtype=DTYPE, device=META,
    )  # fmt: skip
    backend = CudaBackend(
        Transformer(geometry, weights),
        cache,
        arena,
        lora_groups(arena.layout),
        StepLimits(work.rows, work.rows, max_pages),
        Computed,
    )
    prepared = backend.prepare(_batch(work))
    with launches() as noted:
        backend.forward(prepared)
    targets = [target for target in layout.targets if target.layer is not None]
    features = sum(target.in_features + target.out_features for target in targets)
    return Step(
        work,
        geometry,
        noted.launches,
        list(tensors_of(weights)),
        weights.embedding,
        [target.group.rpartition(".")[2] for target in layout.targets],
        frozenset(index for index, t in enumerate(layout.targets) if t.layer is not None),
        work.rank * features * DTYPE.itemsize,
    )


def _batch(work: Workload) -> core.Batch:
    rows, num_pages = [], -(-work.context // PAGE_SIZE)
    for row in range(work.rows):
        request = core.Request(str(row), (0,) * work.context, core.SamplingParams())
        sequence = core.Sequence(request)
        sequence.page_ids = list(range(row * num_pages, (row + 1) * num_pages))
        sequence.slot = row * work.adapters // work.rows if work.adapters else core.BASE_SLOT
        rows.append(core.BatchRow(sequence, work.context - 1, 1, samples=True))
    return core.Batch(tuple(rows))
