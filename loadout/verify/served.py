"""The service's greedy answers, with log probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadout.client import Client
from loadout.types import PackedLogprobs

TOP_K = 8
"""Most likely tokens per position whose log probabilities are compared."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A prompt with its answer. Positions are those of all tokens but the first, which has no log
    probability."""

    prompt_ids: tuple[int, ...]
    """The prompt's tokens, by the service, but the first."""
    answer_ids: tuple[int, ...]
    top_ids: NDArray[np.int64]
    """The tokens that are compared, [positions, TOP_K + 1]: the token at the
    position, and the most likely ones."""
    logprobs: NDArray[np.float64]
    """Their natural log probabilities, [positions, TOP_K + 1]."""


def ask(client: Client, adapter: str, prompt: str, max_tokens: int) -> Scored:
    """Returns the greedy answer of an adapter, "" for the base model. Raises LoadoutError."""
    completion = client.complete(
        prompt,
        adapter=adapter,
        temperature=0,
        max_tokens=max_tokens,
        logprobs=TOP_K,
        prompt_logprobs=TOP_K,
        logprobs_mode="raw",
        packed_logprobs=True,
    )
    parts = [completion.prompt_logprobs, completion.packed_logprobs]
    scored = [each for each in parts if each is not None and each.num_tokens]
    return Scored(
        tuple(completion.prompt_logprobs.token_ids) if completion.prompt_logprobs else (),
        completion.token_ids,
        np.concatenate([_ids(each) for each in scored]),
        np.concatenate([_logprobs(each) for each in scored]),
    )


def _ids(packed: PackedLogprobs) -> NDArray[np.int64]:
    top = np.asarray(packed.top_token_ids).reshape(packed.num_tokens, -1)
    return np.concatenate([np.asarray(packed.token_ids)[:, None], top], axis=1).astype(np.int64)


def _logprobs(packed: PackedLogprobs) -> NDArray[np.float64]:
    top = np.asarray(packed.top_logprobs).reshape(packed.num_tokens, -1)
    return np.concatenate([np.asarray(packed.logprobs)[:, None], top], axis=1).astype(np.float64)
