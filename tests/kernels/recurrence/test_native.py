"""Recurrences in C++ against their definitions, for every instruction set."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.native import build
from kernels.native.library import Library
from kernels.recurrence import (
    DeltaHeads,
    Segments,
    causal_conv,
    gated_conv,
    gated_delta,
    gated_norm,
)
from kernels.recurrence.native import (
    StateRows,
    causal_conv_op,
    copy_runs_op,
    delta_rule_op,
    gate_heads_op,
    gated_conv_op,
    gated_norm_op,
)
from tests.support.native import native_library

pytestmark = pytest.mark.matrix

DTYPES = [torch.float32, torch.bfloat16]
MOST = 96
"""Room for more tokens than a step has: rows behind them must stay as they are."""


@pytest.fixture(params=build.FLAGS)
def library(request: pytest.FixtureRequest) -> Library:
    return native_library(request.param)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def close(found: Tensor, wanted: Tensor) -> None:
    """In bf16 within one rounding."""
    bounds = {"atol": 2e-5, "rtol": 1e-4}
    if wanted.dtype is torch.bfloat16:
        bounds = {"atol": 1e-2, "rtol": 1.6e-2}
    torch.testing.assert_close(found, wanted, **bounds)


class Step:
    """Rows whose segments have so many tokens: the first reads slot 0 or a state, each next one the
    slot that the one before writes."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.counts = [count for row in rows for count in row]
        self.num_slots = 1 + len(rows) + len(self.counts)
        read, written = [], []
        for number, row in enumerate(rows):
            before = number + 1 if number % 3 else 0
            for _ in row:
                read.append(before)
                before = 1 + len(rows) + len(written)
                written.append(before)
        self.segments = Segments(tuple(read), tuple(written), tuple(self.counts))
        firsts = torch.tensor([0, *map(len, rows)]).cumsum(0)
        starts = torch.tensor([0, *self.counts]).cumsum(0)
        self.rows = StateRows(
            *(
                each.to(torch.int32).contiguous()
                for each in (
                    torch.tensor([len(rows)]),
                    firsts,
                    starts,
                    torch.tensor(read),
                    torch.tensor(written),
                )
            )
        )
        self.num_tokens = torch.tensor([sum(self.counts)], dtype=torch.int32)


ROWS = [[[1]], [[1], [1], [1]], [[5]], [[1], [3, 4], [17], [1]], [[2, 1, 30], [1, 1]]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "size"), [(40, 4), (300, 2), (7, 8)])
@pytest.mark.parametrize("rows", ROWS)
def test_causal_conv(
    library: Library, rows: list[list[int]], channels: int, size: int, dtype: torch.dtype
) -> None:
    step = Step(rows)
    x = numbers(MOST, channels + 9, dtype=dtype)[:, :channels]
    weight = numbers(channels, size)
    states = numbers(step.num_slots, size - 1, channels)
    states[0] = 0
    found, out = states.clone(), torch.full((MOST, channels), 7, dtype=dtype)
    library.run(causal_conv_op(x, out, weight, found, step.rows))
    count = int(step.num_tokens)
    close(out[:count], causal_conv(x[:count], weight, states, step.segments))
    assert torch.equal(found, states)
    assert (out[count:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "size"), [(40, 3), (300, 2)])
@pytest.mark.parametrize("rows", ROWS)
def test_gated_conv(
    library: Library, rows: list[list[int]], channels: int, size: int, dtype: torch.dtype
) -> None:
    step = Step(rows)
    x = numbers(MOST, 3 * channels + 9, dtype=dtype)[:, : 3 * channels]
    weight = numbers(channels, size)
    states = numbers(step.num_slots, size - 1, channels)
    states[0] = 0
    found, out = states.clone(), torch.full((MOST, channels), 7, dtype=dtype)
    library.run(gated_conv_op(x, out, weight, found, step.rows))
    count = int(step.num_tokens)
    close(out[:count], gated_conv(x[:count], weight, states, step.segments))
    assert torch.equal(found, states)
    assert (out[count:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 6, 8, 12), (1, 2, 128, 128), (3, 3, 40, 65)])
@pytest.mark.parametrize("rows", ROWS)
def test_delta_rule(
    library: Library,
    rows: list[list[int]],
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> None:
    step, sizes = Step(rows), DeltaHeads(*heads)
    keys = sizes.num_key_heads * sizes.key_size
    values = sizes.num_value_heads * sizes.value_size
    qkv = numbers(MOST, 2 * keys + values, dtype=dtype)
    both = numbers(MOST, 3 + 2 * sizes.num_value_heads, dtype=dtype)[:, 3:]
    b, a = both.chunk(2, dim=1)
    rate, bias = -numbers(sizes.num_value_heads).abs(), numbers(sizes.num_value_heads, seed=1)
    shape = (sizes.num_value_heads, sizes.key_size, sizes.value_size)
    states = numbers(step.num_slots, *shape)
    states[0] = 0
    found, out = states.clone(), torch.full((MOST, values), 7, dtype=dtype)
    library.run(delta_rule_op(qkv, b, a, out, rate, bias, found, step.rows, sizes))
    count = int(step.num_tokens)
    q, k, v = qkv[:count].split((keys, keys, values), dim=1)
    wanted = gated_delta(
        q.unflatten(1, (sizes.num_key_heads, -1)),
        k.unflatten(1, (sizes.num_key_heads, -1)),
        v.unflatten(1, (sizes.num_value_heads, -1)),
        rate * torch.nn.functional.softplus(a[:count].float() + bias),
        torch.sigmoid(b[:count]),
        states,
        step.segments,
    )
    close(out[:count], wanted.flatten(1).to(dtype))
    torch.testing.assert_close(found, states, atol=1e-4, rtol=1e-4)
    assert (out[count:] == 7).all()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4))
def test_bits_depend_on_no_other_row(rows: list[list[int]]) -> None:
    """Where a row is cut into segments, each begins with tokens that are computed at once."""
    library, sizes = native_library(), DeltaHeads(1, 2, 8, 12)
    num_tokens = sum(map(sum, rows))
    qkv, both = numbers(num_tokens, 40), numbers(num_tokens, 4)
    rate, bias = -numbers(2).abs(), numbers(2, seed=1)

    def run(step: Step, start: int, end: int) -> tuple[Tensor, Tensor]:
        states = numbers(99, 2, 8, 12)[: step.num_slots].contiguous()
        states[0] = 0
        out = torch.zeros(end - start, 24)
        b, a = both[start:end].chunk(2, dim=1)
        part = qkv[start:end].contiguous()
        library.run(delta_rule_op(part, b, a, out, rate, bias, states, step.rows, sizes))
        return out, states

    together, states = run(Step(rows), 0, num_tokens)
    start = written = 0
    for number, row in enumerate(rows):
        if number % 3 == 0:  # one that begins
            out, alone = run(Step([row]), start, start + sum(row))
            assert torch.equal(out, together[start : start + sum(row)])
            assert torch.equal(alone[1 + len(row)], states[len(rows) + written + len(row)])
            out, whole = run(Step([[sum(row)]]), start, start + sum(row))
            close(out, together[start : start + sum(row)])
            close(whole[2], alone[1 + len(row)])
        start += sum(row)
        written += len(row)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_token", [False, True])
def test_gated_norm(library: Library, dtype: torch.dtype, by_token: bool) -> None:
    num_heads, size, count = 3, 21, 5
    x = numbers(MOST, num_heads * size, dtype=dtype)
    gate = numbers(MOST, 4 + num_heads * size, dtype=dtype)[:, 4:]
    weight = numbers(MOST, size, dtype=dtype) if by_token else numbers(size, dtype=dtype)
    heads, gates = (each[:count].unflatten(1, (num_heads, -1)) for each in (x, gate))
    wanted = gated_norm(heads, gates, weight[:count] if by_token else weight, 1e-5).flatten(1)
    rest = x[count:].clone()
    num_tokens = torch.tensor([count], dtype=torch.int32)
    library.run(gated_norm_op(x, gate, weight, num_tokens, eps=1e-5))
    close(x[:count], wanted)
    assert torch.equal(x[count:], rest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads(library: Library, dtype: torch.dtype) -> None:
    x, gate = numbers(MOST, 37, dtype=dtype), numbers(MOST, 37, dtype=dtype, seed=1)
    num_tokens, before = torch.tensor([5], dtype=torch.int32), x.clone()
    library.run(gate_heads_op(x, gate, num_tokens))
    close(x[:5], before[:5] * torch.sigmoid(gate[:5]))
    assert torch.equal(x[5:], before[5:])
    out = torch.zeros(MOST, 12, dtype=dtype)
    library.run(copy_runs_op(before, out, num_tokens, [(30, 0, 7), (2, 7, 5)]))
    assert torch.equal(out[:5], torch.cat((before[:5, 30:], before[:5, 2:7]), dim=1))
    assert not out[5:].any()
