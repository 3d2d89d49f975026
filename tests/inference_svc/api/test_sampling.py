"""What is true of sampling parameters whatever they came by; test_convert has the wire's part."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from inference_svc.api.sampling import NUM_SEEDS, checked_sampling, random_seed
from inference_svc.core import SamplingParams
from servicekit.errors import InvalidArgument

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
def test_numbers_are_what_the_wire_makes_of_them(name: str) -> None:
    given = replace(SamplingParams(), **{name: 0.7})
    (single,) = struct.unpack("f", struct.pack("f", 0.7))
    checked = checked_sampling(given, VOCAB)
    assert getattr(checked, name) == single != 0.7
    assert checked_sampling(checked, VOCAB) == checked


def test_zero_temperature_is_kept() -> None:
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
        ("logprobs", -1),
    ],
)
@pytest.mark.parametrize("path", ["", "sampling."])
def test_what_only_text_can_say_is_refused_as_well(name: str, value: Any, path: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        checked_sampling(replace(SamplingParams(), **{name: value}), VOCAB, path)
    assert caught.value.subject == f"{path}{name}"
    assert caught.value.message.startswith(f"{path}{name} must be")


def test_seeds_are_of_64_bits() -> None:
    assert checked_sampling(SamplingParams(seed=-1), VOCAB).seed == NUM_SEEDS - 1
    assert 0 <= random_seed() < NUM_SEEDS
    assert random_seed() != random_seed()
