"""Unpacks codes, and checks that scales and codes can be meant."""

from __future__ import annotations

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.quantised.scheme import Rows
from kernels.quantised import Codes, QuantisedRows, WeightFormat

_ROWS_AT_ONCE = 512
_FP8_NAN = 0x7F
MAX_SCALE = 2.0**112
"""The largest scale whose products with codes are numbers in fp32: those of FP8 are up to 448."""


def broken(end: str, reason: str) -> UnsupportedModel:
    """Returns the error for contents of a tensor that cannot be meant."""
    return UnsupportedModel(f"{end}: {reason}; download the checkpoint again, or quantise it again")


def unpack(words: Tensor, num_bits: int) -> Tensor:
    """Returns the codes of 4 or 8 bits in each row of integers, the lowest bits first.

    [N, words] of any integer dtype gives uint8 [N, codes]. Bytes are little-endian, as in
    safetensors and on every machine that we serve on.
    """
    bytes_ = words.contiguous().view(torch.uint8)
    if num_bits == 8:
        return bytes_
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(1)


def finite_scales(end: str, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns scales, of any shape [...], in another dtype. Raises UnsupportedModel if one is not
    finite, is so large that weights are not, or is not exact in that dtype."""
    made, wide = scales.to(dtype), scales.float()
    if not (wide.abs() <= MAX_SCALE).all():
        raise broken(end, "has values that are NaN, infinite or too large")
    if not torch.equal(made.float(), wide):
        held, wanted = (str(each).removeprefix("torch.") for each in (scales.dtype, dtype))
        raise UnsupportedModel(
            f"{end}: {held} scales that are not exact in {wanted}, the dtype of config.json: set "
            f"its dtype to {held}"
        )
    return made


def integer_rows(
    form: WeightFormat | None,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    num_bits: int,
    groups: Tensor,
) -> Rows:
    """Returns the rows (code - zero) * scale, of `form`, or plain in fp32 if that is None.

    Args:
        form: The result's format. It has offsets if there are zeros.
        codes: Unsigned ones, uint8 [N, in].
        scales: [N, groups], checked.
        zeros: Unsigned ones, of any integer dtype, as scales. None: all are in the middle.
        num_bits: 4 or 8.
        groups: Each input's group, int64 [in], for plain rows.
    """
    middle = 1 << num_bits - 1
    if form is None:
        places = torch.full_like(scales, middle, dtype=torch.int32) if zeros is None else zeros
        return _plain_rows(codes, scales, places, groups)
    # A code of INT8 is the byte of its value.
    codes = codes if num_bits == 4 else codes ^ 128
    scales = scales.to(form.scale_dtype)
    if zeros is None:
        return QuantisedRows(form, codes, scales)
    first = 0 if form.codes is Codes.UINT4 else middle
    return QuantisedRows(form, codes, scales, (first - zeros.to(form.scale_dtype)) * scales)


def _plain_rows(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    made = torch.empty(codes.shape, dtype=torch.float32)
    for rows in torch.arange(len(codes)).split(_ROWS_AT_ONCE):
        values = codes[rows].float() - zeros[rows].float()[:, groups]
        made[rows] = values * scales[rows].float()[:, groups]
    return made


def float8_rows(form: WeightFormat, weight: Tensor, scales: Tensor) -> QuantisedRows:
    """Returns the rows of an E4M3 weight [N, in]; scales [N, groups], checked. Raises
    UnsupportedModel if it has NaN."""
    codes = weight.contiguous().view(torch.uint8)
    if ((codes & _FP8_NAN) == _FP8_NAN).any():
        raise broken("weight", "has NaN")
    return QuantisedRows(form, codes, scales.to(form.scale_dtype).contiguous())


def groups_of(end: str, order: Tensor | None, in_features: int, group_size: int) -> Tensor:
    """Returns each input's group, int64 [in]: the order that a checkpoint has, or runs of
    `group_size` (0: all inputs). Raises UnsupportedModel for a group that has no scale."""
    size = group_size or in_features
    runs = torch.arange(in_features) // size
    if order is None:
        return runs
    groups = order.long()
    if int(groups.min()) < 0 or int(groups.max()) > int(runs[-1]):
        raise broken(end, f"has groups out of range: there are {int(runs[-1]) + 1}")
    return groups


def require_runs(end: str, order: Tensor | None, in_features: int, group_size: int) -> None:
    """Raises UnsupportedModel if inputs are in another order than runs of `group_size`. `order` has
    each input's group, any integer dtype [in_features]; None: runs."""
    groups = groups_of(end, order, in_features, group_size)
    if not torch.equal(groups, groups_of(end, None, in_features, group_size)):
        raise broken(end, "orders inputs by activations, but config.json says that it does not")
