"""Contents of tensors that cannot be meant are refused, naming the tensor's end."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.quantised import StoredMatrix, TensorSpec
from kernels.quantised import QuantisedRows
from tests.support.examples import examples
from tests.support.models.saved_weights import CASES, MODULE, case_of, library, scheme_of

CT, BNB, GPTQ, AWQ = "compressed_tensors", "bitsandbytes", "autogptq", "autoawq"
STATE = "weight.quant_state.bitsandbytes__nf4"
NAN, INF = float("nan"), float("inf")
Change = Callable[[Tensor], Tensor]


def first_of(name: str, case: str) -> tuple[StoredMatrix, dict[str, Tensor]]:
    """Returns the matrix and the tensors of a library's case, of experts the first one's."""
    matrix, tensors, expected = case_of(name, case)
    is_stack = expected.ndim == 3
    return matrix, {end: each[0] if is_stack else each for end, each in tensors.items()}


def put(value: float) -> Change:
    """Returns a change of a tensor's last value."""

    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[-1] = value
        return changed

    return change


def byte(value: int) -> Change:
    return lambda tensor: put(value)(tensor.view(torch.uint8)).view(tensor.dtype)


def state(**keys: object) -> Change:
    def change(tensor: Tensor) -> Tensor:
        values = {**json.loads(bytes(tensor.tolist())), **keys}
        return text(json.dumps(values))(tensor)

    return change


def text(new: str) -> Change:
    return lambda tensor: torch.tensor(list(new.encode()), dtype=torch.uint8)


GROUPS, ZEROS = "int4 group 32 symmetric bfloat16", "int4 group 32 zeros bfloat16"
NESTED, SINGLE = "nf4 nested float32", "nf4 single float32"
ORDER = "4 bits 64 act-order float16"


@pytest.mark.parametrize(
    ("name", "case", "end", "change", "match"),
    [
        (CT, GROUPS, "weight_scale", put(NAN), "NaN, infinite or too large"),
        (CT, GROUPS, "weight_scale", put(-INF), "NaN, infinite or too large"),
        (CT, ZEROS, "weight_scale", put(2.0**120), "NaN, infinite or too large"),
        (CT, GROUPS, "weight_shape", put(255), r"is \[12, 255\], must be \[12, 256\]"),
        (
            CT,
            GROUPS,
            "weight_scale",
            lambda scale: scale.float() * 1.001,
            "set its dtype to float32",
        ),
        (
            CT,
            "int8 int8 inputs channel bfloat16",
            "weight_scale",
            put(INF),
            "NaN, infinite or too large",
        ),
        (CT, "fp8 channel bfloat16", "weight", byte(0xFF), "has NaN"),
        (CT, "fp8 block bfloat16", "weight", byte(0x7F), "has NaN"),
        (CT, "fp8 block bfloat16", "weight_scale", put(NAN), "NaN, infinite or too large"),
        (BNB, SINGLE, "weight.absmax", put(-1), "negative maxima"),
        (BNB, SINGLE, "weight.absmax", put(NAN), "NaN, infinite or too large"),
        (BNB, SINGLE, "weight.absmax", lambda scales: scales[:-1], "has 35 scales, must be 36"),
        (BNB, SINGLE, "weight.quant_map", put(0.5), "other values than NF4"),
        (BNB, SINGLE, "weight.quant_map", put(NAN), "other values than NF4"),
        (BNB, NESTED, "weight.nested_absmax", put(-1), "negative maxima"),
        (BNB, NESTED, "weight.nested_absmax", lambda x: x.repeat(2), "has 2 scales, must be 1"),
        (BNB, NESTED, "weight.nested_quant_map", put(INF), "NaN, infinite or too large"),
        (BNB, NESTED, STATE, state(nested_offset="1e3"), "nested_offset = '1e3'"),
        (BNB, NESTED, STATE, state(nested_offset=NAN), "nested_offset = 'nan'"),
        (BNB, NESTED, STATE, state(nested_offset=10**400), "nested_offset = "),
        (BNB, NESTED, STATE, state(nested_blocksize=0), "nested_blocksize = '0'"),
        (BNB, SINGLE, STATE, state(shape=[12, 191]), "shape = "),
        (BNB, SINGLE, STATE, state(blocksize=32), "blocksize = '32'"),
        (BNB, SINGLE, STATE, state(blocksize=2**40), "blocksize = "),
        (BNB, SINGLE, STATE, state(blocksize=True), "blocksize = "),
        (BNB, SINGLE, STATE, state(quant_type="fp4"), "quant_type = 'fp4'"),
        (BNB, SINGLE, STATE, text("[" * 4000), "no JSON"),
        (BNB, SINGLE, STATE, text("[]"), "no JSON object"),
        (BNB, SINGLE, STATE, lambda old: old | 0x80, "no JSON"),
        (BNB, "int8 float16", "SCB", put(-1), "negative maxima"),
        (BNB, "int8 float16", "weight_format", put(1), "is 1, supported is 0"),
        (GPTQ, "4 bits 32 symmetric float16", "scales", put(NAN), "NaN, infinite or too large"),
        (GPTQ, "4 bits 32 symmetric float16", "qzeros", put(0), "other zero points than 8"),
        (GPTQ, "4 bits 32 zeros float16", "qzeros", put(-1), "has 15"),
        (GPTQ, "8 bits 32 zeros float16", "qzeros", put(-1), "has 255"),
        (GPTQ, "4 bits 32 zeros float16", "g_idx", put(0), "orders inputs by activations"),
        (GPTQ, "4 bits 32 zeros float16", "g_idx", put(8), "out of range: there are 8"),
        (GPTQ, ORDER, "g_idx", put(4), "out of range: there are 4"),
        (GPTQ, ORDER, "g_idx", put(-1), "out of range"),
        (AWQ, "groups of 32 float16", "scales", put(INF), "NaN, infinite or too large"),
        ("transformers", "fp8 float32", "weight_scale_inv", put(NAN), "NaN, infinite or too large"),
        ("transformers", "fp8 float32", "weight", byte(0x7F), "has NaN"),
        ("transformers", "mxfp4 bfloat16", "_scales", put(255), "exponents above 252"),
    ],
)
def test_contents_that_cannot_be_meant_are_refused(
    name: str, case: str, end: str, change: Change, match: str
) -> None:
    matrix, tensors = first_of(name, case)
    tensors[end] = change(tensors[end])
    with pytest.raises(UnsupportedModel, match=match) as caught:
        matrix.decode(tensors)
    assert str(caught.value).startswith(end)


UNREAD = ("input_scale",)
"""Scales that nothing here multiplies by."""


def test_scales_of_every_format_are_finite() -> None:
    wrong = []
    for name, case in CASES:
        matrix, tensors = first_of(name, case)
        floats = [
            end
            for end, each in tensors.items()
            if each.dtype in (torch.float32, torch.float16, torch.bfloat16) and end not in UNREAD
        ]
        assert floats or name == "transformers", case
        for end, value in product(floats, (NAN, INF, -INF)):
            try:
                matrix.decode({**tensors, end: put(value)(tensors[end])})
            except UnsupportedModel as error:
                if str(error).startswith(end):
                    continue
            wrong.append((name, case, end, value))
    assert not wrong


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"quant_method": "fbgemm_fp8"}, torch.full((3, 1), NAN)),
        ({"quant_method": "fp8"}, torch.tensor([INF])),
        ({"quant_method": "fp8"}, torch.tensor([2.0**113])),
    ],
    ids=["fbgemm", "fp8", "large fp8"],
)
def test_scales_of_fp8_without_blocks(config: dict[str, object], scale: Tensor) -> None:
    matrix = scheme_of(config, "bfloat16").matrix(MODULE, 3, 8)
    assert matrix is not None
    weight = torch.ones(3, 8).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedModel, match=r"^weight_scale: has values that are NaN"):
        matrix.decode({"weight": weight, "weight_scale": scale})


@pytest.mark.parametrize(
    ("order", "match"),
    [
        ([0, 1] * 32, None),
        ([0] * 32 + [2] * 32, "has groups out of range: there are 2"),
        ([0] * 32 + [-1] * 32, "has groups out of range: there are 2"),
        ([-1] * 64, "has groups out of range: there are 2"),
        ([0] * 31 + [1] * 33, "has groups of other sizes than 32"),
        ([0] * 64, "has groups of other sizes than 32"),
    ],
)
def test_groups_by_activations_are_whole(order: list[int], match: str | None) -> None:
    args = {"num_bits": 4, "group_size": 32, "actorder": "group"}
    groups = {"group_0": {"targets": ["Linear"], "weights": args}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    matrix = scheme_of({**config, "config_groups": groups}, "float16").matrix(MODULE, 5, 64)
    assert matrix is not None
    tensors = {
        "weight_packed": torch.zeros(5, 8, dtype=torch.int32),
        "weight_scale": torch.ones(5, 2, dtype=torch.float16),
        "weight_g_idx": torch.tensor(order),
    }
    if match is None:
        assert isinstance(matrix.decode(tensors), Tensor)
        return
    with pytest.raises(UnsupportedModel, match=f"^weight_g_idx: {match}"):
        matrix.decode(tensors)


@pytest.mark.parametrize("case", ["int8 plain inputs channel bfloat16", "fp8 channel bfloat16"])
def test_symmetric_weights_may_have_zero_points_of_0(case: str) -> None:
    matrix, tensors = first_of(CT, case)
    rows = matrix.decode(tensors)
    zeros = torch.zeros_like(tensors["weight_scale"]).to(tensors["weight"].dtype)
    again = matrix.decode({**tensors, "weight_zero_point": zeros})
    assert isinstance(rows, QuantisedRows)
    assert isinstance(again, QuantisedRows)
    assert torch.equal(rows.codes, again.codes)
    with pytest.raises(UnsupportedModel, match=r"^weight_zero_point: is not 0"):
        matrix.decode({**tensors, "weight_zero_point": put(1)(zeros)})


def test_packed_weights_may_have_an_order_of_runs_alone() -> None:
    matrix, tensors = first_of(CT, GROUPS)
    for order in (torch.arange(256) // 32, torch.full((256,), -1)):
        matrix.decode({**tensors, "weight_g_idx": order.int()})
    with pytest.raises(UnsupportedModel, match=r"^weight_g_idx: orders inputs"):
        matrix.decode({**tensors, "weight_g_idx": torch.arange(256).flip(0) // 32})


def test_fp8_for_a_tensor_has_one_scale_by_either_name() -> None:
    matrix = scheme_of({"quant_method": "fp8"}, "bfloat16").matrix(MODULE, 3, 5)
    assert matrix is not None
    weight, scale = torch.ones(3, 5).to(torch.float8_e4m3fn), torch.tensor(0.5)
    for end in ("weight_scale", "weight_scale_inv"):
        assert matrix.tensors[end].fits(scale.shape)
        rows = matrix.decode({"weight": weight, end: scale})
        assert isinstance(rows, QuantisedRows)
        assert torch.equal(rows.dequantise(), torch.full((3, 5), 0.5))
    for tensors in ({}, {"weight_scale": scale, "weight_scale_inv": scale}):
        with pytest.raises(UnsupportedModel, match="must be 1"):
            matrix.decode({"weight": weight, **tensors})


def test_scales_of_powers_of_two_are_read() -> None:
    config = {"quant_method": "fp8", "weight_block_size": [8, 8], "scale_fmt": "ue8m0"}
    matrix = scheme_of(config, "bfloat16").matrix(MODULE, 8, 16)
    assert matrix is not None
    assert "F8_E8M0" in matrix.tensors["weight_scale_inv"].dtypes
    scales = torch.tensor([[126, 129]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = torch.ones(8, 16).to(torch.float8_e4m3fn)
    rows = matrix.decode({"weight": weight, "weight_scale_inv": scales})
    assert isinstance(rows, QuantisedRows)
    assert rows.dequantise()[:, ::8].unique().tolist() == [0.5, 4]


def test_bitsandbytes_may_store_bytes_as_floats() -> None:
    _, tensors = first_of(BNB, SINGLE)
    config = {**library(BNB)[0][SINGLE], "bnb_4bit_quant_storage": "bfloat16"}
    matrix = scheme_of(config, "float32").matrix(MODULE, 12, 192)
    assert matrix is not None
    stored = tensors["weight"].view(-1).view(torch.bfloat16)[:, None]
    assert matrix.tensors["weight"] == TensorSpec(tuple(stored.shape), ("BF16",))
    rows = matrix.decode({**tensors, "weight": stored})
    assert isinstance(rows, QuantisedRows)
    assert torch.equal(rows.dequantise(), library(BNB)[1][SINGLE]["expected"])


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((3, 4), True), ((3, 5), False), ((3,), False), ((3, 4, 1), False), ((), False)],
)
def test_shapes_must_fit(shape: tuple[int, ...], fits: bool) -> None:
    assert TensorSpec((3, 4), ("F32",)).fits(shape) == fits


def test_a_dimension_may_be_known_to_the_file_alone() -> None:
    spec = TensorSpec((-4,), ("U8",))
    assert [spec.fits((size,)) for size in range(6)] == [False, *[True] * 4, False]
    assert TensorSpec((3, -4), ("U8",)).sizes == "[3, up to 4]"


@settings(max_examples=examples(300))
@given(st.sampled_from(CASES), st.data())
def test_any_bytes_give_finite_rows_or_are_refused(
    which: tuple[str, str], data: st.DataObject
) -> None:
    matrix, tensors = first_of(*which)
    end = data.draw(st.sampled_from(sorted(tensors)))
    raw = tensors[end].contiguous().view(-1).view(torch.uint8).clone()
    places = st.integers(0, len(raw) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=8)):
        raw[place] = data.draw(st.integers(0, 255))
    changed = raw.view(tensors[end].dtype).view(tensors[end].shape)
    refused: str | None = None
    try:
        rows = matrix.decode({**tensors, end: changed})
    except UnsupportedModel as error:
        refused = str(error)
    if refused is not None:
        assert refused.split(":")[0] in matrix.tensors
    else:
        values = rows.dequantise() if isinstance(rows, QuantisedRows) else rows
        assert torch.isfinite(values).all()
