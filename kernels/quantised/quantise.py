"""Quantises plain weights, by rounding each to the nearest value that its group can have."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantised.formats import Codes, WeightFormat
from kernels.quantised.rows import QuantisedRows

_LARGEST = {Codes.INT4: 7.5, Codes.NF4: 1.0, Codes.FP4: 6.0, Codes.INT8: 127.0, Codes.FP8: 448.0}
"""The magnitude that a group's largest is scaled to. INT4 reaches from -8 to 7: scaled to their
mean, the errors at both ends are equal."""
_TINY = torch.finfo(torch.float32).tiny


def quantise(weight: Tensor, form: WeightFormat) -> QuantisedRows:
    """Returns the rows of a weight [N, in], of any float dtype, in a format without offsets.

    The scale of a group is its largest magnitude by the largest of the format's values, rounded to
    the scales' dtype before codes are chosen.
    """
    assert not form.has_offsets
    num_rows, in_features = weight.shape
    size = form.group_size or in_features
    num_groups = form.num_groups(in_features)
    padded = torch.nn.functional.pad(weight.float(), (0, num_groups * size - in_features))
    groups = padded.view(num_rows, num_groups, size)
    largest = groups.abs().amax(dim=2) / _LARGEST[form.codes]
    scales = largest.to(form.scale_dtype)
    # A group of zeros, or of numbers so small that their scale is zero.
    divisors = scales.float().clamp_(min=_TINY)[:, :, None]
    codes = nearest_codes(groups / divisors, form.codes)
    return QuantisedRows(form, codes.view(num_rows, -1)[:, :in_features], scales)


def nearest_codes(values: Tensor, codes: Codes) -> Tensor:
    """Returns the code, uint8, whose value is the nearest to each of fp32 `values`; of two that are
    as near, the even one, as rounding does it, or of NF4 and FP4 the lower."""
    if codes is Codes.INT8:
        return values.round().clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    if codes is Codes.FP8:
        return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if codes in (Codes.INT4, Codes.UINT4):
        first = int(codes.table[0])
        return (values.round() - first).clamp_(0, 15).to(torch.uint8)
    table, order = codes.table.sort(stable=True)
    middles = (table[1:] + table[:-1]) / 2
    return order.to(torch.uint8)[torch.bucketize(values, middles)]
