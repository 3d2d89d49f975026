"""The memory of a native program's values."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_svc import core
from inference_svc.adapters.targets import applied_targets
from inference_svc.backends.base import Reload
from inference_svc.backends.native.backend import NativeBackend
from inference_svc.backends.native.buffers import BatchPages, StepArrays
from inference_svc.backends.native.lora import NativeLoraOps
from inference_svc.backends.native.needs import held_bytes, memory_needs
from inference_svc.backends.native.program import NativeTransformer
from inference_svc.backends.native.projections import PackedProjection, PackedProjections
from inference_svc.backends.native.workspace import Workspace, place, workspace_bytes
from inference_svc.core import EngineConfig
from inference_svc.host import cpus
from inference_svc.model.checkpoint.parameters import parameters
from inference_svc.model.checkpoint.weights import ModelWeights
from inference_svc.model.description import Decoder
from inference_svc.model.lifetimes import ValueSizes, last_uses
from inference_svc.model.operations import Op, Rows, Value
from inference_svc.model.walk import Narrowing, operations
from kernels import host_memory
from kernels.quantised import WeightFormat
from tests.support.gpu.features import FEATURES
from tests.support.gpu.models import (
    MAX_ADDED,
    MAX_PAGES,
    MAX_ROWS,
    MAX_TOKENS,
    PAGE_SIZE,
    SUM,
    Model,
    make_decoder,
    random_weights,
    run,
    run_scored,
    steps,
)
from tests.support.models.quantised import FORMATS, with_format
from tests.support.native import native_library

pytestmark = pytest.mark.matrix

EVEN_LINES = {"hidden_size": 64, "intermediate_size": 64}
"""The sizes of a model whose rows of activations are an even number of cache lines, in bf16 too."""
APART = {
    "llama": {"normed", "qkv", "mixed", "delta", "gate_up", "gated"},
    "granite in int8, rounded inputs": {"normed", "qkv", "mixed", "delta", "gate_up", "gated"},
    "gpt-oss experts, sinks, biases, clamped": {"qkv", "mixed"},
    "qwen2 experts, some dense, shared, a gate": {"qkv", "mixed", "gate_up", "gated"},
    "qwen3.5, a gated delta net, a gate of attention": {"normed", "delta", "gate_up", "gated"},
}
"""The values of some families whose rows may be apart."""
SIZES = ValueSizes(max_tokens=9, max_logits=4, max_pairs=18, dtype=torch.bfloat16)


@st.composite
def lists_of_ops(draw: st.DrawFn) -> list[Op]:
    forms = st.tuples(st.integers(1, 40), st.sampled_from(Rows), st.booleans())
    drawn = draw(st.lists(forms, min_size=1, max_size=8))
    values = [Value(str(index), *form) for index, form in enumerate(drawn)]
    ops: list[Op] = []
    written: list[Value] = []
    for _ in range(draw(st.integers(1, 20))):
        inputs: list[Value] = []
        if written:
            inputs = draw(st.lists(st.sampled_from(written), max_size=3, unique=True))
        out = draw(st.sampled_from(values))
        ops.append(Op(tuple(inputs), out, None))
        written = list(dict.fromkeys([*written, out]))
    return ops


@given(lists_of_ops(), st.data())
def test_values_that_are_needed_share_nothing(ops: list[Op], data: st.DataObject) -> None:
    """Each stays where it is from its first write to its last use, and apart from all others."""
    outs = list(dict.fromkeys(op.out for op in ops))
    kept = data.draw(st.sets(st.sampled_from(outs)))
    placed = place(ops, SIZES, kept, ())
    taken: dict[Value, tuple[int, int]] = {}
    for op, offsets, ended in zip(ops, placed.offsets, last_uses(ops, kept), strict=True):
        assert set(offsets) == {*op.inputs, op.out}
        for value, start in offsets.items():
            place_of = start, start + SIZES.num_bytes(value)
            assert start % 64 == 0
            assert place_of[1] <= placed.num_bytes
            assert taken.setdefault(value, place_of) == place_of
        ends = sorted(taken.values())
        assert all(one[1] <= other[0] for one, other in pairwise(ends))
        for value in ended:
            del taken[value]
    assert set(taken) == kept


@pytest.mark.parametrize("feature", FEATURES)
def test_what_is_said_is_allocated(feature: str, tmp_path: Path) -> None:
    decoder = make_decoder(feature, tmp_path)
    config = EngineConfig(tmp_path, "m", max_batch_tokens=64, max_sequences=8, max_added_tokens=3)
    work = Workspace.allocate(decoder, 64, 8, torch.float32, max_added_tokens=3)
    assert workspace_bytes(config, decoder) == work.num_bytes
    for narrowing in (Narrowing.IN_LAST_LAYER, Narrowing.BEFORE_HEAD):
        found = operations(decoder, narrowing)
        is_apart = narrowing is Narrowing.BEFORE_HEAD
        tensors = list(work.tensors(found, is_apart=is_apart))
        assert len(tensors) == len(found.layers) + len(found.head)
        for value in found.kept if is_apart else ():
            last = max(index for index, op in enumerate(found.layers) if op.out is value)
            places = {at[value].data_ptr() for at in tensors[last:] if value in at}
            assert len(places) == 1, value.name


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    ("feature", "size"),
    [
        ("qwen2, biases", "intermediate_size"),
        ("qwen3 experts, normalised", "moe_intermediate_size"),
    ],
)
def test_weights_in_few_bits_take_what_is_said(
    feature: str, size: str, form: WeightFormat, tmp_path: Path
) -> None:
    decoder = make_decoder(feature, tmp_path, **{size: 64})  # whole panels
    decoder = with_format(decoder, form)
    config = EngineConfig(tmp_path, "m", max_batch_tokens=64, max_sequences=8, dtype="float32")
    taken = 0
    for each in parameters(decoder):
        if each.parts:
            made = PackedProjections().empty(
                each.parts,
                each.in_size,
                has_bias=each.has_bias,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )
            taken += made.num_bytes
        else:
            taken += each.num_bytes(torch.float32)
    if decoder.head.is_tied:
        taken += 4 * decoder.vocab_size * decoder.hidden_size
    assert memory_needs(config, decoder).weights_bytes == taken
    work = Workspace.allocate(decoder, 64, 8, torch.float32)
    assert workspace_bytes(config, decoder) == work.num_bytes
    plain = Workspace.allocate(with_format(decoder, FORMATS["int8"]), 64, 8, torch.float32)
    assert (work.num_bytes > plain.num_bytes) == (form is FORMATS["w8a8"])


def test_the_memory_is_for_the_threads_that_will_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default these are the cores, and not torch's threads here, of which there is one."""
    monkeypatch.setattr(cpus, "usable_cores", lambda root: 7)
    decoder = make_decoder("qwen2, biases", tmp_path)
    by_default = EngineConfig(tmp_path, "m", max_batch_tokens=64, max_sequences=8)
    one, seven = (replace(by_default, num_threads=count) for count in (1, 7))
    assert held_bytes(one, decoder) < held_bytes(seven, decoder) == held_bytes(by_default, decoder)


def native_backend(
    model: Model, weights: ModelWeights[PackedProjection]
) -> tuple[NativeBackend, Workspace]:
    """Returns a backend of the model's decoder and adapters, and the memory of its steps' values,
    which are NaN at first."""
    decoder, arena, library = model.transformer.description, model.arena, native_library()
    step = StepArrays(MAX_TOKENS, MAX_ROWS, PAGE_SIZE, BatchPages(MAX_ROWS, MAX_PAGES))
    targets = applied_targets(arena.layout, (), MAX_ADDED)
    max_chosen = max((each.num_chosen for each in decoder.mixtures), default=0)
    lora = NativeLoraOps(arena, targets, MAX_TOKENS, MAX_ROWS, max_chosen)
    work = Workspace.allocate(decoder, MAX_TOKENS, MAX_ROWS, arena.flat.dtype, MAX_ADDED)
    work.flat.fill_(0xFF)
    backend = NativeBackend(
        decoder,
        lambda *memory: NativeTransformer(
            decoder, memory[0], memory[1], step, work, lora, library, memory[2]
        ),
        weights,
        model.caches(),
        Reload(model.caches, lambda: weights, model.states, lambda arena: None),
        arena,
        step,
        lora,
        library,
        model.states(),
    )
    return backend, work


def names_apart(decoder: Decoder, work: Workspace) -> set[str]:
    """Returns the values that have memory between their rows."""
    return {
        value.name
        for narrowing in (Narrowing.IN_LAST_LAYER, Narrowing.BEFORE_HEAD)
        for at in work.tensors(
            operations(decoder, narrowing), is_apart=narrowing is Narrowing.BEFORE_HEAD
        )
        for value, tensor in at.items()
        if value.width and tensor.stride(0) > value.width
    }


@pytest.mark.parametrize("feature", FEATURES)
def test_rows_that_are_apart_change_no_bit(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of logits of whole steps, and of layers and the head apart, with adapters of every kind.
    Between rows lies NaN."""
    decoder = make_decoder(feature, tmp_path, **EVEN_LINES)
    for dtype in (torch.float32, torch.bfloat16):
        model = Model.make(decoder, dtype, torch.device("cpu")).with_kinds(MAX_ADDED)
        weights = random_weights(
            decoder, dtype, torch.Generator().manual_seed(0), PackedProjections()
        )

        def batches(prompt_logprobs: int | None = None) -> list[core.Batch]:
            return steps([SUM, -1, 0, 1, 2], decoder.vocab_size, prompt_logprobs)

        found = []
        for least_bytes, is_apart in ((1 << 20, False), (1, True)):
            monkeypatch.setattr(host_memory, "_LONG_ROW_BYTES", least_bytes)
            backend, work = native_backend(model, weights)
            apart = names_apart(decoder, work)
            assert bool(apart) == is_apart
            found.append(run(backend, batches()) + run_scored(backend, batches(1)[:2]))
            assert backend.num_lora_steps > 0
        assert apart == APART.get(feature, apart)
        for dense, spaced in zip(*found, strict=True):
            assert torch.equal(dense.values, spaced.values), dtype
            assert not dense.values.isnan().any()
