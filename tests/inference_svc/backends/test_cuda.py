"""The step of fixed addresses gives what the plain step gives: padded and replayed, with adapters
and without. Here torch computes, and a recording computes anew; `tests/gpu` has the kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from inference_svc import core
from inference_svc.backends.base import Reload
from inference_svc.backends.cuda.backend import CudaBackend
from inference_svc.backends.cuda.graphs import LATEST_USE, Compute
from inference_svc.backends.cuda.lora import CudaLora
from inference_svc.backends.cuda.padded_sizes import StepKind
from inference_svc.backends.lora_step import LoraStep
from inference_svc.engine.compute.losses import Loss
from inference_svc.engine.compute.profiler import Marks
from inference_svc.engine.compute.runner import Runner
from inference_svc.engine.compute.sampler import Sampler
from inference_svc.engine.policy.memory_backoff import StepLimit
from inference_svc.model.inputs import StepInputs
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.transformer import Transformer
from inference_svc.results.base import NOTHING
from kernels import tuning
from tests.support.gpu.models import (
    MAX_PAGES,
    MAX_ROWS,
    MAX_TOKENS,
    PAGE_SIZE,
    Eager,
    Model,
    assert_close,
    make_decoder,
    run,
    run_pooled,
    run_scored,
    steps,
)
from tests.support.gpu.shortage import little_memory, tokens

pytestmark = pytest.mark.matrix

MANY_TOKENS = tuning.constants("store")["many_tokens"]
SPLIT_TOKENS = tuning.constants("shrink")["split_tokens"]


HYBRID = "qwen3.5, a gated delta net, a gate of attention"


class Spy:
    """Computes, and keeps what every step was like."""

    def __init__(self, transformer: Transformer) -> None:
        self._transformer = transformer
        self.description = transformer.description
        self.rows: list[tuple[int, int]] = []
        """Tokens and rows of each step."""
        self.variants: set[tuple] = set()
        """Many tokens, rows of several, and of one; of adapters many tokens, with tiles or not."""

    def forward(
        self,
        inputs: StepInputs,
        kv_caches: KVCaches,
        lora: LoraStep | None,
        choices: torch.Tensor | None,
    ) -> torch.Tensor:
        num_tokens, attention = len(inputs.token_ids), inputs.attention
        self.rows.append((num_tokens, len(attention.context_lengths)))
        of_lora = lora and (lora.plan.num_tokens > SPLIT_TOKENS, lora.plan.has_tiles)
        is_prompt = len(attention.tiles) > 0
        self.variants.add((num_tokens >= MANY_TOKENS, is_prompt, attention.has_decodes, of_lora))
        return self._transformer.forward(inputs, kv_caches, lora, choices)


@pytest.fixture(scope="module", params=["qwen3, norms of heads", HYBRID], ids=["qwen3", "qwen3.5"])
def model(request, tmp_path_factory) -> Model:
    description = make_decoder(request.param, tmp_path_factory.mktemp("model"))
    return Model.make(description, torch.float32, torch.device("cpu"))


SLOTS = [[-1] * 5, [0, 0, 1, 2, 2], [-1, -1, 0, 1, 1]]


@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_equals_the_torch_backend(model, slots):
    fixed, plain = model.fixed(Eager), model.plain()
    wanted = run(plain, steps(slots))
    for other in (fixed, model.fixed(None)):
        assert_close(wanted, run(other, steps(slots)), 1e-4)
    assert fixed.num_replays == len(steps(slots))
    assert fixed.num_eager_steps == 0
    assert fixed.num_lora_steps == plain.num_lora_steps


@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_scores_as_the_torch_backend_does(model, slots):
    """In slices of no more tokens than a step may have rows."""
    wanted = run_scored(model.plain(), steps(slots, prompt_logprobs=1)[:2])
    assert [len(each.values) for each in wanted] == [30 + 8 + 0 + 21 + 4, 19]
    fixed = model.fixed(Eager)
    assert_close(wanted, run_scored(fixed, steps(slots, prompt_logprobs=1)[:2]), 1e-4)
    decode = steps(slots, prompt_logprobs=1)[2]
    inputs = fixed.prepare(decode)
    fixed.forward(inputs)
    assert not list(fixed.score(inputs))


@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_pools_as_the_torch_backend_does(model, slots):
    """Also a prompt whose only token is its last one."""
    wanted = run_pooled(model.plain(), steps(slots)[:2])
    assert [len(each.values) for each in wanted] == [30 + 9 + 1 + 22 + 5, 20]
    fixed = model.fixed(Eager)
    assert_close(wanted, run_pooled(fixed, steps(slots)[:2]), 1e-4)
    assert fixed.num_eager_steps == 2
    inputs = fixed.prepare(steps(slots)[0])
    fixed.forward(inputs)
    assert not list(fixed.pool(inputs))


def sizes_of(backend: CudaBackend) -> tuple[int, int, int]:
    return backend.kv_bytes, backend.recurrent_bytes, backend.weights_bytes


@pytest.mark.slow
@pytest.mark.parametrize("weights", [False, True], ids=["pages", "weights"])
@pytest.mark.parametrize("record", [Eager, None], ids=["recorded", "computed"])
def test_freed_memory_is_made_again(model, record, weights):
    """What was recorded has the addresses of what is gone: it is recorded anew, also if that has
    failed once."""
    recorded: list[Eager] = []

    def note(compute: Compute) -> Eager:
        if short:
            raise torch.OutOfMemoryError("CUDA out of memory")
        recorded.append(Eager(compute))
        return recorded[-1]

    short = False
    wanted = run(model.plain(), steps(SLOTS[1]))
    fixed = model.fixed(note if record else None)
    num_recorded, held = len(recorded), sizes_of(fixed)
    assert (held[1] > 0) == bool(model.transformer.description.recurrences)
    own = model.transformer.weights
    fixed._reload = Reload(model.caches, lambda: own, model.states, lambda: None)
    caches = fixed.kv_caches
    for _ in range(2):
        assert fixed.free_memory(weights=weights) == sum(held[:2]) + weights * held[2]
        assert sizes_of(fixed) == (0, 0, held[2] * (not weights))
        short = True
        if record:
            with pytest.raises(torch.OutOfMemoryError):
                fixed.restore()
        short = False
        fixed.restore()
        assert sizes_of(fixed) == held
        assert fixed.kv_caches is not caches
        assert_close(wanted, run(fixed, steps(SLOTS[1])), 1e-4)
    assert len(recorded) == 3 * num_recorded


@pytest.mark.slow
@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_a_step_without_memory_is_computed_in_parts(model, slots):
    """What was given up, pages of its rows sent or not, leaves nothing behind."""
    wanted = tokens(model.plain(), slots, StepLimit(MAX_TOKENS))
    for record in (Eager, None):
        fixed, limit = model.fixed(record), StepLimit(MAX_TOKENS)
        with little_memory(fixed):
            assert tokens(fixed, slots, limit) == wanted
        assert limit.num_out_of_memory > 0


def test_a_row_that_overflows_is_lost_alone_from_a_recorded_step(model):
    """Its neighbours on both sides, and later steps in the same memory, are as without it."""
    poisoned = Model.make(model.transformer.description, torch.float32, torch.device("cpu"))
    wanted, got = (
        Runner(each.fixed(Eager), Sampler(()), Marks(), StepLimit(MAX_TOKENS))
        for each in (model, poisoned)
    )
    before = [[runner.run(batch) for batch in steps(SLOTS[2])[:3]] for runner in (wanted, got)]
    assert before[0][-1].sampled == before[1][-1].sampled
    table = poisoned.arena.table
    table.set_row(0, replace(table.adapters[0], scales=table.adapters[0].scales * np.nan))
    decodes, backend = steps(SLOTS[2])[3:], got.backend
    num_replays = backend.num_replays
    rows = decodes[0].rows
    assert [row.sequence.slot for row in rows] == [-1, 0, 1]
    result, sound = got.run(decodes[0]), wanted.run(decodes[0])
    assert backend.num_replays == num_replays + 1
    assert result.lost == {rows[1].sequence: Loss.NOT_FINITE}
    assert result.sampled == [sound.sampled[0], sound.sampled[2]]
    for batch in decodes[1:]:
        left = core.Batch(tuple(row for row in batch.rows if row.sequence.slot != 0))
        result = got.run(left)
        assert not result.lost
        assert result.sampled == wanted.run(left).sampled


@pytest.mark.slow
@pytest.mark.parametrize("record", [Eager, None], ids=["recorded", "computed"])
def test_chosen_experts_are_returned_if_a_row_asks(tmp_path, record):
    """Of all tokens of the step, without its padding, also of those that do not sample."""
    decoder = make_decoder("glm4 experts, groups, a bias", tmp_path)
    model = Model.make(decoder, torch.float32, torch.device("cpu"))
    wanted, got = (
        run(each, steps([0, 0, 1, 2, 2])) for each in (model.plain(), model.fixed(record))
    )
    shape = decoder.expert_layers
    for one, other, batch in zip(wanted, got, steps([0, 0, 1, 2, 2]), strict=True):
        num_tokens = sum(row.num_tokens for row in batch.rows)
        assert other.experts.shape == (len(shape.layers), num_tokens, shape.num_chosen)
        assert torch.equal(other.experts, one.experts)
    fixed, quiet = model.fixed(record), steps([-1] * 5)
    for batch in quiet:
        for row in batch.rows:
            row.sequence.request = replace(row.sequence.request, wanted=NOTHING)
    assert all(each.experts is None for each in run(fixed, quiet))


def test_a_prompt_is_recorded_while_there_is_nothing_else_to_do(model):
    """It is the same prompt then, and so is one that comes too often before."""
    prompt, decode = steps([0, 0, 1, 1, 1])[0], steps([0, 0, 1, 1, 1])[2]
    for is_ever_idle in (True, False):
        fixed = model.fixed(Eager, is_warm=False)
        assert not fixed.use_idle_time()
        found = []
        for _ in range(LATEST_USE):
            found.append(fixed.forward(fixed.prepare(prompt)).values.clone())
            if is_ever_idle:
                assert fixed.use_idle_time() == (len(found) == 1)
        num_eager = 1 if is_ever_idle else LATEST_USE
        assert (fixed.num_eager_steps, fixed.num_replays) == (num_eager, LATEST_USE - num_eager)
        for each in found:
            torch.testing.assert_close(each, found[0], rtol=1e-4, atol=1e-4)
        wanted = model.fixed(None)
        wanted.forward(wanted.prepare(prompt))
        logits = [each.forward(each.prepare(decode)).values for each in (fixed, wanted)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_row_that_does_not_sample_gets_logits_too(model):
    fixed = model.fixed(Eager)
    prompt = steps([-1, 0, 0, 1, 1])[0].rows[0]
    assert not prompt.samples
    assert fixed.forward(fixed.prepare(core.Batch((prompt,)))).values.shape == (1, 64)


def test_padding_has_nothing_of_earlier_steps(model):
    """Of adapters, either: a recording computes before anything is filled in."""
    fixed = model.fixed(Eager, is_warm=False)
    for slots in ([0, 0, 1, 2, 2], [1, 2, 0, 1, 0]):
        for batch in steps(slots):
            fixed.forward(fixed.prepare(batch))
    longest = MAX_PAGES * PAGE_SIZE
    for shape in (*fixed.steps.shapes.usual_prompts(), *fixed.steps.shapes.decodes()):
        fixed.steps.fill_padding(shape)
        step = fixed.steps.prompts if shape.has_prompts else fixed.steps.decodes
        lora, inputs = step.lora.padded_step(shape), step.inputs.padded_inputs(shape)
        for plan in () if lora is None else (lora.plan, lora.head_plan):
            assert not plan.items.any()
            assert (plan.token_slots == -1).all()
        pages = inputs.attention.cells // PAGE_SIZE
        assert (pages == fixed.num_pages).all()
        assert inputs.attention.context_lengths.max() <= longest


@pytest.mark.parametrize("record", [Eager, None], ids=["recorded", "computed"])
def test_warm_up_runs_every_kind_of_step(model, record):
    """Every choice that compiles kernels of its own, at the sizes at which it is made."""
    spy, caches = Spy(model.transformer), model.caches()
    for cache in caches.caches:
        cache.data.fill_(1.5)
    backend = model.fixed(record, max_tokens=300, caches=caches, transformer=spy)
    states = {} if backend.states is None else backend.states.layers
    assert not any(part.any() for parts in states.values() for part in parts)
    of_prompts = {
        (many, True, False, of_lora)
        for many in (False, True)
        for of_lora in (None, (many, True), (many, False))
    }
    of_decodes = {(False, False, True, None), (False, False, True, (False, False))}
    sizes = (64, 32, 16)
    of_short = {
        (num_tokens >= MANY_TOKENS, True, True, of_lora)
        for num_tokens in sizes
        for of_lora in (None, (False, True))
    }
    padded = of_short | {(True, True, True, (True, True))}
    assert spy.variants == of_prompts | of_decodes | (padded if record else set())
    prompts, others = spy.rows[:10], spy.rows[10:]
    context = MAX_PAGES * PAGE_SIZE
    assert prompts == [(16, 1)] * 5 + [(300, -(-300 // context))] * 5
    decodes = [each for each in others if each[0] == each[1]]
    assert decodes == [(size, size) for size in (6, 4, 2, 1) for _ in StepKind]
    of_padding = MAX_ROWS + 1
    padded_prompts = [(300, of_padding), *((n, of_padding) for n in sizes for _ in range(2))]
    assert [each for each in others if each not in decodes] == (padded_prompts if record else [])
    assert (cache.data[:, :-1] == 1.5).all(), "what sequences may own is left as it was"
    assert (cache.data[:, -1] != 1.5).any()


def test_warm_up_respects_the_step_limits(model):
    spy = Spy(model.transformer)
    model.fixed(None, max_tokens=7, transformer=spy)
    assert spy.rows[:5] == [(7, 1)] * 5
    spy = Spy(model.transformer)
    model.fixed(None, max_tokens=1000, transformer=spy)
    assert spy.rows[5] == (MAX_ROWS * MAX_PAGES * PAGE_SIZE, MAX_ROWS)


def test_workspace_bytes(model):
    inputs_bytes = CudaLora.num_bytes(MAX_TOKENS, MAX_ROWS) + 4 * MAX_ROWS * MAX_PAGES
    logits_bytes = 4 * MAX_ROWS * model.transformer.description.vocab_size
    assert model.fixed(None).workspace_bytes > inputs_bytes + logits_bytes
    assert model.plain().workspace_bytes == 0
