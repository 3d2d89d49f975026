"""The Triton kernels, run by Triton's interpreter, against the definitions; and compiled without a
GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.recurrence import NOWHERE, DeltaHeads, DeviceSegments, Segments, reference
from tests.support.pairs import pairwise

DTYPES = [torch.float32, torch.float16]
BOUNDS = {
    torch.float32: {"atol": 2e-5, "rtol": 1e-4},
    torch.float16: {"atol": 2e-3, "rtol": 4e-3},
}
CHUNKS = [1, 16]
"""Tokens at once: in fp32 one, else as many as tensor cores multiply."""
ROWS = {
    "one": [[1]],
    "decodes": [[1], [1], [1]],
    "a prompt": [[70]],
    "both, and segments": [[1], [3, 46], [17], [], [1], [32]],
    "segments of one token": [[1, 1], [1, 2]],
}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(*shape, generator=generator).to(dtype)


class Step:
    """Rows whose segments have so many tokens: the first reads slot 0 or a state, each next one the
    slot that the one before writes. The state behind the last row is padding's."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        by_row: list[list[tuple[int, int, int]]] = []
        self.num_slots = 1 + len(rows)
        for number, row in enumerate(rows):
            before = number + 1 if number % 3 else 0
            by_row.append([])
            for count in row:
                by_row[-1].append((before, self.num_slots, count))
                before = self.num_slots
                self.num_slots += 1
        if by_row[-1]:
            read, _, count = by_row[-1][-1]
            by_row[-1][-1] = (read, NOWHERE, count)
        read, written, counts = zip(*(each for row in by_row for each in row), strict=True)
        self.segments = Segments(read, written, counts, DeviceSegments.build(by_row, "cpu"))
        self.num_tokens = sum(counts)


@pairwise(
    rows=list(ROWS), sizes=[(40, 4), (300, 2)], dtype=DTYPES, name=["causal_conv", "gated_conv"]
)
def test_convolutions(interpreter, rows, sizes, dtype, name):
    """`sizes`: channels, and tokens that the convolution spans."""
    step, (channels, size) = Step(ROWS[rows]), sizes
    width = 3 * channels if name == "gated_conv" else channels
    x = numbers(step.num_tokens, width + 9, dtype=dtype)[:, :width]
    weight, states = numbers(channels, size), numbers(step.num_slots, size - 1, channels)
    states[0] = 0
    found, after = interpreter.call(name, x, weight, states, step.segments)
    wanted = getattr(reference, name)(x, weight, states, step.segments)
    torch.testing.assert_close(found, wanted, **BOUNDS[dtype])
    assert torch.equal(after, states)


class Inputs:
    """Of the delta rule, of so many tokens: projections of both gates side by side."""

    def __init__(self, heads: DeltaHeads, num_tokens: int, dtype: torch.dtype) -> None:
        keys, values = heads.num_key_heads * heads.key_size, heads.num_value_heads
        self.qkv = numbers(num_tokens, 2 * keys + values * heads.value_size, dtype=dtype)
        both = numbers(num_tokens, 3 + 2 * values, dtype=dtype)[:, 3:]
        self.b, self.a = both.chunk(2, dim=1)
        self.numbers = (numbers(values), numbers(values, seed=1))
        self.heads = heads

    def states(self, num_slots: int) -> Tensor:
        found = numbers(
            num_slots, self.heads.num_value_heads, self.heads.key_size, self.heads.value_size
        )
        found[0] = 0
        return found

    def of(self, tokens: slice, states: Tensor, segments: Segments) -> tuple:
        each = (part[tokens] for part in (self.qkv, self.b, self.a))
        return *each, *self.numbers, states, segments, self.heads


@pairwise(rows=list(ROWS), heads=[(2, 6, 8, 12), (1, 1, 40, 65)], dtype=DTYPES, chunk=CHUNKS)
def test_delta_rule(interpreter, rows, heads, dtype, chunk):
    step = Step(ROWS[rows])
    inputs = Inputs(DeltaHeads(*heads), step.num_tokens, dtype)
    states = inputs.states(step.num_slots)
    args = inputs.of(slice(None), states, step.segments)
    found, after = interpreter.call("delta_rule", *args, chunk=chunk)
    torch.testing.assert_close(found, reference.delta_rule(*args), **BOUNDS[dtype])
    torch.testing.assert_close(after, states, atol=1e-4, rtol=1e-4)


def test_keys_that_are_the_same(interpreter):
    """The system is then as far from the identity as can be, and powers of it are huge."""
    step = Step([[130]])
    inputs = Inputs(DeltaHeads(1, 1, 16, 16), 130, torch.float32)
    inputs.qkv[:] = inputs.qkv[0]
    inputs.qkv[:, 32:] = numbers(130, 16)
    inputs.b[:], inputs.a[:] = 9.0, -20.0  # beta is 1, and nothing decays
    args = inputs.of(slice(None), inputs.states(step.num_slots), step.segments)
    found, _ = interpreter.call("delta_rule", *args, chunk=16)
    torch.testing.assert_close(found, reference.delta_rule(*args), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("rows", [[[1], [66], [1], [5, 3]], [[20], [1], [1]]], ids=str)
def test_bits_depend_on_no_other_row(interpreter, rows, chunk):
    step = Step(rows)
    inputs = Inputs(DeltaHeads(1, 2, 16, 16), step.num_tokens, torch.float32)
    states, before = inputs.states(step.num_slots), step.segments
    args = inputs.of(slice(None), states, before)
    together, after = interpreter.call("delta_rule", *args, chunk=chunk)
    start = first = 0
    for row in rows:
        end, last = start + sum(row), first + len(row)
        of_row = tuple(zip(before.read[first:last], before.written[first:last], row, strict=True))
        alone = Segments((), (), (), DeviceSegments.build([of_row], "cpu"))
        args = inputs.of(slice(start, end), states, alone)
        out, own = interpreter.call("delta_rule", *args, chunk=chunk)
        assert torch.equal(out, together[start:end])
        for _, slot, _ in of_row:
            assert slot == NOWHERE or torch.equal(own[slot], after[slot])
        start, first = end, last


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize(("num_heads", "size"), [(3, 21), (6, 16)])
def test_gated_norm(interpreter, num_heads, size, by_token, dtype):
    x = numbers(5, num_heads, size, dtype=dtype)
    gate = numbers(5, 4 + num_heads * size, dtype=dtype)[:, 4:].unflatten(1, (num_heads, -1))
    weight = numbers(5, size, dtype=dtype) if by_token else numbers(size, dtype=dtype)
    wanted = reference.gated_norm(x, gate, weight, 1e-5)
    found = interpreter.call("gated_norm", x, gate, weight, 1e-5)
    torch.testing.assert_close(found, wanted, **BOUNDS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_heads(interpreter, dtype):
    x, gate = numbers(5, 37, dtype=dtype), numbers(5, 37, dtype=dtype, seed=1)
    found = interpreter.call("gate_heads", x, gate)
    torch.testing.assert_close(found, reference.gate_heads(x, gate), **BOUNDS[dtype])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_compile_for_devices(compiler, capability, dtype):
    """In fp32 no prompt is computed in chunks, and in bf16 tensor cores multiply."""
    ptx = compiler.call("compile_ptx", capability, dtype)
    assert set(ptx) == {
        *("causal_conv_kernel", "delta_step_kernel", "gated_norm_kernel", "gate_heads_kernel"),
        *(["delta_chunks_kernel"] if dtype is torch.bfloat16 else []),
    }
    if dtype is torch.bfloat16:
        assert re.search(r"(wgmma\.mma_async|mma\.sync)\S*\.bf16", ptx["delta_chunks_kernel"])
        assert re.search(r"(wgmma\.mma_async|mma\.sync)\S*\.tf32", ptx["delta_chunks_kernel"])
    for name, text in ptx.items():
        assert re.search(r"ld\.global(?:\.\w+)*\.v[24]\.b(32|64)", text), name
