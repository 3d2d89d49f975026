"""Weights that each library quantised dequantise to the bits that the library itself makes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from inference_svc.model.quantised import StoredMatrix
from kernels.quantised import Codes, QuantisedRows
from tests.support.models.saved_weights import CASES, case_of, library, scheme_of

DTYPES = {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
}
ROUNDED_TWICE = ("int8 float16",)
"""Cases of bitsandbytes, which rounds a product in fp32 between two factors of the scale."""


def require_asked_for(matrix: StoredMatrix, tensors: Mapping[str, Tensor]) -> None:
    """Makes the checks of a loader."""
    assert set(tensors) <= set(matrix.tensors)
    for end, spec in matrix.tensors.items():
        assert end in tensors or spec.is_optional, end
        if end in tensors:
            assert spec.fits(tensors[end].shape), end
            assert DTYPES[tensors[end].dtype] in spec.dtypes, end


def plain(matrix: StoredMatrix, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns decoded rows, dequantised, which must be of the format that was announced."""
    rows = matrix.decode(tensors)
    if isinstance(rows, QuantisedRows):
        assert rows.format == matrix.format
        return rows.dequantise()
    assert matrix.format is None
    return rows


@pytest.mark.parametrize(("name", "case"), CASES, ids=[" ".join(each) for each in CASES])
def test_weights_are_bit_equal(name: str, case: str) -> None:
    matrix, tensors, expected = case_of(name, case)
    require_asked_for(matrix, tensors)
    form = scheme_of(library(name)[0][case], case.rpartition(" ")[2]).form
    if matrix.format is not None:
        codes = matrix.format.codes
        assert form == {Codes.UINT4: "int4", Codes.FP4: "mxfp4"}.get(codes, codes.value)
    if expected.ndim == 3:
        made = torch.stack(
            [
                plain(matrix, {end: tensor[expert] for end, tensor in tensors.items()})
                for expert in range(len(expected))
            ]
        )
    else:
        made = plain(matrix, tensors)
    assert len(expected.unique()) > 8
    if case in ROUNDED_TWICE:
        torch.testing.assert_close(made, expected, rtol=2**-22, atol=0)
    else:
        assert torch.equal(made.to(expected.dtype), expected)
