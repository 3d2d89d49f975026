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
    """Returns the rows of a weight [N, in], of any float dtype, in a format.

    The scale of a group is its largest magnitude by the largest of the format's values. With
    offsets, which are of UINT4, a group's smallest is the offset, and 15 scales more its largest.
    Both are rounded to the scales' dtype before codes are chosen.
    """
    num_rows, in_features = weight.shape
    size = form.group_size or in_features
    num_groups = form.num_groups(in_features)
    wide = weight.float()
    padding = num_groups * size - in_features
    if padding:  # with each row's last: it changes neither end of the group
        wide = torch.cat([wide, wide[:, -1:].expand(-1, padding)], dim=1)
    groups, offsets = wide.view(num_rows, num_groups, size), None
    if form.has_offsets:
        assert form.codes is Codes.UINT4
        smallest = groups.amin(dim=2)
        largest = (groups.amax(dim=2) - smallest) / 15
        offsets = smallest.to(form.scale_dtype)
        groups = groups - offsets.float()[:, :, None]
    else:
        largest = groups.abs().amax(dim=2) / _LARGEST[form.codes]
    scales = largest.to(form.scale_dtype)
    # A group of equal numbers, or of numbers so small that their scale is zero.
    divisors = scales.float().clamp_(min=_TINY)[:, :, None]
    codes = nearest_codes(groups / divisors, form.codes)
    return QuantisedRows(form, codes.view(num_rows, -1)[:, :in_features], scales, offsets)


def nearest_codes(values: Tensor, codes: Codes) -> Tensor:
    """Returns the code whose value is the nearest to each of `values`, uint8 for fp32 [...]; of two
    that are as near, the even one, as in rounding, or of NF4 and FP4 the lower. Overwrites
    `values`."""
    if codes is Codes.INT8:
        return values.round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    if codes is Codes.FP8:
        return values.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if codes in (Codes.INT4, Codes.UINT4):
        first = int(codes.table[0])
        return values.round_().sub_(first).clamp_(0, 15).to(torch.uint8)
    table, order = codes.table.sort(stable=True)
    middles = (table[1:] + table[:-1]) / 2
    return order.to(torch.uint8)[torch.bucketize(values, middles)]
