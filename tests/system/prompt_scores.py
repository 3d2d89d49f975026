"""Log probabilities of a prompt that an engine returns, beside an oracle's logits."""

from __future__ import annotations

import numpy as np
import torch

from inference_svc.results.scores import Scores
from tests.support.inference.results import parts_of
from tests.system.engines import Running


def scores(running: Running, request_id: str) -> Scores:
    """Returns all of a request's, which come in order and once, from the second token on."""
    running.result(request_id)
    pieces = parts_of(running.outputs[request_id], Scores)
    position = 1
    for piece in pieces:
        assert piece.first_position == position
        position += piece.num_tokens
    joined = (np.concatenate(arrays) for arrays in zip(*(p[1:] for p in pieces), strict=True))
    return Scores(1, *joined)


def ask(running: Running, name: str, prompt: list[int], adapter: str = "", **options: int) -> None:
    options = {"max_tokens": 0, "prompt_logprobs": 5} | options
    running.submit(name, prompt, adapter, **options)


def check(found: Scores, prompt: list[int], logits: torch.Tensor, top_k: int = 5) -> None:
    """`logits` [T, vocab] are the oracle's."""
    expected = logits.log_softmax(-1)[:-1].numpy()
    assert found.num_tokens == len(prompt) - 1
    assert found.top_k == min(top_k, expected.shape[1])
    assert found.token_ids.tolist() == prompt[1:]
    own = np.take_along_axis(expected, found.token_ids[:, None], 1)
    assert np.abs(found.logprobs - own[:, 0]).max(initial=0) < 1e-4
    tops = -np.sort(-expected, axis=1)[:, : found.top_k]
    assert np.abs(found.top_logprobs - tops).max(initial=0) < 1e-4
    assert np.abs(np.take_along_axis(expected, found.top_ids, 1) - tops).max(initial=0) < 1e-4
    # A rank may differ where others are equally likely up to rounding.
    assert ((expected > own + 1e-4).sum(1) < found.ranks).all()
    assert ((expected > own - 1e-4).sum(1) >= found.ranks).all()
