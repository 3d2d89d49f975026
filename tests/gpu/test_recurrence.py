"""The operations of a gated delta net on the device against their definitions on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.recurrence import (
    NOWHERE,
    DeltaHeads,
    DeviceSegments,
    Segments,
    causal_conv,
    delta_rule,
    gate_heads,
    gated_conv,
    gated_norm,
    reference,
)

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative RMS differences: of one rounding, and in 16 bits of products in tf32."""
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.real)]
KERNEL = 4
SMALL = DeltaHeads(2, 4, 16, 16)
QWEN = DeltaHeads(4, 8, 128, 128)
"""Heads as Qwen3.5's, fewer of them."""
DECODES = [[1]] * 5
MIXED = [[1], [40], [3, 30], [], [1], [17]]
LONG = [[1], [700], [512, 88], [1]]


class Case:
    """Rows whose segments have so many tokens: the first of a row reads its own state or, of every
    third row, none; each next one the state that the one before writes. `first` is the slot of the
    first state."""

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        heads: DeltaHeads = SMALL,
        first: int = 1,
    ) -> None:
        by_row: list[list[tuple[int, int, int]]] = []
        slot = first + len(rows)
        for number, row in enumerate(rows):
            read, of_row = first + number if number % 3 else 0, []
            for count in row:
                of_row.append((read, slot, count))
                read, slot = slot, slot + 1
            by_row.append(of_row)
        self.by_row, self.heads, self.dtype, self.device = by_row, heads, dtype, device
        self.first, self.num_slots = first, slot
        self.segments = self._segments(by_row)
        num_tokens = sum(map(sum, rows))
        num_keys, num_values, key_size, value_size = heads
        self.channels, self.values = 2 * num_keys * key_size, num_values * value_size
        self.channels += self.values
        self._generator = torch.Generator().manual_seed(0)
        self.made = self.random(num_tokens, self.channels + self.values + 2 * num_values).to(dtype)
        self.weight = self.random(self.channels, KERNEL)
        self.log_rate, self.bias = self.random(2, num_values)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def _segments(self, by_row: Sequence[Sequence[tuple[int, int, int]]]) -> Segments:
        columns = zip(*(each for row in by_row for each in row), strict=True)
        return Segments(*columns, on_device=DeviceSegments.build(by_row, self.device))

    def states(self, *shape: int) -> Tensor:
        """Random states, where any are read; slot 0 is empty."""
        found = torch.zeros(self.num_slots, *shape)
        found[self.first :] = self.random(self.num_slots - self.first, *shape)
        return found

    def parts(self, made: Tensor) -> tuple[Tensor, ...]:
        of_heads = self.heads.num_value_heads
        return made.split((self.channels, self.values, of_heads, of_heads), dim=1)

    def mixed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The delta rule's output on the device and by its definition, and the states."""
        states = self.states(*self.heads[1:])
        there, made = states.to(self.device, copy=True), self.made.to(self.device)
        x, _, b, a = self.parts(made)
        numbers = self.log_rate.to(self.device), self.bias.to(self.device)
        qkv = x.contiguous()
        got = delta_rule(qkv, b, a, *numbers, there, self.segments, self.heads)
        x, _, b, a = self.parts(self.made)
        wanted = reference.delta_rule(
            x.contiguous(), b, a, self.log_rate, self.bias, states, self.segments, self.heads
        )
        return got, wanted, there, states

    def row(self, number: int) -> tuple[Segments, slice]:
        """One row alone, and the places of its tokens."""
        lengths = [sum(count for *_, count in row) for row in self.by_row]
        start = sum(lengths[:number])
        return self._segments([self.by_row[number]]), slice(start, start + lengths[number])


def check(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert got.isfinite().all()
    difference = (got.cpu().double() - wanted.double()).square().mean().sqrt()
    assert difference <= tolerance * wanted.double().square().mean().sqrt()


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_small_heads(device, on_device, rows):
    with on_device():
        got, wanted, there, states = Case(rows, torch.float16, device).mixed()
    check(got, wanted, TOLERANCES[torch.float16])
    check(there, states, TOLERANCES[torch.float16])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_heads_of_a_model(device, on_device, rows, dtype):
    with on_device():
        got, wanted, there, states = Case(rows, dtype, device, QWEN).mixed()
    check(got, wanted, TOLERANCES[dtype])
    check(there, states, TOLERANCES[dtype])


@pytest.mark.real
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("heads", [QWEN, DeltaHeads(2, 4, 256, 128)], ids=str)
def test_long_prompts(device, dtype, heads):
    got, wanted, there, states = Case(LONG, dtype, device, heads).mixed()
    check(got, wanted, TOLERANCES[dtype])
    check(there, states, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_on_no_other_row(device, on_device, dtype):
    case = Case(MIXED, dtype, device)
    with on_device():
        together, _, there, _ = case.mixed()
        for number, row in enumerate(case.by_row):
            if not row:
                continue
            alone, tokens = case.row(number)
            states = Case(MIXED, dtype, device).states(*case.heads[1:]).to(device)
            x, _, b, a = case.parts(case.made.to(device)[tokens])
            numbers = case.log_rate.to(device), case.bias.to(device)
            own = delta_rule(x.contiguous(), b, a, *numbers, states, alone, case.heads)
            assert torch.equal(own, together[tokens])
            for _, slot, _ in row:
                assert torch.equal(states[slot], there[slot])


@pytest.mark.real
def test_keys_that_are_the_same(device):
    """Powers of the system would be huge."""
    case = Case([[300]], torch.bfloat16, device, QWEN)
    keys = QWEN.num_key_heads * QWEN.key_size
    case.made[:, : 2 * keys] = case.made[0, : 2 * keys]
    case.log_rate -= 20  # nothing decays
    got, wanted, _, _ = case.mixed()
    check(got, wanted, 2 * TOLERANCES[torch.bfloat16])


@pytest.mark.real
def test_more_elements_than_32_bits_count(device):
    """The states in use lie behind 2 ** 31 elements."""
    heads = DeltaHeads(2, 32, 128, 128)
    case = Case(MIXED, torch.bfloat16, device, heads, first=1)
    num_spare = (1 << 31) // (32 * 128 * 128) + 1
    small = case.states(*heads[1:])
    there = torch.zeros(num_spare + len(small), *heads[1:], device=device)
    there[num_spare:] = small.to(device)
    by_row = [
        [(read and read + num_spare, slot + num_spare, n) for read, slot, n in row]
        for row in case.by_row
    ]
    segments = Segments((), (), (), DeviceSegments.build(by_row, device))
    x, _, b, a = case.parts(case.made.to(device))
    numbers = case.log_rate.to(device), case.bias.to(device)
    got = delta_rule(x.contiguous(), b, a, *numbers, there, segments, heads)
    x, _, b, a = case.parts(case.made)
    rest = case.log_rate, case.bias, small, case.segments, heads
    check(got, reference.delta_rule(x.contiguous(), b, a, *rest), TOLERANCES[torch.bfloat16])
    check(there[num_spare:], small, TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [DECODES, MIXED, [[70], [1]]], ids=str)
def test_convolution(device, on_device, rows, dtype):
    case = Case(rows, dtype, device)
    states = case.states(KERNEL - 1, case.channels)
    there, made = states.to(device, copy=True), case.made.to(device)
    with on_device():
        got = causal_conv(case.parts(made)[0], case.weight.to(device), there, case.segments)
    x = case.parts(case.made)[0]
    check(got, reference.causal_conv(x, case.weight, states, case.segments), TOLERANCES[dtype])
    assert torch.equal(there.cpu(), states)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_convolution_between_gates(device, on_device, rows, dtype):
    case, channels = Case(rows, dtype, device), 24
    x, weight = case.made[:, 3 : 3 + 3 * channels], case.random(channels, KERNEL)
    states = case.states(KERNEL - 1, channels)
    there, made = states.to(device, copy=True), case.made.to(device)[:, 3 : 3 + 3 * channels]
    with on_device():
        got = gated_conv(made, weight.to(device), there, case.segments)
    check(got, reference.gated_conv(x, weight, states, case.segments), TOLERANCES[dtype])
    assert torch.equal(there.cpu(), states)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates(device, on_device, dtype):
    case = Case(MIXED, dtype, device)
    size, num_heads = case.heads.value_size, case.heads.num_value_heads
    made = case.made.to(device)
    x, z = (case.parts(made)[1].clone().unflatten(1, (num_heads, size)), case.parts(made)[1])
    weight = case.random(size).to(dtype)
    with on_device():
        normed = gated_norm(x, z.unflatten(1, (num_heads, size)), weight.to(device), 1e-6)
        gated = gate_heads(z.clone(), z.contiguous())
    z = case.parts(case.made)[1]
    heads = z.unflatten(1, (num_heads, size))
    check(normed, reference.gated_norm(heads, heads, weight, 1e-6), TOLERANCES[dtype])
    check(gated, reference.gate_heads(z.clone(), z), TOLERANCES[dtype])


def test_padding_stores_no_state(device, on_device):
    case = Case([[1], [9]], torch.float32, device)
    padding = [[(0, NOWHERE, count) for *_, count in row] for row in case.by_row]
    segments = Segments((), (), (), DeviceSegments.build(padding, device))
    states, inputs = case.states(*case.heads[1:]), case.states(KERNEL - 1, case.channels)
    there, inputs_there = states.to(device, copy=True), inputs.to(device, copy=True)
    x, _, b, a = case.parts(case.made.to(device))
    numbers = case.log_rate.to(device), case.bias.to(device)
    with on_device():
        causal_conv(x, case.weight.to(device), inputs_there, segments)
        delta_rule(x.contiguous(), b, a, *numbers, there, segments, case.heads)
    assert torch.equal(there.cpu(), states)
    assert torch.equal(inputs_there.cpu(), inputs)
