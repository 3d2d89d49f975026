"""Checks of a call, and the engine requests made from it, whatever the transport."""

from __future__ import annotations

import itertools
import struct
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.api.generate_call import (
    NUM_SEEDS,
    GenerateCall,
    activation_of,
    checked_parts,
    checked_sampling,
    deadline_after,
    random_seed,
)
from inference_svc.core import MAX_PARTS, Request, SamplingParams
from inference_svc.store.adapter_resolver import Binding
from inference_svc.text.pair import Encoded
from servicekit.errors import InvalidArgument
from tests.support.inference.results import asking

VOCAB = 100
FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@pytest.mark.parametrize("name", FLOATS)
def test_numbers_are_in_single_precision(name: str) -> None:
    given = replace(SamplingParams(), **{name: 0.7})
    (single,) = struct.unpack("f", struct.pack("f", 0.7))
    checked = checked_sampling(given, VOCAB)
    assert getattr(checked, name) == single != 0.7
    assert checked_sampling(checked, VOCAB) == checked


def test_zero_temperature_is_allowed() -> None:
    assert checked_sampling(SamplingParams(temperature=-0.0), VOCAB).temperature == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_tokens", -1),
        ("top_k", -1),
        ("top_p", 1e-60),
        ("temperature", 1e300),
        ("presence_penalty", -1e300),
        ("stop_token_ids", (-1,)),
    ],
)
@pytest.mark.parametrize("path", ["", "sampling."])
def test_values_out_of_range_name_the_field(name: str, value: Any, path: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        checked_sampling(replace(SamplingParams(), **{name: value}), VOCAB, path)
    assert caught.value.subject == f"{path}{name}"
    assert caught.value.message.startswith(f"{path}{name} must be")


def test_seeds_have_64_bits() -> None:
    assert checked_sampling(SamplingParams(seed=-1), VOCAB).seed == NUM_SEEDS - 1
    assert 0 <= random_seed() < NUM_SEEDS
    assert random_seed() != random_seed()


def call(
    num_prompts: int = 1, sampling: SamplingParams | None = None, **fields: Any
) -> GenerateCall:
    return GenerateCall("r", "", ("x",) * num_prompts, sampling or SamplingParams(seed=7), **fields)


def requests(
    made_from: GenerateCall, max_model_len: int = 100, binding: Binding | None = None
) -> list[Request]:
    return [
        request
        for index in range(len(made_from.prompts))
        for request in made_from.to_requests(
            index, Encoded((1, 2, 3)), binding, "home", max_model_len
        )
    ]


def test_lengths_are_cut_to_the_context() -> None:
    long = call(sampling=SamplingParams(max_tokens=50, min_tokens=40))
    (request,) = requests(long, max_model_len=20)
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == (17, 17)
    (request,) = requests(long, max_model_len=200)
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == (50, 40)


@pytest.mark.parametrize(("added", "is_known"), [(0, False), (1, False), (2, True)])
def test_an_answer_ends_with_tokens_that_its_adapter_adds(added: int, is_known: bool) -> None:
    binding = Binding("t/n@1", "t", "sha256:0", 8, added_tokens=added)
    ended = call(sampling=SamplingParams(stop_token_ids=(VOCAB + 1,)))
    made = ended.to_requests(0, Encoded((1,)), binding, "home", 20, vocab_size=VOCAB)
    if is_known:
        ended.check_stops(made, ())
        return
    with pytest.raises(
        InvalidArgument, match=f"below {VOCAB + added}; {VOCAB + 1} is no"
    ) as caught:
        ended.check_stops(made, ())
    assert caught.value.subject == "sampling.stop_token_ids"


@pytest.mark.parametrize(("added", "ends"), [(0, (2, 9)), (1, (2, 9)), (2, (2, 9, VOCAB + 1))])
def test_an_adapters_end_without_a_row_ends_nothing(added: int, ends: tuple[int, ...]) -> None:
    """Its tokenizer names one that is no token of the model; the others end the answer."""
    binding = Binding("t/n@1", "t", "sha256:0", 8, added_tokens=added)
    ended = call(sampling=SamplingParams(stop_token_ids=(2,)))
    (made,) = ended.to_requests(0, Encoded((1,)), binding, "home", 20, (9, VOCAB + 1), VOCAB)
    assert made.sampling.stop_token_ids == ends
    ended.check_stops([made], ())


def test_arrival_is_on_the_monotonic_clock() -> None:
    before_s = time.monotonic()
    (request,) = requests(call(deadline_s=5.0))
    assert before_s <= request.arrival_s <= time.monotonic()
    assert request.deadline_s == 5.0


def test_prefixes_are_seeded_by_both_tenants_and_the_salt() -> None:
    def seed(home: str, tenant: str, salt: str) -> str:
        binding = Binding(f"{tenant}/n@1", tenant, "sha256:0", 8) if tenant else None
        (request,) = call(cache_salt=salt).to_requests(0, Encoded((1,)), binding, home, 20)
        return request.cache_seed

    parts = itertools.product(("a", "b", "a-b"), ("", "a", "b"), ("", "b", "/b", "a/", "a/b"))
    seeds = [seed(*each) for each in parts]
    assert len(set(seeds)) == len(seeds)


@given(
    prompt=st.lists(st.integers(5, 7), min_size=1, max_size=12),
    invocation=st.lists(st.integers(5, 7), min_size=1, max_size=4),
)
def test_activation_is_where_the_invocation_begins_for_the_last_time(
    prompt: list[int], invocation: list[int]
) -> None:
    places = [i for i in range(len(prompt)) if prompt[i : i + len(invocation)] == invocation]
    assert activation_of(prompt, invocation) == (places[-1] if places else None)


def test_tokens_beyond_any_vocabulary_activate_nothing() -> None:
    assert activation_of((1, 0xD800), (2**32 - 1,)) is None
    assert activation_of((1, 0xD800), (0xD800,)) == 1


def test_adapter_with_invocation_tokens_shares_the_bases_prefixes() -> None:
    binding = Binding("a/n@1", "a", "sha256:0", 8, invocation_tokens=(2, 3))
    (base,) = call(cache_salt="s").to_requests(0, Encoded((1, 2, 3, 4)), None, "home", 20)
    (active,) = call(cache_salt="s").to_requests(0, Encoded((1, 2, 3, 4)), binding, "home", 20)
    assert (active.key, active.activation) == ("sha256:0", 1)
    assert not active.has_inactive_adapter
    (inactive,) = call(cache_salt="s").to_requests(0, Encoded((1, 3, 2)), binding, "home", 20)
    assert (inactive.key, inactive.activation, inactive.adapter) == ("", 0, "a/n@1")
    assert inactive.has_inactive_adapter
    assert base.cache_seed == active.cache_seed == inactive.cache_seed


def test_choices_have_ids_and_seeds_of_their_own() -> None:
    (alone,) = requests(call())
    assert (alone.request_id, alone.sampling.seed) == ("r", 7)
    several = requests(call(num_prompts=2, num_choices=2))
    assert [request.request_id for request in several] == ["r-0", "r-1", "r-2", "r-3"]
    assert [request.sampling.seed for request in several] == [7, 8, 7, 8]


def test_logprobs_are_bounded() -> None:
    asked = asking({"max_tokens": 50, "logprobs": 9})
    made = call(**asked, num_choices=4, max_logprobs=1000, max_tokens_field="limit")
    with pytest.raises(InvalidArgument, match="exceed the 1000") as caught:
        made.bounded(requests(made))
    assert caught.value.subject == "limit"
    made = replace(made, max_tokens_field="")
    assert [r.sampling.max_tokens for r in made.bounded(requests(made))] == [25] * 4
    made = replace(made, max_logprobs=2000)
    assert [r.sampling.max_tokens for r in made.bounded(requests(made))] == [50] * 4
    made = replace(made, max_logprobs=None)
    assert [r.sampling.max_tokens for r in made.bounded(requests(made))] == [50] * 4


@pytest.mark.parametrize(
    ("parts", "subject"),
    [
        ([(str(number), 1.0) for number in range(MAX_PARTS + 1)], "adapters"),
        ([("a", 1.0), ("", 1.0)], "adapters[1].ref"),
        ([("a", 1.0), ("a", 2.0)], "adapters[1].ref"),
        ([("a", 100.5)], "adapters[0].scale"),
        ([("a", float("nan"))], "adapters[0].scale"),
        ([("a", 1.0), ("b", float("-inf"))], "adapters[1].scale"),
    ],
)
def test_parts_of_a_sum_are_bounded(parts: list[tuple[str, float]], subject: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        checked_parts(parts)
    assert caught.value.subject == subject
    assert len(checked_parts([(str(number), 1.0) for number in range(MAX_PARTS)])) == MAX_PARTS


def test_a_deadline_is_on_the_monotonic_clock() -> None:
    assert deadline_after(500.0) == pytest.approx(time.monotonic() + 500.0, abs=100.0)
    assert deadline_after(None) is None


def test_a_deadline_in_centuries_is_none() -> None:
    """ "99999999H" is the longest of gRPC's protocol, and more than a thread can wait."""
    assert deadline_after(99_999_999.0 * 3600) is None
