"""What sampling parameters may be, whatever the caller came by."""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Sequence
from dataclasses import replace

from inference_svc.core import SamplingParams
from servicekit.errors import InvalidArgument

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_PENALTY = 2.0
NUM_SEEDS = 1 << 64

_SINGLE = struct.Struct("f")


def random_seed() -> int:
    """For a caller who gave none."""
    return secrets.randbelow(NUM_SEEDS)


def checked_sampling(given: SamplingParams, vocab_size: int, path: str = "") -> SamplingParams:
    """`given` as the engine takes it: in single precision, so that the same numbers give the same
    tokens whether they came as text or as floats. Raises InvalidArgument naming the field, behind
    `path`."""
    check = _Fields(path)
    check.needs(given.max_tokens >= 1, "max_tokens", "at least 1")
    within = 0 <= given.min_tokens <= given.max_tokens
    check.needs(within, "min_tokens", f"from 0 to max_tokens ({given.max_tokens})")
    check.needs(given.top_k >= 0, "top_k", "at least 0")
    return replace(
        given,
        temperature=check.number(
            "temperature", given.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE, or_zero=True
        ),
        # More than there are tokens is as good as off.
        top_k=given.top_k if given.top_k < vocab_size else 0,
        top_p=check.share("top_p", given.top_p),
        min_p=check.number("min_p", given.min_p, 0, 1),
        seed=given.seed % NUM_SEEDS,
        stop=check.stops(given.stop),
        stop_token_ids=check.token_ids(given.stop_token_ids, vocab_size),
        presence_penalty=check.number(
            "presence_penalty", given.presence_penalty, -MAX_PENALTY, MAX_PENALTY
        ),
        frequency_penalty=check.number(
            "frequency_penalty", given.frequency_penalty, -MAX_PENALTY, MAX_PENALTY
        ),
        repetition_penalty=check.number(
            "repetition_penalty", given.repetition_penalty, MIN_REPETITION, MAX_REPETITION
        ),
        logprobs=check.logprobs(given.logprobs),
    )


class _Fields:
    """Checks of one caller's fields, which it knows as `path` and the name."""

    def __init__(self, path: str) -> None:
        self._path = path

    def needs(self, holds: bool, name: str, requirement: str) -> None:
        if not holds:
            field = f"{self._path}{name}"
            raise InvalidArgument(f"{field} must be {requirement}", subject=field)

    def number(
        self, name: str, value: float, low: float, high: float, *, or_zero: bool = False
    ) -> float:
        if or_zero and value == 0:
            return 0.0
        # A float on the wire has seven digits: 0.01 arrives as 0.00999999978.
        holds = low <= value <= high or math.isclose(value, low, rel_tol=1e-6)
        prefix = "0, or " if or_zero else ""
        allowed = f"{prefix}from {low:g} to {high:g}, not {value:g}"
        self.needs(math.isfinite(value) and holds, name, allowed)
        return _single(value)

    def share(self, name: str, value: float) -> float:
        single = _single(value) if 0 < value <= 1 else 0.0
        self.needs(single > 0, name, f"above 0 and at most 1, not {value:g}")
        return single

    def stops(self, stops: Sequence[str]) -> tuple[str, ...]:
        self.needs(len(stops) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings")
        self.needs(all(stops), "stop", "not an empty string")
        fits = all(len(stop) <= MAX_STOP_CHARS for stop in stops)
        self.needs(fits, "stop", f"at most {MAX_STOP_CHARS} long")
        return tuple(stops)

    def token_ids(self, ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
        name = "stop_token_ids"
        self.needs(len(ids) <= MAX_STOP_TOKEN_IDS, name, f"at most {MAX_STOP_TOKEN_IDS} ids")
        unknown = next((i for i in ids if not 0 <= i < vocab_size), None)
        self.needs(unknown is None, name, f"below {vocab_size}; {unknown} is no token")
        return tuple(dict.fromkeys(ids))

    def logprobs(self, count: int | None) -> int | None:
        holds = count is None or 0 <= count <= MAX_LOGPROBS
        self.needs(holds, "logprobs", f"at most {MAX_LOGPROBS}")
        return count


def _single(value: float) -> float:
    rounded: float = _SINGLE.unpack(_SINGLE.pack(value))[0]
    return rounded
