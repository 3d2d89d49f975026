"""Quantised rows: the definition of each format's values, and rounding to them."""

from __future__ import annotations

import pytest
import torch

from kernels.quantised import Codes, QuantisedRows, WeightFormat, quantise
from kernels.quantised.reference import int8_inputs, linear

FORMS = [
    WeightFormat(codes, size, has_offsets=codes is Codes.UINT4)
    for codes in Codes
    for size in (0, 32)
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_codes_are_the_nearest_that_a_group_can_have(form: WeightFormat) -> None:
    weight = torch.randn(5, 80, generator=torch.Generator().manual_seed(1))
    rows = quantise(weight, form)

    def spread(groups: torch.Tensor) -> torch.Tensor:
        return groups.repeat_interleave(form.group_size or 80, dim=1)[:, :80, None]

    values = form.codes.table[form.codes.table.isfinite()]
    every = values * spread(rows.scales)
    if rows.offsets is not None:
        every = every + spread(rows.offsets)
    nearest = (every - weight[:, :, None]).abs().amin(dim=2)
    torch.testing.assert_close((rows.dequantise() - weight).abs(), nearest, rtol=0, atol=1e-6)


def test_a_group_of_zeros_is_exact() -> None:
    weight = torch.zeros(2, 64)
    weight[0, :32] = 1e-44
    for form in FORMS:
        assert quantise(weight, form).dequantise().abs().max() <= 1e-44


def test_offsets_have_the_range_of_their_group() -> None:
    form = WeightFormat(Codes.UINT4, 4, has_offsets=True)
    weight = torch.tensor([[3.0, 4.0, 5.0, 18.0, -7.0, -7.0]])
    assert quantise(weight, form).dequantise().tolist() == weight.tolist()


def test_offsets_are_added_behind_scales() -> None:
    form = WeightFormat(Codes.UINT4, 2, has_offsets=True)
    codes = torch.tensor([[0, 15, 3, 4, 5]], dtype=torch.uint8)
    rows = QuantisedRows(form, codes, torch.tensor([[2.0, 3.0, 4.0]]), -torch.ones(1, 3))
    assert rows.dequantise().tolist() == [[-1, 29, 8, 11, 19]]
    assert QuantisedRows.cat([rows, rows])[1:].dequantise().tolist() == [[-1, 29, 8, 11, 19]]


def test_bytes_are_counted_with_scales() -> None:
    assert WeightFormat(Codes.INT4, 128, scales="bfloat16").num_bytes(4, 256) == 4 * (128 + 4)
    assert WeightFormat(Codes.UINT4, 32, has_offsets=True).num_bytes(1, 64) == 32 + 16
    assert WeightFormat(Codes.FP8).num_bytes(3, 7) == 3 * (7 + 4)


def test_inputs_in_int8_are_near_and_each_token_has_its_own_scale() -> None:
    x = torch.randn(3, 64) * torch.tensor([[1e-3], [1.0], [100.0]])
    x[1] = 0
    codes, scales = int8_inputs(x)
    assert codes[[0, 2]].abs().amax(dim=1).tolist() == [127, 127]
    assert torch.all((codes * scales[:, None] - x).abs() <= scales[:, None] * 0.501)


def test_the_definition_multiplies_by_the_dequantised_weight() -> None:
    rows = quantise(torch.randn(6, 64), WeightFormat(Codes.NF4, 64))
    x, bias = torch.randn(3, 64), torch.randn(6)
    expected = x @ rows.dequantise().T + bias
    torch.testing.assert_close(linear(x, rows, bias), expected)
    assert linear(x.bfloat16(), rows, dtype=torch.float32).dtype == torch.float32
