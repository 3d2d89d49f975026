"""The memory of a native program's values."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.backends.native.needs import held_bytes, memory_needs
from inference_svc.backends.native.projections import PackedProjections
from inference_svc.backends.native.workspace import Workspace, place, workspace_bytes
from inference_svc.core import EngineConfig
from inference_svc.host import cpus
from inference_svc.model.checkpoint.parameters import parameters
from inference_svc.model.lifetimes import ValueSizes, last_uses
from inference_svc.model.operations import Op, Rows, Value
from inference_svc.model.walk import Narrowing, operations
from kernels.quantised import WeightFormat
from tests.support.gpu.features import FEATURES
from tests.support.gpu.models import make_decoder
from tests.support.models.quantised import FORMATS, with_format

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
