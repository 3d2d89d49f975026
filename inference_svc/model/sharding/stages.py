"""Cuts a decoder's layers into stages, which compute one after the other (pipeline parallelism).

A stage has some layers that follow each other. The first one has the embedding as well, and the
last one the final norm and the head: of a tied head both have the embedding. Stages are as equal in
bytes as layers allow: the largest of them is as small as possible. The first one has the vision
tower.

Source: Huang et al., GPipe, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeAlias

import torch

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.parameters import parameters, weights_bytes
from inference_svc.model.description import Decoder, Stage
from inference_svc.model.operations import EMBEDDING_KEY

SETTING = "--pipeline-parallel"
_Runs: TypeAlias = tuple[int, int, tuple[int, ...]]
"""The largest sum of some runs, the sum of their squares, and where each starts."""
_DTYPE = torch.bfloat16
"""The type of weights without a format, which are compared with those in few bits."""


def of_stage(decoder: Decoder, index: int, count: int, num_ranks: int = 1) -> Decoder:
    """Returns the part of a decoder that a stage has, of so many; the one of one has the whole.
    Each stage has `num_ranks` ranks, of which the first stage's first one has the vision tower.

    Raises:
        UnsupportedModel: There are fewer layers than stages, or layers cannot be apart; it names
            the field and the way out.
    """
    assert decoder.stage is None, "it is a stage's part already"
    assert decoder.rank is None, "stages are cut before their ranks are"
    if count == 1:
        return decoder
    if decoder.encoder is not None:
        reason = f"{decoder.architecture} is an encoder, which one process computes"
        raise UnsupportedModel(f"{SETTING} {count}: {reason}")
    if not decoder.generates:
        raise UnsupportedModel(
            f"{SETTING} {count}: the model does not generate, and the hidden states that you would "
            "ask for are in the last stage; use 1, and --tensor-parallel"
        )
    if count > decoder.num_layers:
        raise UnsupportedModel(
            f"{SETTING} {count}: num_hidden_layers = {decoder.num_layers}, and each stage needs a "
            f"layer; use at most {decoder.num_layers}"
        )
    if decoder.layer_inputs is not None:
        raise UnsupportedModel(
            f"{SETTING} {count}: the model has per-layer inputs, which its first layers make for "
            f"all others; use 1, and --tensor-parallel"
        )
    ends = balanced_ends(_layer_sizes(decoder, num_ranks), count)
    for number in range(count):
        _check(decoder, Stage(number, ends))
    return replace(decoder, stage=Stage(index, ends))


def _check(decoder: Decoder, stage: Stage) -> None:
    """Raises UnsupportedModel for a layer that reads the keys and values of another stage's."""
    for layer in stage.layers:
        attention = decoder.attention_of.get(layer)
        source = None if attention is None else attention.kv_layer
        if source is not None and source not in stage.layers:
            raise UnsupportedModel(
                f"{SETTING} {stage.count}: layers[{layer}] reads the keys and values of "
                f"layers[{source}], which would be in another stage; use 1, and --tensor-parallel"
            )


def _layer_sizes(decoder: Decoder, num_ranks: int) -> list[int]:
    """Returns the bytes of each layer; with the first one's is the embedding, and with the last
    one's the head. The tower comes to the first ones, too: as often as ranks share a layer, because
    one of these ranks has all of it, and the rank with the most bytes is what counts."""
    sizes = [0] * decoder.num_layers
    sizes[0] += num_ranks * sum(weights_bytes(each, _DTYPE) for each in decoder.towers)
    for each in parameters(decoder):
        is_first = each.layer is None and each.key == EMBEDDING_KEY
        layer = 0 if is_first else -1 if each.layer is None else each.layer
        sizes[layer] += each.num_bytes(_DTYPE)
        if is_first and decoder.head.is_shared:
            sizes[-1] += each.num_bytes(_DTYPE)
    return sizes


def balanced_ends(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Returns where each of `count` runs of sizes ends, none of them empty, so that the largest sum
    of a run is as small as possible; of equal ways, one whose runs are filled evenly."""
    sums = [0, *accumulate(sizes)]
    most = len(sizes)
    # The best runs of so many sizes.
    none: _Runs = (sums[-1] + 1, 0, ())
    best: list[_Runs] = [(0, 0, ()), *[none] * most]
    for number in range(1, count + 1):
        found = [none] * (most + 1)
        for end in range(number, most - (count - number) + 1):
            found[end] = min(
                _with_run(best[start], start, sums[end] - sums[start])
                for start in range(number - 1, end)
            )
        best = found
    return (*best[most][2][1:], most)


def _with_run(before: _Runs, start: int, size: int) -> _Runs:
    largest, squares, starts = before
    return max(largest, size), squares + size * size, (*starts, start)
