"""The list of a step's operations, of every feature that a decoder has."""

from __future__ import annotations

import pytest

from inference_svc.model.description import Decoder
from inference_svc.model.lifetimes import last_uses
from inference_svc.model.operations import (
    Attend,
    GateHeads,
    Gather,
    Logits,
    Op,
    Rows,
    Value,
    weight_key,
)
from inference_svc.model.walk import Narrowing, operations, weights_of
from tests.support.gpu.features import FEATURES
from tests.support.gpu.models import make_decoder


@pytest.fixture(params=FEATURES)
def decoder(request: pytest.FixtureRequest, tmp_path) -> Decoder:
    return make_decoder(request.param, tmp_path)


def all_ops(decoder: Decoder, narrowing: Narrowing) -> tuple[Op, ...]:
    found = operations(decoder, narrowing)
    return (*found.layers, *found.head)


@pytest.mark.parametrize("narrowing", Narrowing)
def test_values_are_written_before_they_are_read(decoder: Decoder, narrowing: Narrowing) -> None:
    ops, written = all_ops(decoder, narrowing), set[Value]()
    for op, ended in zip(ops, last_uses(ops), strict=True):
        assert written >= set(op.inputs), op
        written = (written | {op.out}) - set(ended)
    assert written == set()
    assert isinstance(ops[-1], Logits)


@pytest.mark.parametrize("narrowing", Narrowing)
def test_steps_narrow_once(decoder: Decoder, narrowing: Narrowing) -> None:
    """Up to a place all operations are of all tokens, or their pairs, and from there of the tokens
    that get logits."""
    found = operations(decoder, narrowing)
    ops = (*found.layers, *found.head)
    rows = [op.out.rows for op in ops if op.out.rows is not Rows.PAIRS]
    first = rows.index(Rows.LOGITS)
    assert set(rows[:first]) == {Rows.TOKENS}
    assert set(rows[first:]) == {Rows.LOGITS}
    start = next(index for index, op in enumerate(ops) if op.out.rows is Rows.LOGITS)
    assert any(isinstance(op, Gather) for op in ops) == (narrowing is not Narrowing.IN_LAST_NORM)
    if narrowing is Narrowing.IN_LAST_LAYER:
        assert isinstance(ops[start - 1], Attend | GateHeads)
        assert ops[start - 1].layer == decoder.num_layers - 1
    else:
        assert start == len(found.layers)


def test_weights_do_not_depend_on_the_narrowing(decoder: Decoder) -> None:
    keys = [weight_key(weight) for weight in weights_of(decoder)]
    for narrowing in Narrowing:
        ops = all_ops(decoder, narrowing)
        found = (weight_key(weight) for op in ops for weight in op.weights)
        assert list(dict.fromkeys(found)) == keys
