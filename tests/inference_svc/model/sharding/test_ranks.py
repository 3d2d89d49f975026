"""The parts of all ranks are the whole: their weights, and the logits that they compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model import architectures
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint import weights as reading
from inference_svc.model.checkpoint.weights import ModelWeights, load_weights
from inference_svc.model.description import Cut, Decoder, ExpertsProjection, Projection, Rank
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import TorchProjections
from inference_svc.model.operations import Numbers, Table, WeightSpec, weight_key
from inference_svc.model.sharding.description import of_rank
from inference_svc.model.transformer import Transformer
from inference_svc.model.walk import weights_of
from kernels.experts import padded_rows
from tests.support.inference.ranks import exchanges, on_ranks
from tests.support.models.decoders import NUM_CELLS, TorchDecoder
from tests.support.models.families import MODELS
from tests.support.pairs import long_but

PAGE_SIZE = 4
DIVISIBLE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
}
"""Sizes that four ranks divide, in the place of a family's."""
REFUSED = ("Olmo2", "Olmo3", "Olmoe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Lfm2", "Lfm2Moe")
"""Families with parts that cannot be cut yet: norms over all heads, and recurrences."""


CUT = [name for name, (family, _) in MODELS.items() if family not in REFUSED]


SHAPES = ("llama-no-gqa-biases", "phi3-partial-sliding", "gpt-oss", "qwen3-moe", "gemma4")
"""Models whose checkpoints have weights in most forms: fused, of experts, transposed."""


def parts_of(decoder: Decoder, count: int) -> list[Decoder]:
    return [of_rank(decoder, Rank(index, count)) for index in range(count)]


def load(folder: Path, decoder: Decoder) -> ModelWeights[Any]:
    return load_weights(folder, decoder, torch.float32, "cpu", TorchProjections())


@pytest.fixture(scope="module")
def folder_of(random_model, tmp_path_factory):
    """`folder_of(name)`: a model of `MODELS` whose sizes four ranks divide."""

    @lru_cache(maxsize=2)
    def make(name: str) -> Path:
        family, changes = MODELS[name]
        model = random_model(family, **(changes | divisible(family, changes)))
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        return folder

    return make


def divisible(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    found = {key: DIVISIBLE[key] for key in ("num_attention_heads", "num_key_value_heads")}
    found |= {key: DIVISIBLE[key] for key in DIVISIBLE.keys() & changes.keys()}
    if changes.get("num_key_value_heads") == 1:
        found["num_key_value_heads"] = 1
    return found | ({"hidden_size": 64} if family == "Phi3" else {})


def decoder_of(folder: Path, decoder: Decoder, exchange: Any) -> TorchDecoder:
    cache = KVCaches.allocate(
        decoder, num_pages=NUM_CELLS // PAGE_SIZE, page_size=PAGE_SIZE, dtype=torch.float32
    )
    return TorchDecoder(cache, transformer=Transformer(decoder, load(folder, decoder), exchange))


@pytest.fixture(scope="module", params=CUT)
def folder(request, folder_of):
    """A model of each family in turn, for all tests that want one."""
    return folder_of(request.param)


def test_logits_of_four_ranks(folder, relative_rms):
    compare_logits(folder, 4, relative_rms)


@pytest.mark.parametrize("name", ["llama", "llama-one-kv-head-tied", "qwen2-tied"])
def test_logits_of_two_ranks(name, folder_of, relative_rms):
    compare_logits(folder_of(name), 2, relative_rms)


def compare_logits(folder: Path, count: int, relative_rms: Any) -> None:
    whole = load_description(folder).for_length(NUM_CELLS)
    token_ids = torch.randint(0, whole.vocab_size, (40,)).tolist()
    expected = decoder_of(folder, whole, None).logits(token_ids, chunk=40)
    parts, all_exchanges = parts_of(whole, count), exchanges(count)

    def run(index: int) -> Tensor:
        decoder = decoder_of(folder, parts[index], all_exchanges[index])
        return decoder.logits(token_ids, chunk=17)

    first, *others = on_ranks(count, run)
    assert relative_rms(expected, first) <= 1e-5
    # Only the first scales and caps the logits.
    assert all(torch.equal(others[0], each) for each in others)


def outputs_of(spec: WeightSpec) -> Iterator[tuple[int, Cut]]:
    """Yields the first row here, and the range in the whole, of each run of a weight's rows."""
    if isinstance(spec, Table | Numbers):
        size = spec.num_rows if isinstance(spec, Table) else spec.size
        yield 0, spec.cut or Cut(0, size, size)
        return
    assert isinstance(spec, Projection | ExpertsProjection)
    experts = spec.num_experts if isinstance(spec, ExpertsProjection) else 1
    step = padded_rows(spec.out_features) if isinstance(spec, ExpertsProjection) else 0
    whole_size = sum(member.outputs.whole for member in spec.members)
    whole_step = padded_rows(whole_size) if isinstance(spec, ExpertsProjection) else 0
    for expert in range(experts):
        here, whole = expert * step, expert * whole_step
        for member in spec.members:
            start, end, size = member.outputs
            yield here, Cut(whole + start, whole + end, size)
            here, whole = here + end - start, whole + size


def values_of(weights: ModelWeights[Any], spec: WeightSpec, key: str) -> tuple[Tensor, Any]:
    """Returns a weight, [out, in] or [out], and its bias."""
    if isinstance(spec, Table):
        return weights.tables[key], None
    if isinstance(spec, Numbers):
        return weights.numbers[key], None
    linear = weights.projections[key]
    return linear.rows(0, linear.out_features), linear.bias


@pytest.mark.parametrize("name", long_but(SHAPES, CUT))
def test_parts_are_the_whole(name, folder_of):
    """Each number of the whole is on a rank, where it belongs; biases of sums are on one."""
    folder = folder_of(name)
    whole = load_description(folder)
    expected, parts = load(folder, whole), parts_of(whole, 4)
    loaded = [load(folder, part) for part in parts]
    for index, weight in enumerate(weights_of(whole)):
        spec, key = weight.spec, weight_key(weight)
        if not isinstance(spec, Table | Numbers | Projection | ExpertsProjection):
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


@pytest.mark.parametrize("name", ["llama-no-gqa-biases", "phi3-partial-sliding", "gpt-oss"])
def test_a_rank_reads_its_part(name, folder_of, monkeypatch):
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
    for part in parts_of(whole, 4):
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
        ("Olmo2", {}, 2, "q_norm.size = 48 is over all heads at once"),
        ("Lfm2", MODELS["lfm2"][1], 2, "mixer = short_conv keeps a recurrent state"),
        ("Llama", {"vocab_size": 4, "num_key_value_heads": 6}, 3, "decoder.vocab_size = 4 leaves"),
    ],
)
def test_refused_by_name(name, changes, count, message, random_model, save_model):
    whole = load_description(save_model(random_model(name, **changes)))
    with pytest.raises(UnsupportedModel, match=f"--tensor-parallel {count}: .*{message}"):
        parts_of(whole, count)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_logits_of_quantised_weights(name, random_model, save_model, relative_rms, monkeypatch):
    """Groups of 32 inputs, which two ranks do not cut."""
    family, changes = MODELS[name]
    sizes = {"intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4, "hidden_size": 96}
    sizes |= {"moe_intermediate_size": 64} if "num_experts" in changes else {}
    folder = save_model(random_model(family, **(changes | sizes)))

    def load_in_few_bits(folder: Path) -> Decoder:
        return architectures.load_description(folder, "int4")

    monkeypatch.setitem(globals(), "load_description", load_in_few_bits)
    compare_logits(folder, 2, relative_rms)
    with pytest.raises(UnsupportedModel, match="has groups of"):
        parts_of(load_in_few_bits(folder), 4)


@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_scales_of_all_inputs_are_refused(codes, folder_of):
    whole = load_description(folder_of("llama"), codes)
    with pytest.raises(UnsupportedModel, match="has a scale for all inputs"):
        parts_of(whole, 2)


def test_one_rank_has_the_whole(folder_of):
    whole = load_description(folder_of("llama"))
    assert parts_of(whole, 1) == [whole]
