"""Sampling against plain definitions, and its independence of the batch."""

from __future__ import annotations

import gc
import math
import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core import Request, SampledToken, SamplingParams, Sequence
from inference_svc.engine.compute import sampler as sampler_module
from inference_svc.engine.compute.sampler import Sampler, uniform, uniforms
from inference_svc.grammars.grammar import Grammar
from inference_svc.grammars.lanes.lane import Row
from inference_svc.results.logprobs import LogprobsMode, LogprobsOption
from kernels.native.library import Library, load
from kernels.sampling.reference import NOT_FINITE
from tests.support.examples import examples
from tests.support.inference.results import asking, logprobs_of, wanted_of

VOCAB = 40
EOS = 3


chosen: list[Library | None] = [None]
"""The library of the samplers that a test makes."""


@pytest.fixture(autouse=True, scope="module", params=["torch", "native"])
def _chosen_by(request: pytest.FixtureRequest) -> None:
    chosen[0] = load() if request.param == "native" else None


def make_sampler(*, has_device_memory: bool = False) -> Sampler:
    library = None if has_device_memory else chosen[0]
    return Sampler([EOS], has_device_memory=has_device_memory, library=library)


def sequence(prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **params) -> Sequence:
    made = Sequence(Request("r", prompt, **asking(params)))
    made.token_ids += output
    return made


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def sample(values: torch.Tensor, *sequences: Sequence) -> list[int]:
    sampled = make_sampler().sample(values.clone(), list(sequences))
    return [token.token_id for token in sampled]


def allowed(values: torch.Tensor, params: SamplingParams) -> set[int]:
    """The definition: temperature, then the top k, then the smallest set reaching top_p, then
    min_p of the largest; one token at a time in plain Python."""
    probs = (values.double() / params.temperature).softmax(0).tolist()
    order = sorted(range(VOCAB), key=lambda i: -probs[i])[: params.top_k or VOCAB]
    total = sum(probs[i] for i in order)
    kept, mass = [], 0.0
    for index in order:
        if mass >= params.top_p * total:
            break
        kept.append(index)
        mass += probs[index]
    return {i for i in kept if probs[i] >= params.min_p * probs[order[0]]}


def test_greedy_takes_the_largest() -> None:
    values = logits(3)
    greedy = [sequence(temperature=0.0) for _ in range(3)]
    assert sample(values, *greedy) == values.argmax(-1).tolist()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 12),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.sampled_from([0.3, 1.0, 2.0]),
)
def test_truncation_follows_its_definition(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    values = logits(1, seed % 100)
    sequences = [sequence(seed=seed + i, **params) for i in range(50)]
    drawn = set(sample(values.expand(50, -1).contiguous(), *sequences))
    assert drawn <= allowed(values[0], SamplingParams(**params))


@pytest.mark.parametrize(
    "params",
    [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.7, "min_p": 0.02}],
    ids=str,
)
@pytest.mark.parametrize("candidates", [4, 1024])
@pytest.mark.parametrize("num_draws", [1500, pytest.param(3000, marks=pytest.mark.long)])
def test_kept_tokens_are_drawn_in_proportion(
    params: dict, candidates: int, num_draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the cut lies beyond the candidates that are looked at first."""
    monkeypatch.setattr(sampler_module, "NUM_CANDIDATES", candidates)
    values = logits(1, seed=3)
    kept = sorted(allowed(values[0], SamplingParams(**params)))
    expected = values[0].softmax(0)[kept]
    expected = (expected / expected.sum()).tolist()
    sequences = [sequence(seed=i, **params) for i in range(num_draws)]
    drawn = sample(values.expand(num_draws, -1).contiguous(), *sequences)
    for token, probability in zip(kept, expected, strict=True):
        assert drawn.count(token) / num_draws == pytest.approx(probability, abs=0.04)


def test_draws_follow_the_distribution() -> None:
    values = torch.full((1, VOCAB), -torch.inf)
    values[0, :3] = torch.tensor([0.5, 0.3, 0.2]).log()
    drawn = sample(values.expand(4000, -1).contiguous(), *[sequence(seed=s) for s in range(4000)])
    for token, probability in enumerate((0.5, 0.3, 0.2)):
        assert drawn.count(token) / 4000 == pytest.approx(probability, abs=0.03)


def test_seed_decides_the_token_in_any_batch() -> None:
    values = logits(8)
    sequences = [sequence(seed=s, top_p=0.9 if s % 2 else 1.0) for s in range(8)]
    together = sample(values, *sequences)
    alone = [sample(values[i : i + 1], sequences[i])[0] for i in range(8)]
    backwards = sample(values.flip(0), *reversed(sequences))
    assert together == alone == backwards[::-1]


def test_position_and_seed_both_count() -> None:
    numbers = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(numbers) == 2500
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / 2500 == pytest.approx(0.5, abs=0.02)


def test_penalties_follow_their_formulas() -> None:
    """vllm-project/vllm-metal#69: presence and frequency count the output only, repetition the
    prompt, too."""
    values = torch.zeros(1, VOCAB)
    values[0, 1], values[0, 5], values[0, 6] = 2.0, 1.9, -0.1
    seen = sequence(prompt=(1,), output=(5,), temperature=0.0)
    cases = [
        ({"repetition_penalty": 1.2}, {1: 2.0 / 1.2, 5: 1.9 / 1.2}),
        ({"presence_penalty": 0.5}, {1: 2.0, 5: 1.4}),
        ({"frequency_penalty": 0.5}, {1: 2.0, 5: 1.4}),
    ]
    for params, expected in cases:
        changed = values.clone()
        sampling = SamplingParams(temperature=0.0, **params)
        request = replace(seen.request, sampling=sampling, wanted=wanted_of(logprobs=1))
        penalised = Sequence(request)
        penalised.token_ids += [5]
        make_sampler().sample(changed, [penalised])
        for token, value in expected.items():
            assert changed[0, token].item() == pytest.approx(value)


def test_rows_may_have_room_behind_them() -> None:
    """As those of steps have, whose server accepts tokens of adapters."""
    rows = [
        sequence(prompt=(1, row), output=(5,), repetition_penalty=1.5, temperature=0.7, seed=row)
        for row in range(3)
    ]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    wide = torch.full((3, VOCAB + 4), 9.0)
    wide[:, :VOCAB] = logits
    found = make_sampler().sample(logits, rows)
    for row in rows:
        row.token_counts = None
    assert make_sampler().sample(wide[:, :VOCAB], rows) == found
    assert torch.equal(wide[:, :VOCAB], logits)
    assert (wide[:, VOCAB:] == 9.0).all()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    st.lists(st.integers(0, VOCAB - 1), max_size=20),
    st.sampled_from([1.0, 1.3]),
    st.sampled_from([(0.0, 0.0), (0.4, 0.0), (0.1, 0.7)]),
)
def test_counts_grow_with_a_sequence(
    prompt: list[int], output: list[int], repetition: float, others: tuple[float, float]
) -> None:
    """Also where it was preempted: its tokens stay, and come into other rows of other batches."""
    presence, frequency = others
    params = {
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "temperature": 0.0,
    }
    sampler, grown = make_sampler(), sequence(tuple(prompt), **params)
    for step in range(len(output) + 1):
        grown.token_ids[len(prompt) :] = output[:step]
        values = logits(3, seed=step)
        row = step % 3
        expected = values[row].clone()
        for token in set(prompt + output[:step]):
            value = expected[token]
            expected[token] = value / repetition if value > 0 else value * repetition
        for token in set(output[:step]):
            expected[token] -= presence + frequency * output[:step].count(token)
        others_rows = [sequence(temperature=0.0) for _ in range(2)]
        before = values.clone()
        sampler.sample(values, [*others_rows[:row], grown, *others_rows[row:]])
        torch.testing.assert_close(values[row], expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(
            values[[i for i in range(3) if i != row]], before[[i for i in range(3) if i != row]]
        )


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), min_size=1))
def test_uniforms_equal_uniform(rows: list[tuple[int, int]]) -> None:
    seeds, positions = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    assert uniforms(seeds, positions).tolist() == [uniform(*row) for row in rows]


def test_sampler_follows_a_changing_batch() -> None:
    """What it keeps between steps of the same sequences is theirs alone."""
    sampler, values = make_sampler(), logits(3)
    drawn, other = sequence(seed=5), sequence(seed=6, top_k=7)
    greedy = sequence(temperature=0.0)
    for batch in ([drawn, greedy, other], [drawn, greedy, other], [other, drawn, greedy], [drawn]):
        got = sampler.sample(values[: len(batch)].clone(), list(batch))
        assert [token.token_id for token in got] == sample(values[: len(batch)], *batch)
        for row, token in zip(batch, got, strict=True):
            row.token_ids.append(token.token_id)


def test_min_tokens_bans_the_ends() -> None:
    values = torch.zeros(2, VOCAB)
    values[:, EOS], values[:, 7] = 9.0, 8.0
    bans = {"temperature": 0.0, "min_tokens": 1, "stop_token_ids": (7,)}
    (first, second) = sample(values, sequence(**bans), sequence(output=(9,), **bans))
    assert first not in (EOS, 7)
    assert second == EOS
    assert sample(values, sequence(ignore_eos=True, **bans), sequence())[0] == EOS


def test_logprobs_are_of_the_unchanged_logits() -> None:
    values = logits(1)
    expected = values[0].log_softmax(0)
    asked = sequence(temperature=0.5, top_k=1, logprobs=3, presence_penalty=1.0, output=(4,))
    (token,) = make_sampler().sample(values.clone(), [asked])
    found = logprobs_of(token)
    assert found is not None
    assert found.logprob == pytest.approx(expected[token.token_id].item(), abs=1e-6)
    top = expected.topk(3)
    assert [i for i, _ in found.top] == top.indices.tolist()
    assert all(
        math.isclose(value, wanted, abs_tol=1e-6)
        for (_, value), wanted in zip(found.top, top.values.tolist(), strict=True)
    )


def test_many_logprobs_stay_arrays() -> None:
    """Objects for each of 1,024 tokens would take the engine's thread longer than the step does;
    and each row holds its own numbers alone."""
    num_rows, num_top = 8, 1024
    values = torch.randn(num_rows, 2048, generator=torch.Generator().manual_seed(0))
    rows = [sequence(temperature=0.0, logprobs=num_top) for _ in range(num_rows - 1)]
    rows.append(sequence(temperature=0.0, logprobs=2))
    sampler = make_sampler()
    sampler.sample(values.clone(), rows)
    gc.collect()
    before = sys.getallocatedblocks()
    sampled = sampler.sample(values.clone(), rows)
    assert sys.getallocatedblocks() - before < num_rows * 20
    expected = values.log_softmax(-1).topk(num_top)
    for row, (token, asked) in enumerate(zip(sampled, rows, strict=True)):
        found, option = logprobs_of(token), asked.request.wanted.get(LogprobsOption)
        assert found is not None
        assert option is not None
        width = option.top_k
        assert found.num_top == len(found.top) == width
        assert [i for i, _ in found.top] == expected.indices[row, :width].tolist()
        assert [v for _, v in found.top] == pytest.approx(expected.values[row, :width].tolist())
        assert len(pickle.dumps(token)) < 1000 + 8 * found.num_top


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from([0, 3, 12]),
    st.sampled_from([0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from([1.0, 1.7]),
    st.integers(0, 20),
)
def test_processed_logprobs_follow_their_definition(
    top_k: int, top_p: float, min_p: float, temperature: float, repetition: float, seed: int
) -> None:
    """Penalties, and then, unless it is greedy, temperature and cuts; others are raw."""
    cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    options = {**cuts, "temperature": temperature, "repetition_penalty": repetition}
    made = sequence(logprobs=VOCAB, logprobs_mode=LogprobsMode.PROCESSED, seed=seed, **options)
    raw = sequence(logprobs=VOCAB, seed=seed, **options)
    values = logits(2, seed)
    sampled = make_sampler().sample(values.clone(), [made, raw])
    first, second = map(logprobs_of, sampled)
    penalised = values[0].numpy().astype(np.float64)
    for token in (1, 2):
        value = penalised[token]
        penalised[token] = value / repetition if value > 0 else value * repetition
    scaled = penalised / (temperature or 1.0)
    probs = np.exp(scaled - scaled.max())
    if temperature:
        kept = allowed(torch.from_numpy(penalised), made.request.sampling)
        probs[[index for index in range(VOCAB) if index not in kept]] = 0
    with np.errstate(divide="ignore"):
        expected = np.log(probs / probs.sum())
    assert first is not None
    found = dict(first.top)
    assert np.allclose([found[index] for index in range(VOCAB)], expected, atol=1e-4)
    own = first.logprob
    assert own > -math.inf
    assert first.rank == sum(value >= own for value in found.values())
    assert second is not None
    plain = values[1].log_softmax(-1)
    assert math.isclose(second.logprob, plain[second.token_id], abs_tol=1e-5)


# --- values that are not finite, or nearly so -----------------------------------------------------

CHOICES: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 100.0},
    {"temperature": 0.01},
    {"top_k": 3},
    {"top_p": 0.5, "min_p": 0.1},
    {"min_tokens": 4, "stop_token_ids": (5, 6)},
    {"repetition_penalty": 0.01, "temperature": 0.0},
    {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
    {"logprobs": 0},
    {"logprobs": VOCAB, "logprobs_mode": LogprobsMode.PROCESSED, "top_p": 0.9},
]
"""Every way of choosing and of explaining a token."""
LARGEST = torch.finfo(torch.float32).max
VALUES = [math.inf, -math.inf, math.nan, LARGEST, -LARGEST, 1e30, -1e30, 1e-42, -0.0, 3.0]


def explained(token: SampledToken) -> object:
    """Returns the token and what is said of it, in bits."""
    found = logprobs_of(token)
    if found is None:
        return token.token_id
    return token.token_id, found.logprob, found.rank, found.top_ids, found.top_logprobs


@pytest.mark.parametrize("has_device_memory", [False, True])
@settings(max_examples=examples(60), deadline=None)
@given(
    faulty=st.lists(
        st.tuples(
            st.sampled_from(CHOICES),
            st.sampled_from([1, VOCAB // 2, VOCAB]),
            st.lists(st.sampled_from(VALUES), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=3,
    ),
    others=st.lists(st.sampled_from(CHOICES), min_size=1, max_size=4),
    candidates=st.sampled_from([4, 1024]),
    seed=st.integers(0, 5),
)
def test_rows_without_finite_logits_are_lost_alone(
    has_device_memory: bool,
    faulty: list[tuple[dict, int, list[float]]],
    others: list[dict],
    candidates: int,
    seed: int,
) -> None:
    """Others have the same bits as beside sound rows. Whatever is finite is chosen from."""
    generator = torch.Generator().manual_seed(seed)
    rows = [sequence(seed=seed, **choice) for choice in [each[0] for each in faulty] + others]
    sound = torch.randn(len(rows), VOCAB, generator=generator)
    values = sound.clone()
    for row, (_, count, planted) in enumerate(faulty):
        places = torch.randperm(VOCAB, generator=generator)[:count]
        values[row, places] = torch.tensor(planted).repeat(count)[:count]
    kept, sampler_module.NUM_CANDIDATES = sampler_module.NUM_CANDIDATES, candidates
    try:
        got, beside_sound = (
            make_sampler(has_device_memory=has_device_memory).sample(each.clone(), list(rows))
            for each in (values, sound)
        )
    finally:
        sampler_module.NUM_CANDIDATES = kept
    place = len(faulty)
    assert list(map(explained, got[place:])) == list(map(explained, beside_sound[place:]))
    for row, token in enumerate(got[:place]):
        if not values[row].max().isfinite():
            assert token.token_id == NOT_FINITE
        elif rows[row].request.sampling.repetition_penalty >= 1:  # else it may overflow
            assert 0 <= token.token_id < VOCAB
            assert not values[row, token.token_id].isneginf()


def test_rows_that_do_not_sample_are_checked_alone() -> None:
    values = logits(3)
    values[2] = math.nan
    beside = sequence(temperature=0.0, logprobs=2)
    got = make_sampler().sample(values.clone(), [None, beside, None])
    assert [token.token_id == NOT_FINITE for token in got] == [False, False, True]
    assert explained(got[1]) == explained(make_sampler().sample(values[1:2].clone(), [beside])[0])


@pytest.mark.parametrize("place", [0, 17, VOCAB - 1])
def test_one_value_decides_unless_it_is_below_all(place: int) -> None:
    """No numbers are found wherever they are; a token of -inf has the probability 0."""
    rows = [sequence(temperature=0.0) for _ in range(4)]
    values = logits(4)
    best = values[3].argmax() if values[3].argmax() != place else values[3].topk(2).indices[1]
    for row, value in enumerate((math.nan, math.inf, -math.nan, -math.inf)):
        values[row, place] = value
    for has_device_memory in (False, True):
        sampler = make_sampler(has_device_memory=has_device_memory)
        got = [token.token_id for token in sampler.sample(values.clone(), list(rows))]
        assert got == [NOT_FINITE, NOT_FINITE, NOT_FINITE, int(best)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_mask_hides_no_logit_that_is_not_finite(value: float) -> None:
    row = sequence(temperature=0.0, logprobs=2)
    grammar = Grammar.regex("a")
    row.masked = Row("r", grammar, "", [])
    row.masked.mask = bytes([0b100, *bytes(VOCAB // 8 - 1)])
    values = logits(1)
    assert sample(values, row) == [2]
    values[0, 7] = value
    assert sample(values, row) == [NOT_FINITE]


def test_stop_tokens_without_a_logit_change_no_row() -> None:
    """Neither the mask of the next row, nor memory behind the last one."""
    asked, values = {"temperature": 0.0, "stop_token_ids": (VOCAB + 2,)}, torch.zeros(2, VOCAB)
    values[:, 2], values[:, 4] = 9.0, 8.0
    assert sample(values, *(sequence(min_tokens=1, **asked) for _ in range(2))) == [2, 2]
    rows = [sequence(**asked) for _ in range(2)]
    for row in rows:
        row.masked = Row("r", Grammar.regex("a"), "", [])
        row.masked.mask, row.masked.may_end = bytes([0b10000, *bytes(VOCAB // 8 - 1)]), True
    assert sample(values, *rows) == [4, 4]


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"temperature": 0.0}])
def test_a_mask_chooses_as_logits_without_the_other_tokens(params: dict[str, float]) -> None:
    """Alone and next to rows without a mask; processed log probabilities are of its tokens."""
    asked = {"temperature": 1.0, "logprobs": 4, "logprobs_mode": LogprobsMode.PROCESSED, **params}
    kept, values = [2, 9, 17, 30], logits(3)
    bits = np.zeros(VOCAB, np.uint8)
    bits[kept] = 1
    cut = torch.full_like(values, -math.inf)
    cut[:, kept] = values[:, kept]
    for seed in range(20):
        rows = [sequence(seed=seed, **asked) for _ in range(3)]
        want = make_sampler().sample(cut.clone(), list(rows))[1]
        rows[1].masked = Row("r", Grammar.regex("a"), "", [])
        rows[1].masked.mask = np.packbits(bits, bitorder="little").tobytes()
        got = make_sampler().sample(values.clone(), list(rows))
        assert got[1] == want
        assert got[0] == make_sampler().sample(values[:1].clone(), [rows[0]])[0]
        rows[1].request = replace(rows[1].request, wanted={})
        got = make_sampler().sample(values.clone(), list(rows))
        assert got[1].token_id == want.token_id


def test_tokens_of_others_are_not_named() -> None:
    """An adapter of the batch adds tokens: others have as many log probabilities as without it."""
    values = torch.randn(3, VOCAB + 5, generator=torch.Generator().manual_seed(1))
    values[0, VOCAB:] = values[1, VOCAB:] = -math.inf
    rows = [sequence(temperature=0.0, logprobs=count) for count in (1024, 3, 1024)]
    for row, size in zip(rows, (VOCAB, VOCAB, VOCAB + 5), strict=True):
        row.request = replace(row.request, vocab_size=size)
    first, second, third = (
        logprobs_of(token) for token in make_sampler().sample(values.clone(), list(rows))
    )
    assert first is not None
    assert second is not None
    assert third is not None
    assert sorted(index for index, _ in first.top) == list(range(VOCAB))
    best = values[1, :VOCAB].topk(3).indices.tolist()
    assert [index for index, _ in second.top] == best
    assert sorted(index for index, _ in third.top) == list(range(VOCAB + 5))
    [alone] = make_sampler().sample(values[:1, :VOCAB].clone(), [rows[0]])
    assert first == logprobs_of(alone)
