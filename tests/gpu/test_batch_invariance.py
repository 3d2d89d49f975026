"""A decode row gives the same bits alone, among others, in another order, and beside padding.

That is so of every kernel of ours. A library's product of matrices may choose another kernel, and
add in another order, for another number of rows: here every row is multiplied on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc import core
from inference_svc.adapters.targets import applied_targets
from inference_svc.backends.cuda.backend import CudaBackend
from inference_svc.backends.cuda.steps import StepLimits
from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import Linear
from inference_svc.model.transformer import Transformer
from kernels import tuning
from kernels.attention import (
    AttentionPlan,
    HeadNorms,
    KVCache,
    attend,
    rotary_angles,
    rotate_and_store,
)
from tests.support.gpu.lora import GROUP, Bench, rows_of
from tests.support.gpu.models import PAGE_SIZE, SUM, Eager, Model, make_decoder

NUM_ROWS, MAX_PAGES = 16, 12
CHOICES = {
    "alone": [3],
    "alone, the longest": [15],
    "padded": [2, 3, 7, 11, 15],
    "in another order": list(reversed(range(NUM_ROWS))),
}
LENGTHS = [1 + 7 * index % 45 for index in range(NUM_ROWS)]
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.real)]

OnDevice = Callable[[], AbstractContextManager[None]]


class RowLinear(Linear):
    """Multiplies every row on its own."""

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(row, self.weight, self.bias) for row in x.split(1)])


def by_rows(weights: ModelWeights[Linear]) -> ModelWeights[Linear]:
    def each(linear: Linear) -> Linear:
        return RowLinear(linear.weight, linear.bias)

    return replace(weights, projections={k: each(p) for k, p in weights.projections.items()})


def sequences(slots: Sequence[int]) -> list[core.Sequence]:
    """Returns some of different lengths, with pages of their own; as many of each slot."""
    made = []
    for index, length in enumerate(LENGTHS):
        tokens = tuple((7 * position + 3 * index) % 64 for position in range(length))
        sequence = core.Sequence(core.Request(str(index), tokens, core.SamplingParams()))
        sequence.page_ids = [MAX_PAGES * index + page for page in range(-(-length // PAGE_SIZE))]
        sequence.slot = slots[index * len(slots) // NUM_ROWS]
        made.append(sequence)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_kinds", [False, True], ids=["lora", "kinds"])
@pytest.mark.parametrize("feature", ["qwen3, norms of heads", "mistral, a window"])
def test_a_row_of_a_step(tmp_path, device, on_device, feature, has_kinds, dtype):
    """Of the base model, of adapters with A and B alone or with more, and of a sum of them."""
    decoder = make_decoder(feature, tmp_path, num_hidden_layers=1)
    model = Model.make(decoder, dtype, device)
    if has_kinds:
        model = model.with_kinds(0)
    caches = KVCaches.allocate(
        decoder, num_pages=NUM_ROWS * MAX_PAGES + 1, page_size=PAGE_SIZE, dtype=dtype, device=device
    )
    [cache] = caches.caches
    before = torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(0))
    transformer = Transformer(decoder, by_rows(model.transformer.weights))
    limits = StepLimits(NUM_ROWS, NUM_ROWS, MAX_PAGES)
    targets = applied_targets(model.arena.layout)

    @torch.inference_mode()
    def logits_of(chosen: Sequence[int]) -> dict[int, Tensor]:
        cache.data.copy_(before)
        backend = CudaBackend(transformer, caches, model.arena, targets, limits, Eager)
        made = sequences([-1, 0, 1, 2, SUM])
        rows = [core.BatchRow(made[i], LENGTHS[i] - 1, 1, samples=True) for i in chosen]
        values = backend.forward(backend.prepare(core.Batch(tuple(rows)))).values
        return dict(zip(chosen, values.cpu(), strict=True))

    with on_device(), tuning.overridden("segments", positions=16):
        whole = logits_of(range(NUM_ROWS))
        for label, chosen in CHOICES.items():
            for index, logits in logits_of(chosen).items():
                assert torch.equal(logits, whole[index]), f"{label}: row {index}"
    assert not torch.equal(whole[3], whole[7])


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_of_a_row(device, on_device, dtype):
    """Heads of a real model, and contexts of one segment and of several, beside a prompt."""
    page_size, head_dim, num_heads, num_kv_heads = 16, 128, 8, 2
    lengths = [1, 17, 300, 128, 129]
    cache = KVCache.allocate(
        num_layers=1, num_pages=100, page_size=page_size, num_kv_heads=num_kv_heads,
        head_dim=head_dim, dtype=dtype, device=device,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
    q = torch.randn(len(lengths) + 5, num_heads, head_dim, generator=generator).to(device, dtype)
    pages = [list(range(20 * row, 20 * row + 20)) for row in range(len(lengths))]

    def mixed(chosen: Sequence[int], num_prompt: int = 0) -> dict[int, Tensor]:
        """Decode rows, and the row of a prompt."""
        firsts = [lengths[row] - 1 for row in chosen] + [0] * bool(num_prompt)
        counts = [1] * len(chosen) + [num_prompt] * bool(num_prompt)
        of_rows = [pages[row] for row in chosen] + [pages[0]] * bool(num_prompt)
        plan = AttentionPlan.build(firsts, counts, of_rows, page_size, device)
        tokens = torch.cat([q[list(chosen)], q[len(lengths) : len(lengths) + num_prompt]])
        out = attend(tokens, cache, 0, plan, scale=head_dim**-0.5)
        return dict(zip(chosen, out.cpu(), strict=False))

    with on_device():
        whole = mixed(range(len(lengths)))
        steps = [mixed([row]) for row in range(len(lengths))]
        steps += [mixed([4, 2, 0]), mixed([2, 4], num_prompt=5)]
        for step in steps:
            for row, out in step.items():
                assert torch.equal(out, whole[row]), f"row {row}"
        with tuning.overridden("segments", positions=64):
            assert not torch.equal(mixed([2])[2], whole[2]), "cut otherwise it has other bits"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_a_row(device, on_device, dtype):
    """Normed, rotated and stored, alone and where so many tokens are that a program has several."""
    page_size, head_dim, many = 16, 64, tuning.constants("store", head_dim=64)["many_tokens"]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(many, 3 * head_dim, generator=generator)
    norms = [torch.rand(head_dim, generator=generator).to(device, dtype) for _ in range(2)]
    frequencies = (torch.arange(head_dim // 2) + 1.0).reciprocal().to(device)

    def stored(tokens: list[int]) -> tuple[Tensor, Tensor]:
        """q, and the keys and values that are in the cache then."""
        cache = KVCache.allocate(
            num_layers=1, num_pages=many // page_size, page_size=page_size, num_kv_heads=1,
            head_dim=head_dim, dtype=dtype, device=device,
        )  # fmt: skip
        qkv, cells = values[tokens].to(device, dtype), torch.tensor(tokens, device=device)
        angles = rotary_angles(cells, frequencies, 1.0, dtype)
        rotate_and_store(qkv, cache, 0, cells, *angles, HeadNorms(*norms, eps=1e-5), num_heads=1)
        kv = cache.data[0].unflatten(-1, (page_size, head_dim))
        return qkv[:, :head_dim].cpu(), kv[cells // page_size, 0, :, cells % page_size].cpu()

    with on_device():
        whole = stored(list(range(many)))
        for token in (0, many // 2, many - 1):
            for one, all_of_them in zip(stored([token]), whole, strict=True):
                assert torch.equal(one[0], all_of_them[token])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_of_a_row(device, on_device, dtype):
    """Also where so many tokens are computed that a program sums all of the input."""
    bench = Bench(dtype, device.type)
    x, out = bench.inputs(20)
    many = tuning.constants("shrink")["split_tokens"] + 1

    def mixed(chosen: Sequence[int], num_prompt: int = 0) -> dict[int, Tensor]:
        """Row i has slot i % 10."""
        slots = [i % 10 for i in chosen] + [3] * bool(num_prompt)
        lengths = [1] * len(chosen) + [num_prompt] * bool(num_prompt)
        assert bench.fill(rows_of(slots, lengths))
        tokens = [*chosen, *[0] * num_prompt]
        added = out[tokens]
        bench.lora.step().add(GROUP, x[tokens], added, None)
        return dict(zip(chosen, added.cpu(), strict=False))

    with on_device():
        whole = mixed(range(16))
        steps = [mixed([3]), mixed([9]), mixed(list(reversed(range(16)))), mixed([4, 9], many)]
        for step in steps:
            for row, added in step.items():
                assert torch.equal(added, whole[row]), f"row {row}"
