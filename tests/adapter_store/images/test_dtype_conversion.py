"""Values in images: from fp8, and where the base weight is stored the other way round."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.pytorch_utils import Conv1D

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.images.compile import compile_image
from adapter_store.images.plan.layout import validate
from contract.images.dtypes import DataType
from contract.images.layouts import Layout
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Target, TargetKind
from servicekit.errors import InvalidArgument

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
TORCH = {
    DataType.FLOAT32: torch.float32,
    DataType.FLOAT16: torch.float16,
    DataType.BFLOAT16: torch.bfloat16,
}


def every_finite_value(dtype: torch.dtype) -> torch.Tensor:
    """[16, 16]; what is not finite among the 256 values is 0 instead."""
    bits = torch.arange(256, dtype=torch.uint8)
    bits[~bits.view(dtype).float().isfinite()] = 0
    return bits.view(dtype).view(16, 16)


def segments(folder, layout: Layout) -> dict[SegmentKind, torch.Tensor]:
    image = compile_image(open_checkpoint(folder), layout)
    return {
        segment.kind: image.buffer[segment.offset : segment.offset + segment.length_bytes]
        .view(TORCH[layout.dtype])
        .view(shape)
        for segment, shape in zip(image.plan.segments, image.plan.shapes, strict=True)
    }


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("layout_dtype", list(TORCH))
def test_every_fp8_value_is_converted_exactly(make_adapter, make_layout, dtype, layout_dtype):
    saved = every_finite_value(dtype)
    tensors = {f"{Q0}.lora_A.weight": saved, f"{Q0}.lora_B.weight": saved.clone()}
    folder = make_adapter(("q_proj",), rank=16, tensors=tensors, lora_alpha=16)
    found = segments(folder, make_layout(layout_dtype))
    exact = saved.float()
    assert torch.equal(found[SegmentKind.A].float(), exact)
    assert torch.equal(found[SegmentKind.B].float(), exact.t())


@pytest.mark.parametrize("dtype", FP8)
def test_the_scale_is_applied_in_fp32(make_adapter, make_layout, dtype):
    saved = every_finite_value(dtype)
    tensors = {f"{Q0}.lora_A.weight": saved, f"{Q0}.lora_B.weight": saved.clone()}
    folder = make_adapter(("q_proj",), rank=16, tensors=tensors, lora_alpha=1)
    found = segments(folder, make_layout())
    assert torch.equal(found[SegmentKind.A], saved.float())
    assert torch.equal(found[SegmentKind.B], (saved.float() / 16).t())


def test_fp8_is_another_adapter_than_the_same_values_in_fp32(make_adapter):
    saved = every_finite_value(FP8[1])
    digests = set()
    for number, tensor in enumerate((saved, saved.float(), saved.to(torch.bfloat16))):
        tensors = {f"{Q0}.lora_A.weight": tensor, f"{Q0}.lora_B.weight": tensor.clone()}
        folder = make_adapter(("q_proj",), rank=16, tensors=tensors, folder=str(number))
        digests.add(open_checkpoint(folder).digest)
    assert len(digests) == 3


@pytest.mark.parametrize("dtype", [DataType.FLOAT8_E4M3, DataType.FLOAT8_E5M2])
def test_no_model_computes_in_fp8(make_layout, dtype):
    with pytest.raises(InvalidArgument, match=r"layout\.dtype"):
        validate(make_layout(dtype))


def test_fan_in_fan_out_changes_nothing_that_is_saved(tmp_path):
    """The base weight of a Conv1D is [in, out]; A and B are as ever."""
    torch.manual_seed(0)
    base = torch.nn.ModuleDict({"c_attn": Conv1D(24, 16)})
    config = LoraConfig(
        r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    model = get_peft_model(base, config)
    model.save_pretrained(tmp_path)
    target = Target("c_attn", 0, "attn", TargetKind.LINEAR, 16, 24)
    layout = Layout("org/x", "0" * 64, DataType.FLOAT32, 1, (target,))
    checkpoint = open_checkpoint(tmp_path)
    image = compile_image(checkpoint, layout)
    a, b = (
        image.buffer[s.offset : s.offset + s.length_bytes].view(torch.float32).view(shape)
        for s, shape in zip(image.plan.segments, image.plan.shapes, strict=True)
    )
    x = torch.randn(3, 16)
    before = base["c_attn"].base_layer(x)
    expected = model.base_model.model["c_attn"](x)
    torch.testing.assert_close(before + x @ a.t() @ b, expected, rtol=1e-5, atol=1e-5)
