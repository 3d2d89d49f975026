"""The decoder's logits depend neither on chunks nor on other rows; adapters enter where they
should."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from inference_svc.model.layers import Linear
from kernels.elementwise import NormWeight
from kernels.elementwise.addend import Addend

WINDOWED = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}


@pytest.fixture(params=["torch", "native", "tiled"])
def decoder(request, random_model, save_model, load_decoder):
    page_size = 16 if request.param == "tiled" else 4
    folder = save_model(random_model("Qwen3", head_dim=16, **WINDOWED))
    return load_decoder(folder, page_size=page_size, path=request.param)


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 89, (count,), generator=generator).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill(chunk, decoder, relative_rms):
    token_ids = tokens(50)
    whole = decoder.logits(token_ids, chunk=50)
    assert relative_rms(whole, decoder.logits(token_ids, chunk)) <= 1e-5


def test_mixed_batch_equals_single_rows(decoder, relative_rms):
    """Decode rows, whole prompts, and chunks that do not sample, in one step in any order."""
    shares = [(30, 29, 1), (12, 0, 12), (25, 10, 15), (8, 7, 1), (1, 0, 1), (20, 3, 6), (17, 16, 1)]
    expected = []
    for seed, (length, start, count) in enumerate(shares):
        expected.append(decoder.logits(tokens(length, seed), chunk=length)[start + count - 1])
    sequences = [decoder.add(tokens(length, seed)) for seed, (length, _, _) in enumerate(shares)]
    for sequence, (_, start, _) in zip(sequences, shares, strict=True):
        if start:
            decoder.step([(sequence, 0, start, False)])
    rows = [
        (sequence, start, count, start + count == length)
        for sequence, (length, start, count) in zip(sequences, shares, strict=True)
    ]
    got = decoder.step(rows)
    assert [row[3] for row in rows].count(False) == 1
    for one, other in zip(expected, got, strict=True):
        assert relative_rms(one, other) <= 1e-5


def test_step_without_sampling_rows(decoder, relative_rms):
    """Their last logits say whether they are computed soundly."""
    expected = decoder.logits(tokens(10), chunk=10)[3]
    (got,) = decoder.step([(decoder.add(tokens(10)), 0, 4, False)])
    assert relative_rms(expected, got) <= 1e-5


@dataclass
class DenseLora:
    """Adapters as plain matrices, one for all tokens: a [in, out] delta per group. `is_beside`:
    wherever the reader adds it, it is left to the reader."""

    deltas: dict[str, torch.Tensor]
    embedding: torch.Tensor
    head: torch.Tensor
    is_beside: bool = False
    groups: list[str] = field(default_factory=list)
    head_rows: list[int] = field(default_factory=list)
    num_added_tokens = 0

    def add(
        self, group: str, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self.groups.append(group)
        out += x @ self.deltas[group]

    def beside(
        self, group: str, x: torch.Tensor, linear: Linear
    ) -> tuple[torch.Tensor, Addend] | None:
        if not self.is_beside:
            return None
        self.groups.append(group)
        slots = torch.zeros(len(x), dtype=torch.int32)
        return linear(x), Addend(x @ self.deltas[group], slots)

    def add_embedding(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        out += self.embedding[token_ids]

    def add_head(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.head_rows.append(len(x))
        out += x @ self.head

    def norm(self, module: str, norm: NormWeight, *, logits_only: bool = False) -> NormWeight:
        return norm


MEMBERS = {
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "o": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}


@pytest.mark.parametrize("is_beside", [False, True])
def test_lora_equals_merged_weights(
    random_model, save_model, load_decoder, relative_rms, is_beside
):
    """Every group's delta gives what transformers computes with the delta merged into the weights
    of that name."""
    model = random_model("Qwen2")
    decoder = load_decoder(save_model(model))
    token_ids = tokens(30)
    base = decoder.logits(token_ids, chunk=30)
    modules = dict(model.named_modules())
    deltas: dict[str, torch.Tensor] = {}

    def merge(name: str) -> torch.Tensor:
        weight = modules[name].weight
        delta = 0.3 * weight.std() * torch.randn_like(weight)
        with torch.no_grad():
            weight += delta
        return delta

    for layer in range(3):
        for group, members in MEMBERS.items():
            merged = [merge(f"model.layers.{layer}.{member}") for member in members]
            deltas[f"layers.{layer}.{group}"] = torch.cat(merged).T.contiguous()
    embedding, head = merge("model.embed_tokens"), merge("lm_head").T.contiguous()
    lora = DenseLora(deltas, embedding, head, is_beside)
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]
    decoder.lora = lora
    got = decoder.logits(token_ids, 20)
    assert relative_rms(expected, got) <= 1e-4
    assert relative_rms(base, got) > 0.1
    assert lora.groups == list(deltas) * 2
    assert lora.head_rows == [20, 10]
