"""The step of fixed addresses gives what the plain step gives: padded and replayed, with adapters
and without. On the CPU a recording computes anew; with a CUDA device it is a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from inference_svc import core
from inference_svc.adapters.arena import Arena
from inference_svc.adapters.layout import build_layout, lora_groups
from inference_svc.backends.cuda import CudaBackend
from inference_svc.backends.cuda_graphs import Compute, CudaRecorder, captured_sizes
from inference_svc.backends.cuda_inputs import CudaInputs
from inference_svc.backends.cuda_lora import CudaLora
from inference_svc.backends.torch import LoraStep, TorchBackend
from inference_svc.model.decoder import Transformer
from inference_svc.model.geometry import load_geometry
from inference_svc.model.inputs import StepInputs
from inference_svc.model.layers import Linear
from inference_svc.model.weights import load_weights
from kernels.attention import KVCache
from kernels.attention.triton_ops import MANY_TOKENS
from kernels.lora import TableEntry
from kernels.lora.triton_ops import MAX_SPLIT_TOKENS

PAGE_SIZE, NUM_PAGES, MAX_PAGES, MAX_TOKENS, MAX_ROWS, NUM_SLOTS = 4, 60, 20, 70, 6, 3
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


class Eager:
    """Computes anew at every replay: what a recording must equal."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def replay(self) -> torch.Tensor:
        return self._compute()


@dataclass
class Bench:
    """One model, its adapters, and ways to compute it that share nothing but the weights."""

    transformer: Transformer
    arena: Arena

    @property
    def device(self) -> torch.device:
        return self.arena.device

    def cache(self) -> KVCache:
        g = self.transformer.geometry
        return KVCache.allocate(
            num_layers=g.num_layers,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            num_kv_heads=g.num_kv_heads,
            head_dim=g.head_dim,
            dtype=self.arena.flat.dtype,
            device=self.device,
        )

    def plain(self) -> TorchBackend:
        return TorchBackend(
            self.transformer, self.cache(), self.arena, lora_groups(self.arena.layout)
        )

    def fixed(self, record: Callable | None) -> CudaBackend:
        model = self.cold(self.transformer, self.cache(), record)
        model.warm_up()
        return model

    def cold(
        self, transformer: Transformer, cache: KVCache, record: Callable | None,
        max_tokens: int = MAX_TOKENS,
    ) -> CudaBackend:  # fmt: skip
        reserved = CudaLora.num_bytes(max_tokens, MAX_ROWS)
        step = CudaInputs(max_tokens, MAX_ROWS, MAX_PAGES, PAGE_SIZE, self.device, reserved)
        groups = lora_groups(self.arena.layout)
        lora = CudaLora(self.arena, groups, step.block, max_tokens, MAX_ROWS)
        return CudaBackend(transformer, cache, step, lora, MAX_ROWS, record)


class Spy:
    """Computes, and keeps what every step was like."""

    def __init__(self, transformer: Transformer) -> None:
        self._transformer = transformer
        self.rows: list[tuple[int, int]] = []
        """Tokens and rows of each step."""
        self.variants: set[tuple] = set()
        """Many tokens, rows of several, and of one; of adapters many tokens, with tiles or not."""

    def forward(self, inputs: StepInputs, kv_cache: KVCache, lora: LoraStep | None) -> torch.Tensor:
        num_tokens, attention = len(inputs.token_ids), inputs.attention
        self.rows.append((num_tokens, len(attention.context_lengths)))
        of_lora = lora and (lora.plan.num_tokens > MAX_SPLIT_TOKENS, lora.plan.has_tiles)
        is_prompt = len(attention.tiles) > 0
        self.variants.add((num_tokens >= MANY_TOKENS, is_prompt, attention.has_decodes, of_lora))
        return self._transformer.forward(inputs, kv_cache, lora)


class Runs(Eager):
    """Stands for a recorded graph: recording computes."""

    def __init__(self, compute: Compute) -> None:
        super().__init__(compute)
        compute()


@pytest.fixture(scope="module", params=["cpu", GPU])
def bench(request, tmp_path_factory) -> Bench:
    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    device = torch.device(request.param)
    geometry = load_geometry(folder)
    weights = load_weights(folder, geometry, torch.float32, device, Linear)
    layout = build_layout(geometry, "model", (), torch.float32)
    arena = Arena(layout, 1 << 20, NUM_SLOTS, 4, device)
    arena.flat.copy_(torch.randn(arena.flat.shape) * 0.1)
    for slot in range(NUM_SLOTS):
        # The embedding and every other target; matrices may lie anywhere, one over another.
        entries = [
            TableEntry(
                index,
                slot + index,
                slot + 2 * index,
                slot + 2,
                target.in_features,
                target.out_features,
                is_embedding=target.kind == "embedding",
            )
            for index, target in enumerate(layout.targets)
            if index % 2 == 0
        ]
        arena.table.set_row(slot, entries)
    return Bench(Transformer(geometry, weights), arena)


def sequence(length: int, first_page: int, slot: int) -> core.Sequence:
    tokens = tuple((7 * index + 3 * first_page) % 64 for index in range(length))
    made = core.Sequence(core.Request(f"{first_page}", tokens, core.SamplingParams()))
    made.page_ids = [first_page + page for page in range(-(-length // PAGE_SIZE))]
    made.slot = slot
    return made


def steps(slots: list[int]) -> list[core.Batch]:
    """A prompt in two parts beside others, then decodes of all, of some, and of one."""
    lengths = [50, 9, 1, 22, 5]
    sequences = [
        sequence(length, 15 * bool(index) + 8 * index, slot)
        for index, (length, slot) in enumerate(zip(lengths, slots, strict=True))
    ]
    long, *others = sequences
    first = [core.BatchRow(long, 0, 30, samples=False)]
    first += [core.BatchRow(s, 0, len(s.token_ids), samples=True) for s in others]
    batches = [first, [core.BatchRow(long, 30, 20, samples=True)]]
    for chosen in (sequences, sequences[1:4], sequences[:1], sequences):
        rows = []
        for s in chosen:
            s.token_ids.append(len(s.token_ids) % 64)
            if len(s.token_ids) > PAGE_SIZE * len(s.page_ids):
                s.page_ids.append(s.page_ids[-1] + 1)
            rows.append(core.BatchRow(s, len(s.token_ids) - 1, 1, samples=True))
        batches.append(rows)
    return [core.Batch(tuple(rows)) for rows in batches]


@torch.inference_mode()
def run(model: CudaBackend | TorchBackend, batches: list[core.Batch]) -> list[torch.Tensor]:
    found = []
    for batch in batches:
        found.append(model.forward(model.prepare(batch)).clone())
    return found


SLOTS = [[-1] * 5, [0, 0, 1, 2, 2], [-1, -1, 0, 1, 1]]


@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_equals_the_torch_backend(bench, slots):
    record = Eager if bench.device.type == "cpu" else CudaRecorder()
    model = bench.fixed(record)
    plain = bench.plain()
    wanted = run(plain, steps(slots))
    for other in (model, bench.fixed(None)):
        for one, got in zip(wanted, run(other, steps(slots)), strict=True):
            torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-4)
    assert model.num_replays == 4
    assert model.num_lora_steps == plain.num_lora_steps


def test_unrecorded_step_is_computed(bench):
    model = bench.fixed(Eager)
    assert captured_sizes(MAX_ROWS) == [1, 2, 4, 6]
    assert captured_sizes(64) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    inputs = model.prepare(steps([0, 0, 1, 1, 1])[0])
    assert model.forward(inputs).shape == (4, 64)
    assert model.num_replays == 0


@pytest.mark.parametrize("record", [Runs, None], ids=["recorded", "computed"])
def test_warm_up_runs_every_kind_of_step(bench, record):
    """Every choice that compiles kernels of its own, at the sizes at which it is made."""
    spy, cache = Spy(bench.transformer), bench.cache()
    cache.data.fill_(1.5)
    bench.cold(spy, cache, record, max_tokens=300).warm_up()
    of_prompts = {
        (many, True, False, of_lora)
        for many in (False, True)
        for of_lora in (None, (many, True), (many, False))
    }
    of_decodes = {(False, False, True, None), (False, False, True, (False, False))}
    assert spy.variants == of_prompts | of_decodes
    prompts, decodes = spy.rows[:6], spy.rows[6:]
    context = MAX_PAGES * PAGE_SIZE
    assert prompts == [(16, 1)] * 3 + [(300, -(-300 // context))] * 3
    assert decodes == [(size, size) for size in (6, 4, 2, 1) for _ in range(2)]
    assert (cache.data[:, :-1] == 1.5).all(), "what sequences may own is left as it was"
    assert (cache.data[:, -1] != 1.5).any()


def test_warm_up_respects_the_step_limits(bench):
    spy = Spy(bench.transformer)
    bench.cold(spy, bench.cache(), None, max_tokens=7).warm_up()
    assert spy.rows[:3] == [(7, 1)] * 3
    spy = Spy(bench.transformer)
    bench.cold(spy, bench.cache(), None, max_tokens=1000).warm_up()
    assert spy.rows[3] == (MAX_ROWS * MAX_PAGES * PAGE_SIZE, MAX_ROWS)


@pytest.mark.parametrize("bench", [GPU], indirect=True)
@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_replay_is_bitwise_the_computed_step(bench, slots):
    """At the same padded size: a wider product may be another one."""
    captured = run(bench.fixed(CudaRecorder()), steps(slots))
    for one, got in zip(captured, run(bench.fixed(Eager), steps(slots)), strict=True):
        assert torch.equal(one, got)


@pytest.mark.parametrize("bench", [GPU], indirect=True)
def test_step_does_not_synchronize(bench):
    model = bench.fixed(CudaRecorder())
    batches = steps(SLOTS[1])
    run(model, batches[:3])
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(model, steps(SLOTS[1]))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_workspace_bytes(bench):
    model = bench.fixed(CudaRecorder() if bench.device.type == "cuda" else None)
    inputs_bytes = CudaLora.num_bytes(MAX_TOKENS, MAX_ROWS) + 4 * MAX_ROWS * 20
    assert model.workspace_bytes > inputs_bytes
    if bench.device.type == "cuda":
        assert model.workspace_bytes > inputs_bytes + (1 << 20), "recordings have a pool"
    assert bench.plain().workspace_bytes == 0
