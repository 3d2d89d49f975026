"""Images whose A and B are float8: their scales, their values, their files and their layouts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from adapter_store.checkpoint.open import TORCH_DTYPES, open_checkpoint
from adapter_store.errors import CorruptData, IncompatibleAdapter
from adapter_store.images.compile import Image, compile_image
from adapter_store.images.plan.layout import from_text, layout_id, to_text
from adapter_store.images.plan.plan import plan_image
from adapter_store.images.plan.scales import measured, scale_of, with_scales
from adapter_store.images.tiers.file import read_image, write_image
from contract.images.dtypes import FLOAT8, DataType
from contract.images.header import MAX_SCALE, MIN_SCALE, InvalidImage, trailer_sha256
from contract.images.layout_rules import validate
from contract.images.layouts import InvalidLayout, Layout
from contract.images.rules import validate as validate_image
from contract.images.segment_kinds import LORA_KINDS, SegmentKind
from tests.support.examples import examples
from tests.support.store.adapters import MakeAdapter, save_adapter, tiny_layout
from tests.support.store.format_2 import HIDDEN, Q, Saved
from tests.support.store.format_2 import layout_of as every_kind

FLOAT32 = DataType.FLOAT32
_folders = itertools.count()


def float8(layout: Layout) -> Layout:
    return dataclasses.replace(layout, image_format=3, adapter_dtype=FLOAT8)


def matrices(image: Image) -> dict[tuple[int, SegmentKind], torch.Tensor]:
    """Returns the values of A and B as servers compute with them, in fp32."""
    found = {}
    for segment in image.plan.segments:
        data = image.buffer[segment.offset : segment.offset + segment.length_bytes]
        values = data.view(TORCH_DTYPES[segment.dtype]).view(segment.shape).float()
        found[segment.target, segment.kind] = values * segment.scale
    return found


@given(
    magnitudes=st.tuples(*[st.floats(-40, 20) for _ in range(2)]),
    spread=st.floats(0.0, 6.0),
    alpha=st.floats(0.25, 64),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(60))
def test_values_are_the_nearest_of_the_scaled_grid(
    tmp_path_factory: pytest.TempPathFactory,
    magnitudes: tuple[float, float],
    spread: float,
    alpha: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Within half a step of E4M3 of the values that an fp32 image has; and the scale is the least
    that they fit."""
    generator = torch.Generator().manual_seed(seed)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {
        f"{prefix}{name}.weight": (
            torch.randn(shape, generator=generator)
            * 2.0 ** (spread * torch.randn(shape, generator=generator) + magnitude)
        ).to(dtype)
        for name, shape, magnitude in zip("AB", ((4, 16), (16, 4)), magnitudes, strict=True)
    }
    folder = tmp_path_factory.getbasetemp() / f"float8-{next(_folders)}"
    save_adapter(folder, ("q_proj",), tensors=tensors, lora_alpha=alpha)
    checkpoint, layout = open_checkpoint(folder), tiny_layout(FLOAT32)
    image = compile_image(checkpoint, float8(layout))
    exact, found = matrices(compile_image(checkpoint, layout)), matrices(image)
    for segment in image.plan.segments:
        wanted, got = (each[segment.target, segment.kind] for each in (exact, found))
        scale, largest = segment.scale, wanted.abs().max().item()
        assert math.frexp(scale)[0] == 0.5, "a power of two"
        assert largest <= 448 * scale * (1 + 2**-23)
        assert largest > 224 * scale or scale == MIN_SCALE
        # Half a step: 2^-4 of normal numbers, of smaller ones 2^-10 of the scale.
        limit = (wanted.abs() * 2**-4).clamp_min(scale * 2**-10) * (1 + 1e-6)
        assert ((got - wanted).abs() <= limit).all()


def test_values_that_float8_has_are_kept_exactly(make_adapter: MakeAdapter) -> None:
    codes = torch.arange(128, dtype=torch.uint8)[:127].view(torch.float8_e4m3fn).float()
    a = torch.cat((codes, -codes[:1])).view(8, 16) * 2.0**-11
    b = torch.cat((-codes, codes[:1])).view(16, 8) * 2.0**5
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{prefix}A.weight": a, f"{prefix}B.weight": b}
    folder = make_adapter(("q_proj",), tensors=tensors, r=8, lora_alpha=4)
    image = compile_image(open_checkpoint(folder), float8(tiny_layout(FLOAT32)))
    found = matrices(image)
    [index] = {segment.target for segment in image.plan.segments}
    assert torch.equal(found[index, SegmentKind.A], a)
    assert torch.equal(found[index, SegmentKind.B], b.t() * 0.5), "the scale of the adapter is in B"
    assert [segment.scale for segment in image.plan.segments] == [2.0**-11, 2.0**4]


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (448.0, 1.0),
        (448.1, 2.0),
        (224.0, 0.5),
        (1.0, 2.0**-8),
        (0.0, 1.0),
        (1e-38, MIN_SCALE),
        (448 * MAX_SCALE, MAX_SCALE),
    ],
)
def test_the_scale_is_the_least_power_of_two(largest: float, scale: float) -> None:
    assert scale_of(largest) == scale


def test_an_image_has_half_of_the_bytes(make_adapter: MakeAdapter) -> None:
    checkpoint = open_checkpoint(make_adapter(("q_proj", "v_proj", "embed_tokens"), rank=32))
    layout = tiny_layout(DataType.BFLOAT16)
    plain, small = (plan_image(checkpoint, each) for each in (layout, float8(layout)))
    assert [2 * each.length_bytes for each in small.segments] == [
        each.length_bytes for each in plain.segments
    ]
    assert 2 * small.total_bytes == plain.total_bytes


def test_the_layout_is_another_and_the_text_has_it() -> None:
    layout = dataclasses.replace(tiny_layout(DataType.BFLOAT16), image_format=3)
    small = float8(layout)
    assert layout_id(small) != layout_id(layout)
    assert from_text(to_text(small)).adapter_dtype is FLOAT8
    assert '"adapter_dtype"' not in to_text(layout), "ids of other layouts stay"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image_format": 2}, "F8_E4M3 needs image format 3 or later"),
        ({"adapter_dtype": DataType.FLOAT8_E5M2}, "F8_E5M2 is not F8_E4M3"),
        ({"adapter_dtype": DataType.BFLOAT16}, "BF16 is not F8_E4M3"),
        ({"adapter_dtype": DataType.INT32}, "I32 is not F8_E4M3"),
    ],
)
def test_other_types_are_refused(fields: dict[str, object], words: str) -> None:
    layout = dataclasses.replace(float8(every_kind()), **fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidLayout, match=words) as caught:
        validate(layout)
    assert caught.value.field == "layout.adapter_dtype"


def test_values_that_are_too_large_are_refused(make_adapter: MakeAdapter) -> None:
    folder = make_adapter(("q_proj",), tensors=None, lora_alpha=2.0**70)
    with pytest.raises(IncompatibleAdapter, match="too large for float8") as caught:
        compile_image(open_checkpoint(folder), float8(tiny_layout(FLOAT32)))
    assert caught.value.reason == "CAST_OVERFLOW"
    assert caught.value.subject.endswith("lora_B.weight")


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    generator = torch.Generator().manual_seed(0)
    shapes = {f"{Q}.A": (4, HIDDEN), f"{Q}.B": (32, 4), "bias": (32,), "magnitude": (32,)}
    return Saved(
        tmp_path / "saved", {k: torch.randn(v, generator=generator) for k, v in shapes.items()}
    )


def test_a_bias_has_the_factor_of_the_products(saved: Saved) -> None:
    """So that servers multiply both by one number. A magnitude has none."""
    weights = saved.lora(Q, bias="bias", magnitude="magnitude")
    layout = every_kind()
    plain = matrices(compile_image(saved.checkpoint(weights), layout))
    image = compile_image(saved.checkpoint(weights), float8(layout))
    scales = {segment.kind: segment.scale for segment in image.plan.segments}
    product = scales[SegmentKind.A] * scales[SegmentKind.B]
    assert scales[SegmentKind.BIAS] == product != 1.0
    assert scales[SegmentKind.MAGNITUDE] == 1.0
    for key, values in matrices(image).items():
        if key[1] not in LORA_KINDS:
            assert torch.equal(values, plain[key]), "powers of two round nothing"


def test_slices_have_the_scales_of_the_whole(make_adapter: MakeAdapter) -> None:
    checkpoint, layout = open_checkpoint(make_adapter(("o_proj",))), float8(tiny_layout(FLOAT32))
    cut = tuple(
        dataclasses.replace(target, in_slice=(0, 4), out_slice=(12, 16))
        if target.module == "o_proj"
        else target
        for target in layout.targets
    )
    whole = compile_image(checkpoint, layout)
    part = compile_image(checkpoint, dataclasses.replace(layout, targets=cut))
    assert [s.scale for s in whole.plan.segments] == [s.scale for s in part.plan.segments]
    of_whole, of_part = matrices(whole), matrices(part)
    for target, kind in of_whole:
        start = 0 if kind is SegmentKind.A else 12
        held = of_whole[target, kind][:, start : start + 4]
        assert torch.equal(of_part[target, kind], held)


@pytest.fixture
def path(tmp_path: Path, make_adapter: MakeAdapter) -> Path:
    return tmp_path / "image.safetensors"


@pytest.fixture
def image(make_adapter: MakeAdapter, path: Path) -> Image:
    checkpoint = open_checkpoint(make_adapter(("q_proj", "embed_tokens"), rank=3))
    image = compile_image(checkpoint, float8(tiny_layout(DataType.BFLOAT16)))
    write_image(path, image)
    return image


def test_a_file_keeps_the_scales_and_standard_tools_open_it(
    image: Image, path: Path, tmp_path: Path
) -> None:
    unknown = plan_image(
        open_checkpoint(tmp_path / "adapter"), float8(tiny_layout(DataType.BFLOAT16))
    )
    assert not unknown.has_scales
    assert image.plan.has_scales
    again = read_image(path, unknown)
    assert again.plan == image.plan
    assert again.sha256 == image.sha256
    assert torch.equal(again.buffer, image.buffer)
    tensors = load_file(path)
    for name, segment in zip(image.plan.names, image.plan.segments, strict=True):
        assert tensors[name].dtype == torch.float8_e4m3fn
        assert tensors[name].shape == segment.shape


def test_every_flipped_digit_of_a_scale_is_noticed(
    image: Image, path: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(tmp_path / "adapter")
    unknown = plan_image(checkpoint, float8(tiny_layout(DataType.BFLOAT16)))
    original = path.read_bytes()
    start = original.index(b'"loadout.scales":"') + 18
    end = original.index(b'"', start)
    assert end - start == 64 + 1 + 8 * len(image.plan.segments)
    for position in range(start, end):
        damaged = bytearray(original)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CorruptData):
            read_image(path, unknown)


def test_the_trailer_covers_the_scales(image: Image) -> None:
    hashes = [part.sha256 for part in image.parts]
    plan = with_scales(image.plan, [2.0 * each.scale for each in image.plan.segments])
    assert image.sha256 == trailer_sha256(hashes, image.plan.segments)
    assert image.sha256 != trailer_sha256(hashes, plan.segments)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, MIN_SCALE / 2, 2 * MAX_SCALE])
def test_a_scale_out_of_bounds_is_refused(image: Image, scale: float) -> None:
    first, *others = image.plan.segments
    header = dataclasses.replace(
        image.plan.header(), segments=(first._replace(scale=scale), *others)
    )
    with pytest.raises(InvalidImage, match="is misplaced"):
        validate_image(header, float8(tiny_layout(DataType.BFLOAT16)))


def test_another_scale_of_a_bias_is_refused(saved: Saved) -> None:
    layout = float8(every_kind())
    image = compile_image(saved.checkpoint(saved.lora(Q, bias="bias")), layout)
    a, b, bias = image.plan.segments
    header = dataclasses.replace(
        image.plan.header(), segments=(a, b, bias._replace(scale=2 * bias.scale))
    )
    validate_image(image.plan.header(), layout)
    with pytest.raises(InvalidImage, match=r"the bias at byte \d+ has scale"):
        validate_image(header, layout)


@pytest.mark.parametrize("count", [1, 5])
def test_other_numbers_of_scales_are_refused(image: Image, count: int) -> None:
    with pytest.raises(ValueError, match="scale"):
        with_scales(image.plan, [1.0] * count)


def test_scales_of_a_plan_are_measured_once(image: Image, tmp_path: Path) -> None:
    assert measured(open_checkpoint(tmp_path / "adapter"), image.plan) is image.plan
