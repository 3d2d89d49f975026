"""Logits equal those of transformers, for every architecture and everything that configs vary."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from inference_svc.model.architectures import families
from tests.support.models.families import LONGROPE, MODELS
from tests.support.models.whole_models import WHOLE
from tests.support.pairs import pairs
from tests.support.pictures.models import READERS

pytestmark = pytest.mark.matrix

NUM_TOKENS = 100
ENDS, NUM_DECODED = (8, 27, 50, 73, 100), 8
"""Where rows end that decode so many tokens: the first with no context, the others with more."""


@pytest.mark.parametrize("path", ["torch", "native"])
def test_longrope_is_chosen_by_the_longest_sequence(
    path, random_model, save_model, load_decoder, relative_rms
):
    """One model on either side of the original length, 64 tokens."""
    model = random_model("Phi3", **LONGROPE, original_max_position_embeddings=64)
    folder = save_model(model)
    token_ids = torch.randint(0, model.config.vocab_size, (100,)).tolist()
    for max_model_len, given in ((64, token_ids[:64]), (65, token_ids)):
        with torch.no_grad():
            expected = model(torch.tensor([given])).logits[0]
        decoder = load_decoder(folder, path=path, max_model_len=max_model_len)
        assert relative_rms(expected, decoder.logits(given, chunk=30)) <= 1e-4


def test_every_architecture_has_a_row() -> None:
    tested = {f"{family}ForCausalLM" for family, _ in MODELS.values()}
    tested |= {f"{family}ForConditionalGeneration" for family in WHOLE}
    tested |= {f"{family}ForConditionalGeneration" for family, _ in READERS.values()}
    assert tested >= set(families())


@dataclass(frozen=True)
class Oracle:
    """A random model of transformers, saved, and its logits."""

    folder: Path
    token_ids: list[int]
    logits: dict[torch.dtype, torch.Tensor]
    """In fp32 and in bf16."""


@pytest.fixture(scope="module")
def oracle_of(random_model, tmp_path_factory):
    """`oracle_of(name)`; cells of a model follow each other, and the last is remembered."""

    @lru_cache(maxsize=1)
    def make(name: str) -> Oracle:
        family, changes = MODELS[name]
        model = random_model(family, **changes)
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        token_ids = torch.randint(0, model.config.vocab_size, (NUM_TOKENS,)).tolist()
        with torch.no_grad():
            logits = {
                dtype: model.to(dtype)(torch.tensor([token_ids])).logits[0].float()
                for dtype in (torch.float32, torch.bfloat16)
            }
        return Oracle(folder, token_ids, logits)

    return make


@pytest.mark.parametrize(("name", "dtype", "path"), pairs(MODELS))
def test_logits(name, dtype, path, oracle_of, load_decoder, relative_rms):
    """In bf16 they are as near to those in fp32 as transformers' are; those of most tokens, as some
    have experts of nearly equal scores."""
    dtype, oracle = getattr(torch, dtype), oracle_of(name)
    decoder = load_decoder(oracle.folder, dtype, path=path)
    expected = oracle.logits[torch.float32]

    def error(found: torch.Tensor) -> float:
        if dtype == torch.float32:
            return relative_rms(expected, found)
        return statistics.median(map(relative_rms, expected, found))

    tolerance = max(1e-4, 1.25 * error(oracle.logits[dtype]))
    got = decoder.logits(oracle.token_ids, chunk=NUM_TOKENS)
    assert got.dtype == torch.float32
    assert error(got) <= tolerance
    # The same one by one: decode rows over a paged context.
    decoded = decoder.decoded_logits(oracle.token_ids, ENDS, NUM_DECODED)
    expected = torch.stack([expected[end - NUM_DECODED : end] for end in ENDS]).flatten(0, 1)
    assert error(decoded.flatten(0, 1)) <= tolerance


def test_fp16(random_model, save_model, load_decoder, relative_rms):
    model = random_model("Llama")
    decoder = load_decoder(save_model(model), torch.float16)
    token_ids = torch.randint(0, model.config.vocab_size, (20,)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]
    assert relative_rms(expected, decoder.logits(token_ids, chunk=1)) <= 1e-2


def test_greedy_tokens(random_model, save_model, load_decoder):
    model = random_model("Qwen3", head_dim=16)
    decoder = load_decoder(save_model(model))
    prompt = torch.randint(0, model.config.vocab_size, (1, 9))
    expected = model.generate(prompt, max_new_tokens=64, do_sample=False, eos_token_id=None)
    sequence = decoder.add(expected[0].tolist())
    sequence.token_ids = prompt[0].tolist()
    start = 0
    while len(sequence.token_ids) < expected.shape[1]:
        logits = decoder.step([(sequence, start, len(sequence.token_ids) - start, True)])
        start = len(sequence.token_ids)
        sequence.token_ids.append(int(logits[0].argmax()))
    assert sequence.token_ids == expected[0].tolist()
