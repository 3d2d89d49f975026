"""Our engine against transformers + peft: the same logits, greedy tokens, and log probabilities of
prompts."""

from __future__ import annotations

from collections.abc import Callable
from operator import le
from statistics import mean

import pytest
import torch

from inference_svc.model.architectures import families
from tests.support.models.parity import RecordingSampler, decile_rms, prompts, relative_rms
from tests.support.models.zoo import MODELS, PARAMETERS, AdapterSpec, Zoo, make_zoo, modules_of
from tests.support.pairs import BOTH, PATHS, long_but, pairs
from tests.system.prompt_scores import check, scores


@pytest.mark.parametrize(("kind", "dtype", "path"), pairs(MODELS))
def test_a_mixed_batch_has_the_oracles_logits(
    kind: str, dtype: str, path: str, start: Callable, zoos: Callable
) -> None:
    """The base model, twice, and seven adapters of ranks 1 to 64; in bfloat16 three of them, of
    most models."""
    every = 1 if dtype == "float32" or kind in BOTH else 2
    # Tokens in float32 are the oracle's or not; in bfloat16 more of them make a better mean.
    num_tokens = 8 if dtype == "float32" else 12
    check_mixed_batch(kind, dtype, path, start, zoos, every, num_tokens)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_mixed_batch_of_all_adapters(
    kind: str, path: str, dtype: str, start: Callable, zoos: Callable
) -> None:
    num_tokens = 32 if dtype == "float32" else 16
    check_mixed_batch(kind, dtype, path, start, zoos, every=1, num_tokens=num_tokens)


def check_mixed_batch(
    kind: str, dtype: str, path: str, start: Callable, zoos: Callable, every: int, num_tokens: int
) -> None:
    """Requires the oracle's logits at every position, of requests prefilled and decoded together,
    given the same tokens. In float32 the tokens are the oracle's, too, and so are the log
    probabilities of every second prompt."""
    is_exact = dtype == "float32"
    running = start(kind, dtype=dtype, native_kernels=PATHS[path], max_model_len=512)
    recorder = RecordingSampler(running.engine.decoder.eos_token_ids)
    running.engine.built.engine.runner.sampler = recorder
    adapters = ["", *running.digests, ""][::every]
    asked = prompts(len(adapters))
    for index, (name, prompt) in enumerate(zip(adapters, asked, strict=True)):
        scored = {"prompt_logprobs": 5} if is_exact and is_scored(index, prompt) else {}
        running.submit(str(index), prompt, name, max_tokens=num_tokens, **scored)
    # All of them first: the torch path sets torch's options, which are the oracle's, too.
    results = [running.result(str(index)) for index in range(len(adapters))]
    error = relative_rms if is_exact else decile_rms
    ours, theirs = [], []
    for index, (name, prompt, (tokens, last)) in enumerate(
        zip(adapters, asked, results, strict=True)
    ):
        assert last.error is None
        given, start_of_answer = prompt + tokens[:-1], len(prompt) - 1
        logits = zoos(kind).logits(name, given, torch.float32)
        expected = logits[start_of_answer:]
        ours.append(error(torch.stack(recorder.logits[str(index)]), expected))
        if is_exact:
            if is_scored(index, prompt):
                check(scores(running, str(index)), prompt, logits[: len(prompt)])
            theirs.append(0.0)
            assert tokens == expected.argmax(dim=-1).tolist(), name or "base"
        else:
            got = zoos(kind).logits(name, given, getattr(torch, dtype))[start_of_answer:]
            theirs.append(error(got, expected))
    # In bf16 they are as near to those in fp32 as the oracle's: in the mean, as a few tokens'
    # rounding is chance, and much of it where a prompt's tokens choose other experts.
    most, most_mean = (4, 1.5) if kind in PARAMETERS else (2, 1.2)
    limits = [max(1e-4, most * error) for error in theirs]
    assert all(map(le, ours, limits)), (adapters, ours, theirs)
    assert mean(ours) <= max(1e-4, most_mean * mean(theirs)), (ours, theirs)
    running.check_idle()


def is_scored(index: int, prompt: list[int]) -> bool:
    """Every second request, so that others run beside; no model predicts a prompt's first token."""
    return index % 2 == 0 and len(prompt) > 1


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
def test_a_mixed_batch_has_the_oracles_greedy_tokens(
    kind: str, start: Callable, zoos: Callable
) -> None:
    """Longer answers than those whose logits are compared."""
    running = start(kind, max_model_len=512)
    adapters = ["", *running.digests, ""]
    asked = prompts(len(adapters), seed=1)
    for index, (name, prompt) in enumerate(zip(adapters, asked, strict=True)):
        running.submit(str(index), prompt, name)
    for index, (name, prompt) in enumerate(zip(adapters, asked, strict=True)):
        tokens, _last = running.result(str(index))
        assert tokens == zoos(kind).greedy(name, prompt, 64, guess=tokens), name or "base"


def test_every_family_has_a_row() -> None:
    """But for whole models, whose text part is one of these."""
    tested = {f"{family}ForCausalLM" for family, _ in MODELS.values()}
    assert tested == {name for name in families() if name.endswith("ForCausalLM")}


def test_adapters_change_what_the_model_says(zoos: Callable) -> None:
    """Without this, the parity above could hold for adapters that do nothing."""
    zoo = zoos("llama")
    prompt = prompts(2)[1]
    base = zoo.logits("", prompt, torch.float32)
    for name in zoo.adapter_dirs:
        assert relative_rms(zoo.logits(name, prompt, torch.float32), base) > 0.02, name


ALONE = ("llama", "gpt-oss", "gemma4", "qwen3-next")
"""Models that have most kinds of modules. Of the others the mixed batch would differ, too, if a
module were dropped: adapters of it change all modules."""


@pytest.fixture(scope="module", params=long_but(ALONE, MODELS))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A model with an adapter for each module of its layers, the embedding and the head, alone."""
    kind = request.param
    names = (*modules_of(kind), "embed_tokens", "lm_head")
    specs = [AdapterSpec(name, 4, [name]) for name in names]
    return make_zoo(kind, tmp_path_factory.mktemp(kind), specs)


def test_each_module_alone_changes_what_the_model_says(alone: Zoo, start: Callable) -> None:
    """Nothing is dropped in silence: the oracle's logits, and not the base's."""
    running = start(alone, max_model_len=64)
    recorder = RecordingSampler(running.engine.decoder.eos_token_ids)
    running.engine.built.engine.runner.sampler = recorder
    prompt = prompts(2)[1]
    for name in ("", *running.digests):
        running.submit(name or "base", prompt, name, max_tokens=1)
    for name in ("", *running.digests):
        running.result(name or "base")
    base = recorder.logits["base"][0]
    for name in running.digests:
        got = recorder.logits[name][0]
        assert relative_rms(got, alone.logits(name, prompt, torch.float32)[-1]) <= 1e-4, name
        assert relative_rms(got, base) > 1e-3, name
