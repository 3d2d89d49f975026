"""The parts of all ranks are the whole: their weights, and the logits that they compute."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contract.images import layout_rules
from inference_svc.adapters.targets import build_layout
from inference_svc.errors import UnsupportedModel
from inference_svc.model import architectures
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint import weights as reading
from inference_svc.model.checkpoint.weights import ModelWeights, load_weights
from inference_svc.model.description import Cut, Decoder, ExpertsProjection, Norm, Projection, Rank
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import TorchProjections
from inference_svc.model.operations import Numbers, Scalar, Table, WeightSpec, weight_key
from inference_svc.model.recurrent_states import RecurrentStates
from inference_svc.model.sharding.description import of_rank
from inference_svc.model.sharding.stages import balanced_ends, of_stage
from inference_svc.model.transformer import Transformer
from inference_svc.model.walk import weights_of
from kernels.experts import padded_rows
from kernels.quantised import Activations, Codes, WeightFormat
from tests.support.inference.ranks import exchanges, on_ranks
from tests.support.models.decoders import NUM_CELLS, TorchDecoder
from tests.support.models.families import MODELS
from tests.support.models.quantised import with_format
from tests.support.models.saved_weights import FORMATS, pack
from tests.support.pairs import crossed, in_turns, long_but
from tests.support.pictures.models import save_config

pytestmark = pytest.mark.matrix

PAGE_SIZE = 4
SHAPES = (
    "llama-no-gqa-biases",
    "phi3-partial-sliding",
    "gpt-oss",
    "qwen3-moe",
    "gemma4",
    "qwen3_5",
    "qwen3-next",
    "lfm2",
    "olmo2",
)
"""Models whose checkpoints have weights in most forms: fused, of experts, transposed, of several
kinds of outputs in one; and norms of heads."""
ONE_OF_EACH = {MODELS[name][0]: name for name in (*reversed(MODELS), *SHAPES)}
"""A model of each family."""
STAGED = [name for name in MODELS if not name.startswith("gemma4")]
"""Models whose layers can be in several stages."""
MIXTURES = [name for name in MODELS if any("experts" in key for key in MODELS[name][1])]
parts_of_experts = pytest.mark.parametrize(
    ("name", "expert_parallel"), crossed([("qwen3-moe", 2), ("gpt-oss", 4)], MIXTURES, [2, 4])
)


def parts_of(
    decoder: Decoder, count: int, expert_parallel: int = 1, num_stages: int = 1
) -> list[Decoder]:
    """Returns the parts of all ranks, stage by stage."""
    stages = [of_stage(decoder, index, num_stages) for index in range(num_stages)]
    return [
        of_rank(stage, Rank(index, count), expert_parallel)
        for stage in stages
        for index in range(count)
    ]


def load(folder: Path, decoder: Decoder) -> ModelWeights[Any]:
    return load_weights(folder, decoder, torch.float32, "cpu", TorchProjections())


def decoder_of(folder: Path, decoder: Decoder, exchange: Any) -> TorchDecoder:
    cache = KVCaches.allocate(
        decoder, num_pages=NUM_CELLS // PAGE_SIZE, page_size=PAGE_SIZE, dtype=torch.float32
    )
    transformer = Transformer(decoder, load(folder, decoder), exchange)
    states = RecurrentStates.allocate(decoder, 2) if decoder.recurrences else None
    return TorchDecoder(cache, transformer=transformer, states=states)


@pytest.mark.parametrize("name", long_but([*ONE_OF_EACH.values()], MODELS))
def test_logits_of_four_ranks(name, folder_of, relative_rms):
    compare_logits(folder_of(name), 4, relative_rms)


@pytest.mark.parametrize("name", ["llama", "llama-one-kv-head-tied", "qwen2-tied"])
def test_logits_of_two_ranks(name, folder_of, relative_rms):
    compare_logits(folder_of(name), 2, relative_rms)


@parts_of_experts
def test_logits_of_parts_of_experts(name, expert_parallel, folder_of, relative_rms):
    """Some of the experts, whole, or cut over two ranks that have the same."""
    compare_logits(folder_of(name), 4, relative_rms, expert_parallel)


@pytest.mark.parametrize(
    ("name", "count"), crossed([("llama", 2), ("qwen2-tied", 1), ("qwen3_5", 2)], STAGED, [1, 2])
)
def test_logits_of_stages(name, count, folder_of, relative_rms):
    """Of as many stages as layers, of which some have no attention, or no recurrence."""
    folder = folder_of(name)
    num_stages = load_description(folder).num_layers
    compare_logits(folder, count, relative_rms, num_stages=num_stages)


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_stages_are_as_equal_as_layers_allow(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    ways = [(*ends, len(sizes)) for ends in itertools.combinations(range(1, len(sizes)), count - 1)]

    def largest(ends: Sequence[int]) -> int:
        return max(sum(sizes[first:end]) for first, end in itertools.pairwise((0, *ends)))

    found = balanced_ends(sizes, count)
    assert found in ways
    assert largest(found) == min(map(largest, ways))


def test_the_stage_of_a_tower_has_fewer_layers(tmp_path: Path) -> None:
    """The more so, the more ranks share its layers: one of them has all of the tower."""
    folder = save_config("Qwen3VL", tmp_path / "model")
    decoder = load_description(folder, with_pictures=True)
    decoder = replace(decoder, blocks=decoder.blocks * 40)
    texts = of_stage(replace(decoder, pictures=None), 0, 2)
    ends = [of_stage(decoder, 0, 2, count).layers.stop for count in (1, 4)]
    assert texts.layers.stop > ends[0] > ends[1] > 0


def test_stages_that_layers_cannot_make(folder_of):
    decoder = load_description(folder_of("llama"))
    with pytest.raises(UnsupportedModel, match="--pipeline-parallel 9: num_hidden_layers = "):
        of_stage(decoder, 0, 9)
    with pytest.raises(
        UnsupportedModel, match="--pipeline-parallel 2: the model does not generate"
    ):
        of_stage(replace(decoder, generates=False), 0, 2)
    inputs = load_description(folder_of("gemma4"))
    with pytest.raises(UnsupportedModel, match="the model has per-layer inputs"):
        of_stage(inputs, 0, 2)
    alone = {"layer_input": None, "layer_input_post_norm": None}
    blocks = tuple(replace(block, **alone) for block in inputs.blocks)
    with pytest.raises(UnsupportedModel, match=r"layers\[.\] reads the keys .* of layers\[.\]"):
        of_stage(replace(inputs, layer_inputs=None, blocks=blocks), 0, 3)


def compare_logits(
    folder: Path,
    count: int,
    relative_rms: Any,
    expert_parallel: int = 1,
    num_stages: int = 1,
) -> None:
    whole = load_description(folder).for_length(NUM_CELLS)
    token_ids = torch.randint(0, whole.vocab_size, (40,)).tolist()
    expected = decoder_of(folder, whole, None).logits(token_ids, chunk=40)
    parts = parts_of(whole, count, expert_parallel, num_stages)
    all_exchanges = exchanges(count, num_stages)

    def run(index: int) -> Tensor:
        decoder = decoder_of(folder, parts[index], all_exchanges[index])
        return decoder.logits(token_ids, chunk=17)

    first, *others = on_ranks(len(parts), run)
    assert relative_rms(expected, first) <= 1e-5
    if num_stages > 1:
        *others, last = others[: -count + 1 or None]
        assert torch.equal(last, first)
        assert all(each.numel() == 0 for each in others)
        return
    # Only the first scales and caps the logits.
    assert all(torch.equal(others[0], each) for each in others)


def outputs_of(spec: WeightSpec) -> Iterator[tuple[int, Cut]]:
    """Yields the first row here, and the range in the whole, of each run of a weight's rows."""
    if isinstance(spec, Norm):
        yield 0, spec.cut or Cut(0, spec.size, spec.size)
        return
    if isinstance(spec, Table):
        yield 0, spec.cut or Cut(0, spec.num_rows, spec.num_rows)
        return
    if isinstance(spec, Numbers):
        num_rows = sum(each.size for each in spec.cuts) or spec.whole_shape[0]
        cuts = spec.cuts or (Cut(0, num_rows, num_rows),)
        yield from one_behind_the_other([each.times(spec.size // num_rows) for each in cuts])
        return
    assert isinstance(spec, Projection | ExpertsProjection)
    experts = spec.experts if isinstance(spec, ExpertsProjection) else Cut(0, 1, 1)
    step = padded_rows(spec.out_features) if isinstance(spec, ExpertsProjection) else 0
    whole_size = sum(member.whole_size for member in spec.members)
    whole_step = padded_rows(whole_size) if isinstance(spec, ExpertsProjection) else 0
    for expert in range(*experts.range):
        cuts = [each for member in spec.members for each in member.outputs]
        here, place = (expert - experts.start) * step, expert * whole_step
        yield from one_behind_the_other(cuts, here, place)


def one_behind_the_other(
    cuts: list[Cut], here: int = 0, whole: int = 0
) -> Iterator[tuple[int, Cut]]:
    for start, end, size in cuts:
        yield here, Cut(whole + start, whole + end, size)
        here, whole = here + end - start, whole + size


def values_of(weights: ModelWeights[Any], spec: WeightSpec, key: str) -> tuple[Tensor, Any]:
    """Returns a weight, [out, in] or [out], and its bias."""
    if isinstance(spec, Table):
        return weights.tables[key], None
    if isinstance(spec, Numbers):
        return weights.numbers[key], None
    if isinstance(spec, Norm):
        return weights.norms[key].weight, None
    linear = weights.projections[key]
    return linear.rows(0, linear.out_features), linear.bias


@pytest.mark.parametrize("name", long_but(SHAPES, MODELS))
def test_parts_are_the_whole(name, folder_of):
    check_parts(folder_of(name))


@parts_of_experts
def test_parts_of_experts_are_the_whole(name, expert_parallel, folder_of):
    check_parts(folder_of(name), expert_parallel)


def check_parts(folder: Path, expert_parallel: int = 1) -> None:
    """Each number of the whole is on a rank, where it belongs; biases of sums are on one."""
    whole = load_description(folder)
    expected, parts = load(folder, whole), parts_of(whole, 4, expert_parallel)
    loaded = [load(folder, part) for part in parts]
    for index, weight in enumerate(weights_of(whole)):
        spec, key = weight.spec, weight_key(weight)
        if isinstance(spec, Scalar):
            continue
        values, bias = values_of(expected, spec, key)
        seen, sums = torch.zeros_like(values), None if bias is None else torch.zeros_like(bias)
        for part, own in zip(parts, loaded, strict=True):
            part_spec = weights_of(part)[index].spec
            found, own_bias = values_of(own, part_spec, key)
            inputs = getattr(part_spec, "in_cut", None)
            columns = slice(None) if inputs is None else slice(*inputs.range)
            for here, (start, end, _) in outputs_of(part_spec):
                rows = found[here : here + end - start]
                if values.dim() == 2:
                    assert torch.equal(rows, values[start:end, columns])
                    seen[start:end, columns] = 1
                else:
                    assert torch.equal(rows, values[start:end])
                    seen[start:end] = 1
                if sums is not None:
                    if inputs is None:
                        assert torch.equal(own_bias[here : here + len(rows)], bias[start:end])
                        sums[start:end] = bias[start:end]
                    else:
                        sums[start:end] += own_bias[here : here + len(rows)]
        held = torch.zeros_like(values)
        for _, (start, end, _) in outputs_of(spec):
            held[start:end] = 1
            assert sums is None or torch.equal(sums[start:end], bias[start:end])
        assert torch.equal(seen, held)


class Counting:
    """A tensor of a file that counts the bytes that are read of it."""

    def __init__(self, stored: Any, read: list[int]) -> None:
        self._stored, self._read = stored, read

    def __getitem__(self, index: Any) -> Tensor:
        found = self._stored[index]
        self._read.append(found.nbytes)
        return found


@pytest.mark.parametrize(
    ("name", "expert_parallel"),
    [
        ("llama-no-gqa-biases", 1),
        ("phi3-partial-sliding", 1),
        ("gpt-oss", 1),
        ("gpt-oss", 4),
        ("qwen3-moe", 4),
    ],
)
def test_a_rank_reads_its_part(name, expert_parallel, folder_of, monkeypatch):
    folder, read = folder_of(name), list[int]()
    real = reading.opened

    @contextmanager
    def opened(*args: Any, **options: Any) -> Iterator[Counting]:
        with real(*args, **options) as stored:
            yield Counting(stored, read)

    monkeypatch.setattr(reading, "opened", opened)
    whole = load_description(folder)
    load(folder, whole)
    all_bytes = sum(read)
    for part in parts_of(whole, 4, expert_parallel):
        read.clear()
        held_bytes = load(folder, part).num_bytes
        assert sum(read) <= held_bytes
        assert held_bytes < 0.4 * all_bytes


@pytest.mark.parametrize(
    ("name", "changes", "count", "message"),
    [
        ("Llama", {}, 4, r"layers\[0\].num_heads = 6 does not divide by 4; .* do: 1, 2, 3"),
        ("Llama", {"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "num_kv_heads = 3"),
        ("Llama", {"intermediate_size": 81}, 2, r"layers\[0\].dense.size = 81 does not divide"),
        (
            "Qwen3Moe",
            MODELS["qwen3-moe"][1] | {"moe_intermediate_size": 25},
            2,
            "experts.size = 25",
        ),
        ("Lfm2", MODELS["lfm2"][1], 5, "short_conv.num_channels = 48 does not divide by 5"),
        ("Qwen3_5", MODELS["qwen3_5"][1], 3, r"layers\[0\].gated_delta.num_key_heads = 2"),
        ("Llama", {"vocab_size": 4, "num_key_value_heads": 6}, 3, "decoder.vocab_size = 4 leaves"),
    ],
)
def test_refused_by_name(name, changes, count, message, random_model, save_model):
    whole = load_description(save_model(random_model(name, **changes)))
    with pytest.raises(UnsupportedModel, match=f"--tensor-parallel {count}: .*{message}"):
        parts_of(whole, count)


def test_experts_that_do_not_divide(random_model, save_model):
    family, changes = MODELS["qwen3-moe"]
    whole = load_description(save_model(random_model(family, **(changes | {"num_experts": 7}))))
    message = r"--expert-parallel 2: layers\[0\].experts.num_experts = 7 does not divide by 2"
    with pytest.raises(UnsupportedModel, match=message):
        parts_of(whole, 2, expert_parallel=2)


def test_a_model_without_experts_has_no_parts_of_them(folder_of):
    whole = load_description(folder_of("llama"))
    with pytest.raises(UnsupportedModel, match="--expert-parallel 2: the model has no experts"):
        parts_of(whole, 2, expert_parallel=2)


@pytest.mark.parametrize(
    ("name", "expert_parallel"),
    [("llama", 1), pytest.param("qwen3-moe", 1, marks=pytest.mark.long), ("qwen3-moe", 2)],
)
def test_logits_of_quantised_weights(
    name, expert_parallel, random_model, save_model, relative_rms, monkeypatch
):
    """Groups of 32 inputs, which two ranks do not cut."""
    family, changes = MODELS[name]
    sizes = {"intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4, "hidden_size": 96}
    sizes |= {"moe_intermediate_size": 64} if "num_experts" in changes else {}
    folder = save_model(random_model(family, **(changes | sizes)))

    def load_in_few_bits(folder: Path) -> Decoder:
        return architectures.load_description(folder, "int4")

    monkeypatch.setitem(globals(), "load_description", load_in_few_bits)
    compare_logits(folder, 2, relative_rms, expert_parallel)
    with pytest.raises(UnsupportedModel, match=r"has groups of [^;]*; use --quantize int8, or"):
        parts_of(load_in_few_bits(folder), 4)


STORED = {
    "fp8": ("Llama", {"intermediate_size": 96, "head_dim": 24}),
    "mxfp4": ("GptOss", MODELS["gpt-oss"][1] | {"intermediate_size": 128, "head_dim": 32}),
}
"""The models of forms whose groups have other sizes, or are not of Llama's weights."""


@pytest.mark.parametrize("form", FORMATS)
def test_logits_of_stored_forms(form, random_model, save_model, relative_rms):
    """Groups, blocks and scales of checkpoints that are quantised already."""
    sizes = {"intermediate_size": 128, "head_dim": 32, "num_attention_heads": 4, "hidden_size": 96}
    family, changes = STORED.get(form, ("Llama", {}))
    folder = save_model(random_model(family, **(sizes | changes)))
    pack(folder, form)
    compare_logits(folder, 2, relative_rms)


def test_rounded_inputs_are_refused(folder_of):
    form = WeightFormat(Codes.INT8, activations=Activations.INT8)
    whole = with_format(load_description(folder_of("llama")), form)
    with pytest.raises(
        UnsupportedModel, match=r"layers\[0\].o.format = .* rounds a token's inputs"
    ):
        parts_of(whole, 2)


@pytest.mark.parametrize(
    ("name", "codes"),
    in_turns([("llama",), ("qwen3-moe",), ("qwen3_5",), ("gpt-oss",)], ["int8", "fp8"]),
)
def test_logits_of_scales_of_all_inputs(name, codes, folder_of, relative_rms, monkeypatch):
    """Ranks have a part of the inputs, and the whole's scales."""

    def load_in_few_bits(folder: Path) -> Decoder:
        return architectures.load_description(folder, codes)

    folder = folder_of(name)
    monkeypatch.setitem(globals(), "load_description", load_in_few_bits)
    compare_logits(folder, 4, relative_rms)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_kinds_of_outputs_of_one_layer_are_targets(name, folder_of):
    """Adapters, and restrictions to some targets, name the layer."""
    whole = load_description(folder_of(name))
    expected = build_layout(whole, "base", torch.float32)
    for part in parts_of(whole, 4):
        layout = build_layout(part, "base", torch.float32)
        layout_rules.validate(layout.announced(2)[0])
        assert layout.modules == expected.modules
        named = {each.name: each.out_features for each in layout.targets}
        for each in layout.targets:
            for other in each.other_names:
                named[other.name] = named.get(other.name, 0) + each.out_features
        assert all(named[each.name] == each.out_features for each in expected.targets)


def test_one_rank_has_the_whole(folder_of):
    whole = load_description(folder_of("llama"))
    assert parts_of(whole, 1) == [whole]
