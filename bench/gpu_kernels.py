"""The kernels of `bench.gpu`: LoRA against its definition and vLLM's Triton kernels, attention of
decode rows against torch's own, all of the Llama-3-8B shape in bf16.

Every call of a timed run works on another layer's memory, as a step does, so that what is measured
comes from memory and not from the cache of the device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernels.attention import AttentionPlan, KVCache, attend
from kernels.lora import GRANULE_BYTES, LoraGroup, LoraPlan, LoraTable, TableEntry, reference
from kernels.lora import add_lora as our_add_lora

HIDDEN, Q_SIZE, KV_SIZE, HEAD_DIM = 4096, 4096, 1024, 128
WIDTHS = (Q_SIZE, KV_SIZE, KV_SIZE)
NUM_LAYERS, RANK, MAX_ADAPTERS = 32, 16, 32
DTYPE = torch.bfloat16
REPEATS = 20
CHECKED_TOKENS = 8
"""Tokens of every segment that are compared: the definition is slow."""


class Times(NamedTuple):
    """Microseconds per call."""

    best_us: float
    median_us: float


def time_us(run: Callable[[], None], num_calls: int) -> Times:
    """Times one call of `run`, which makes `num_calls`: over REPEATS replays of one graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / num_calls)
    return Times(min(found), statistics.median(found))


@dataclass
class Adapters:
    """MAX_ADAPTERS adapters of rank RANK on q, k and v of NUM_LAYERS layers."""

    table: LoraTable
    groups: list[LoraGroup]
    entries: list[list[TableEntry]]

    @classmethod
    def make(cls) -> Adapters:
        granule, rows = 0, []
        for _ in range(MAX_ADAPTERS):
            entries = []
            for target in range(3 * NUM_LAYERS):
                width = WIDTHS[target % 3]
                a, b = granule, granule + _granules(HIDDEN)
                granule = b + _granules(width)
                entries.append(TableEntry(target, a, b, RANK, HIDDEN, width))
            rows.append(entries)
        num_elements = granule * GRANULE_BYTES // DTYPE.itemsize
        arena = torch.randn(num_elements, device="cuda", dtype=DTYPE).mul_(0.05)
        table = LoraTable.create(MAX_ADAPTERS, 3 * NUM_LAYERS, arena, "cuda", max_rank=RANK)
        for slot, entries in enumerate(rows):
            table.set_row(slot, entries)
        offsets = (0, Q_SIZE, Q_SIZE + KV_SIZE)
        groups = [
            LoraGroup((3 * i, 3 * i + 1, 3 * i + 2), HIDDEN, offsets, WIDTHS)
            for i in range(NUM_LAYERS)
        ]
        return cls(table, groups, rows)

    def stacked(self, layer: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """vLLM's form: per target A [adapters, 1, rank, in] and B [adapters, 1, out, rank]."""
        a_parts, b_parts = [], []
        for k, width in enumerate(WIDTHS):
            entries = [self.entries[slot][3 * layer + k] for slot in range(MAX_ADAPTERS)]
            a_parts.append(torch.stack([self._matrix(e.a_granule, HIDDEN) for e in entries]))
            b = torch.stack([self._matrix(e.b_granule, width) for e in entries])
            b_parts.append(b.transpose(1, 2).contiguous())
        return [a.unsqueeze(1) for a in a_parts], [b.unsqueeze(1) for b in b_parts]

    def _matrix(self, granule: int, width: int) -> torch.Tensor:
        start = granule * GRANULE_BYTES // DTYPE.itemsize
        return self.table.arena[start : start + RANK * width].view(RANK, width)


def _granules(width: int) -> int:
    return -(-RANK * width * DTYPE.itemsize // GRANULE_BYTES)


CASES = {
    "decode, 1 row": ([0], [1]),
    "decode, 8 rows, 8 adapters": (list(range(8)), [1] * 8),
    "decode, 32 rows, 1 adapter": ([0] * 32, [1] * 32),
    "decode, 32 rows, 32 adapters": (list(range(32)), [1] * 32),
    "prefill, 1 adapter, 2048 tokens": ([0], [2048]),
    "prefill, 8 adapters, 2048 tokens": (list(range(8)), [256] * 8),
}


def lora_kernels() -> list[dict[str, Any]]:
    """Shrink and expand of q, k and v, per layer."""
    adapters, found = Adapters.make(), []
    table, peer = adapters.table, _VllmLora.load(adapters)
    for name, (slots, lengths) in CASES.items():
        plan = LoraPlan.build(slots, lengths, adapters.table, "cuda")
        x = torch.randn(plan.num_tokens, HIDDEN, device="cuda", dtype=DTYPE)
        out = torch.randn(plan.num_tokens, sum(WIDTHS), device="cuda", dtype=DTYPE)

        def ours(out: torch.Tensor = out, x: torch.Tensor = x, plan: LoraPlan = plan) -> None:
            for group in adapters.groups:
                our_add_lora(out, x, table.arena, table, plan, group)

        num_bytes = len(set(slots)) * RANK * (3 * HIDDEN + sum(WIDTHS)) * DTYPE.itemsize
        got = out.clone()
        our_add_lora(got, x, table.arena, table, plan, adapters.groups[0])
        row: dict[str, Any] = {"case": name, "error": _error(adapters, plan, lengths, x, out, got)}
        row["ours_us"], row["ours_median_us"] = time_us(ours, NUM_LAYERS)
        row["gb_per_s"] = num_bytes / row["ours_us"] / 1e3
        row |= dict.fromkeys(("vllm_error", "vllm_us", "vllm_median_us"))
        if peer is not None:
            got = out.clone()
            peer.run(plan, x, got, peer.weights[:1])
            row["vllm_error"] = _error(adapters, plan, lengths, x, out, got)
            row["vllm_us"], row["vllm_median_us"] = peer.time_us(plan, x, out)
        found.append(row)
    return found


def checked_tokens(lengths: list[int]) -> list[int]:
    """The first CHECKED_TOKENS of every segment."""
    firsts = [sum(lengths[:index]) for index in range(len(lengths))]
    return [
        first + token
        for first, length in zip(firsts, lengths, strict=True)
        for token in range(min(CHECKED_TOKENS, length))
    ]


def _error(
    adapters: Adapters,
    plan: LoraPlan,
    lengths: list[int],
    x: torch.Tensor,
    out: torch.Tensor,
    got: torch.Tensor,
) -> float:
    """Relative RMS of `got`, which was `out` before layer 0 was added, against the definition, over
    some tokens of every segment."""
    table, tokens = adapters.table, checked_tokens(lengths)
    wanted = out[tokens]
    slots = plan.token_slots[tokens].tolist()
    few = LoraPlan.build(slots, [1] * len(tokens), table, "cuda")
    reference.add_lora(wanted, x[tokens], table.arena, table, few, adapters.groups[0])
    difference = (got[tokens].double() - wanted.double()).square().mean().sqrt()
    return float(difference / wanted.double().square().mean().sqrt())


class _VllmLora:
    """vLLM's shrink and expand over the same adapters."""

    def __init__(self, adapters: Adapters, meta: Any, shrink: Any, expand: Any) -> None:
        self._meta, self._shrink, self._expand = meta, shrink, expand
        self.weights = [adapters.stacked(layer) for layer in range(NUM_LAYERS)]

    @classmethod
    def load(cls, adapters: Adapters) -> _VllmLora | None:
        try:
            from vllm.lora.ops.triton_ops import lora_expand, lora_shrink
            from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
        except (ImportError, OSError, RuntimeError) as error:
            print(f"no kernels of vLLM to compare with: {error}")
            return None
        meta = LoRAKernelMeta.make(MAX_ADAPTERS, 4096, "cuda")
        return cls(adapters, meta, lora_shrink, lora_expand)

    def run(self, plan: LoraPlan, x: torch.Tensor, out: torch.Tensor, weights: list[Any]) -> None:
        """Adds to `out`, once per layer in `weights`."""
        self._calls(plan, x, out, weights)()

    def time_us(self, plan: LoraPlan, x: torch.Tensor, out: torch.Tensor) -> Times:
        return time_us(self._calls(plan, x, out, self.weights), NUM_LAYERS)

    def _calls(
        self, plan: LoraPlan, x: torch.Tensor, out: torch.Tensor, weights: list[Any]
    ) -> Callable[[], None]:
        self._meta.prepare_tensors(plan.token_slots)
        y = torch.empty(3, len(x), RANK, dtype=torch.float32, device="cuda")
        args = self._meta.meta_args(len(x), True)

        def run() -> None:
            for a, b in weights:
                self._shrink(x, a, y, *args, 1.0)
                self._expand(y, b, out, *args, offset_start=0, add_inputs=True)

        return run


def attention_kernels(num_layers: int = 4) -> list[dict[str, Any]]:
    """Decode rows over pages, against torch over keys and values that lie densely, per layer."""
    found = []
    for num_rows in (1, 8, 32):
        for context in (512, 2048, 8192):
            found.append(_attention(num_rows, context, num_layers))
            torch.cuda.empty_cache()
    return found


def _attention(num_rows: int, context: int, num_layers: int) -> dict[str, Any]:
    num_heads, num_kv_heads, page_size = Q_SIZE // HEAD_DIM, KV_SIZE // HEAD_DIM, 16
    pages_of_row = context // page_size
    cache = KVCache.allocate(
        num_layers=num_layers,
        num_pages=num_rows * pages_of_row,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        dtype=DTYPE,
        device="cuda",
    )
    cache.data.normal_()
    pages = torch.randperm(cache.num_pages).view(num_rows, pages_of_row).tolist()
    firsts, ones = [context - 1] * num_rows, [1] * num_rows
    plan = AttentionPlan.build(firsts, ones, pages, page_size, "cuda")
    q = torch.randn(num_rows, num_heads, HEAD_DIM, device="cuda", dtype=DTYPE)
    scale = HEAD_DIM**-0.5
    where = torch.tensor(pages, device="cuda")[..., None] * page_size
    cells = (where + torch.arange(page_size, device="cuda")).flatten(1)
    dense = []
    for layer in range(num_layers):
        k, v = cache.gather(layer, cells)
        dense.append((k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()))

    def ours() -> None:
        for layer in range(num_layers):
            attend(q, cache, layer, plan, scale=scale)

    def torchs() -> None:
        for k, v in dense:
            F.scaled_dot_product_attention(q.unsqueeze(2), k, v, scale=scale, enable_gqa=True)

    k, v = dense[0]
    wanted = F.scaled_dot_product_attention(
        q.unsqueeze(2).float(), k.float(), v.float(), scale=scale, enable_gqa=True
    ).squeeze(2)
    got = attend(q, cache, 0, plan, scale=scale).float()
    (ours_us, ours_median_us), (torch_us, torch_median_us) = (
        time_us(run, num_layers) for run in (ours, torchs)
    )
    num_bytes = num_rows * context * 2 * KV_SIZE * DTYPE.itemsize
    return {
        "rows": num_rows,
        "context": context,
        "error": float((got - wanted).norm() / wanted.norm()),
        "ours_us": ours_us,
        "ours_median_us": ours_median_us,
        "torch_us": torch_us,
        "torch_median_us": torch_median_us,
        "gb_per_s": num_bytes / ours_us / 1e3,
    }
