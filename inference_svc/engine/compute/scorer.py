"""Turns the outputs of a prompt's tokens into results: logits into log probabilities, of the
model's own distribution, or into those of a few tokens; and hidden states into sums, or into those
of each token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.backends.base import Hidden, Scored
from inference_svc.backends.prompt_runs import ScoredRun
from inference_svc.core import BatchRow, Sequence
from inference_svc.engine.compute.sampler import known_tokens
from inference_svc.host.copies import to_device
from inference_svc.model.checkpoint.classifier import ClassifierHead
from inference_svc.results.chosen_logits import ChosenLogits, ChosenLogitsOption
from inference_svc.results.class_logits import ClassLogits, ClassLogitsOption
from inference_svc.results.pooling import HiddenSum, PoolingOption, TokenStates
from inference_svc.results.scores import Scores, ScoresOption


class SequenceScores(NamedTuple):
    """The scores of a step for a sequence's prompt: no numbers unless it `is_sound`."""

    sequence: Sequence
    scores: Scores
    is_sound: bool = True


def score(slices: Iterable[Scored]) -> Iterator[SequenceScores]:
    """Yields the log probabilities of each run of each slice, on the host."""
    for runs, logits in slices:
        yield from _score(runs, logits)


def _score(runs: list[ScoredRun], logits: Tensor) -> Iterator[SequenceScores]:
    """A run is sound by the rule of `sampler.NOT_FINITE`. One search finds the most likely tokens
    of all runs that have the same number of tokens to choose from, as many as any of them asks
    for."""
    tokens = [
        token
        for sequence, position, _, count in runs
        for token in sequence.token_ids[position : position + count]
    ]
    is_sound = logits.amax(dim=-1).isfinite()
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, to_device(tokens, logits.device).unsqueeze(1))
    ranks = (logprobs >= own).sum(dim=-1, dtype=torch.int32)
    sizes = [known_tokens(run.sequence, logits.shape[1]) for run in runs]
    tops = _tops(runs, sizes, logprobs)
    token_ids, own_values = np.array(tokens, np.int32), own.squeeze(1).cpu().numpy()
    own_ranks, sound = ranks.cpu().numpy(), is_sound.cpu().numpy()
    start = 0
    for run, size in zip(runs, sizes, strict=True):
        rows, top_k = slice(start, start + run.num_tokens), min(_top_k(run), size)
        top_ids, top_values = tops[size]
        # Copies, as a view would hold all that lies beside it.
        yield SequenceScores(
            run.sequence,
            Scores(
                run.position,
                token_ids[rows].copy(),
                own_values[rows].copy(),
                own_ranks[rows].copy(),
                top_ids[rows, :top_k].copy(),
                top_values[rows, :top_k].copy(),
            ),
            bool(sound[rows].all()),
        )
        start = rows.stop


def _tops(
    runs: list[ScoredRun], sizes: list[int], logprobs: Tensor
) -> dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """Returns the most likely of so many tokens, and their log probabilities, by that number."""
    most: dict[int, int] = {}
    for run, size in zip(runs, sizes, strict=True):
        most[size] = max(most.get(size, 0), min(_top_k(run), size))
    found = {size: logprobs[:, :size].topk(count, dim=-1) for size, count in most.items()}
    return {
        size: (top.indices.to(torch.int32).cpu().numpy(), top.values.cpu().numpy())
        for size, top in found.items()
    }


def _top_k(run: ScoredRun) -> int:
    option = run.sequence.request.wanted.get(ScoresOption)
    assert option is not None
    return option.top_k


class Pooled(NamedTuple):
    """A result of a run of a sequence's tokens: no numbers unless it `is_sound`."""

    sequence: Sequence
    part: HiddenSum | TokenStates | ClassLogits | ChosenLogits
    is_sound: bool = True


class _Sum(NamedTuple):
    """The hidden states of a run, fp32: their sum, [1, hidden_size], or all of a run whose tokens
    are kept apart, [num_tokens, hidden_size]; and the classifier's head of the run's adapter."""

    run: ScoredRun
    states: Tensor
    head: ClassifierHead | None


def pool(slices: Iterable[Hidden], base_head: ClassifierHead | None) -> Iterator[Pooled]:
    """Yields the sum of each sequence's tokens, in fp32, on the host, or the state of each token;
    of one that is classified the outputs of its adapter's own head, or of the base's."""
    sums = _sums(slices)
    if not sums:
        return
    # Copied and checked at once: calls of torch for each run take longer than their work.
    rows = torch.cat([each.states for each in sums])
    sound, host = rows.isfinite().all(dim=1).cpu().numpy(), rows.cpu().numpy()
    classified, end = _classified(sums, base_head), 0
    for place, each in enumerate(sums):
        run, made = each.run, classified.get(place)
        start, end = end, end + len(each.states)
        is_sound, first = bool(sound[start:end].all()), run.position - 1
        part: HiddenSum | TokenStates | ClassLogits
        if made is not None:
            # A finite hidden state may have outputs that are not.
            part, is_sound = made, is_sound and bool(np.isfinite(made.logits).all())
        elif _keeps_tokens(run):
            part = TokenStates(first, run.num_tokens, host[start:end].tobytes())
        else:
            part = HiddenSum(first, run.num_tokens, host[start:end].tobytes())
        yield Pooled(run.sequence, part, is_sound)


def _keeps_tokens(run: ScoredRun) -> bool:
    """Returns whether each token of a run has a result of its own."""
    [option] = run.sequence.request.wanted
    return isinstance(option, PoolingOption | ClassLogitsOption) and bool(option.per_token)


def _sums(slices: Iterable[Hidden]) -> list[_Sum]:
    """Returns one sum for each sequence: the ends of slices may cut its run. Tokens that are kept
    apart are not summed."""
    made: list[_Sum] = []
    for runs, states, heads in slices:
        split = states.float().split([run.num_tokens for run in runs])
        for run, own, head in zip(runs, split, heads, strict=True):
            if _keeps_tokens(run):
                made.append(_Sum(run, own.clone(), head))
                continue
            total = own.sum(dim=0, keepdim=True)
            if made and made[-1].run.sequence is run.sequence:
                before = made.pop()
                total += before.states
                num_tokens = before.run.num_tokens + run.num_tokens
                run = before.run._replace(num_tokens=num_tokens)
            made.append(_Sum(run, total, head))
    return made


def _classified(sums: list[_Sum], base_head: ClassifierHead | None) -> dict[int, ClassLogits]:
    """Returns the outputs for the sums that are classified, by their places: all of a head at
    once."""
    of_heads: dict[int, list[int]] = {}
    for place, each in enumerate(sums):
        if each.run.sequence.request.wanted.get(ClassLogitsOption) is not None:
            of_heads.setdefault(id(each.head), []).append(place)
    made = {}
    for places in of_heads.values():
        own, head = sums[places[0]].head, base_head
        if own is not None:
            head = own if base_head is None else base_head.with_own(own)
        states = [_states(sums[place]) for place in places]
        logits = None if head is None else head(torch.cat(states))
        rows = None if logits is None else logits.cpu().numpy()
        start = 0
        for place in places:
            run, num_rows = sums[place].run, len(sums[place].states)
            values = b"" if rows is None else rows[start : start + num_rows].tobytes()
            end = run.position + run.num_tokens - 1
            made[place] = ClassLogits(end, values, own is not None, num_rows)
            start += num_rows
    return made


def _states(found: _Sum) -> Tensor:
    """Returns the hidden states that a head reads: each of them, or their mean."""
    return found.states if _keeps_tokens(found.run) else found.states / found.run.num_tokens


def choose(rows: Iterable[BatchRow], logits: Tensor) -> Iterator[Pooled]:
    """Yields the logits of chosen tokens behind each prompt that asks for them and ends in this
    step: sound if the largest is finite, as others have no share then. `logits`, float [rows,
    vocabulary], are of each row's last token."""
    asked: list[tuple[int, Sequence, ChosenLogitsOption]] = []
    for place, (sequence, start, num_tokens, samples) in enumerate(rows):
        if samples or start + num_tokens < sequence.num_prompt:
            continue
        option = sequence.request.wanted.get(ChosenLogitsOption)
        if option is not None:
            asked.append((place, sequence, option))
    if not asked:
        return
    most = max(len(option.token_ids) for *_, option in asked)
    # Rows of fewer tokens ask for their last one again.
    ids = [[*option.token_ids, *option.token_ids[-1:] * most][:most] for *_, option in asked]
    places = to_device([place for place, *_ in asked], logits.device)
    found = logits.index_select(0, places).gather(1, to_device(ids, logits.device)).float()
    for values, (_, sequence, option) in zip(found.cpu().numpy(), asked, strict=True):
        chosen = values[: len(option.token_ids)]
        part = ChosenLogits(sequence.num_prompt, chosen.tobytes())
        yield Pooled(sequence, part, bool(np.isfinite(chosen.max())))
