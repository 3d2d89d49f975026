"""A server whose adapters are float8: its layout, the headers that it reads, its rows and its
memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from contract.images.dtypes import FLOAT8, DataType
from contract.images.header import ImageHeader, Segment
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Target, TargetKind
from inference_svc.adapters.layout import FLOAT8_FORMATS, IMAGE_FORMATS, ModelLayout
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.memory.tiers import TableWrite
from inference_svc.backends.arena import Arena
from inference_svc.backends.cuda.factory import check_float8
from inference_svc.errors import AdapterUnusable, CorruptImage
from inference_svc.store.convert import from_layout
from loadout.adapter_store.v1 import adapter_store_pb2 as pb

NUM_IN, NUM_OUT, RANK = 64, 32, 8
A_SCALE, B_SCALE = 2.0**-9, 2.0**-12


def layout(**changes: object) -> ModelLayout:
    target = Target("q", 0, "q", TargetKind.LINEAR, NUM_IN, NUM_OUT)
    plain = ModelLayout("base", "0" * 64, torch.bfloat16, IMAGE_FORMATS, (target,))
    of_float8 = replace(plain, image_formats=FLOAT8_FORMATS, adapter_dtype=FLOAT8)
    return replace(of_float8, **changes)  # type: ignore[arg-type]


def header(**of_a: object) -> ImageHeader:
    a = Segment(0, SegmentKind.A, RANK, 0, RANK * NUM_IN, FLOAT8, (RANK, NUM_IN), A_SCALE)
    b = Segment(0, SegmentKind.B, RANK, 512, RANK * NUM_OUT, FLOAT8, (RANK, NUM_OUT), B_SCALE)
    segments = (a._replace(**of_a), b)  # type: ignore[arg-type]
    return ImageHeader("image", "digest", "layout", 3, 768, segments)


def test_the_store_is_told_of_the_type_and_of_format_3_alone() -> None:
    message = from_layout(layout())
    assert message.adapter_dtype == pb.DATA_TYPE_FLOAT8_E4M3
    assert message.dtype == pb.DATA_TYPE_BFLOAT16
    assert list(message.image_formats) == [3]
    plain = from_layout(layout(adapter_dtype=None, image_formats=IMAGE_FORMATS))
    assert not plain.adapter_dtype
    assert list(plain.image_formats) == [1, 2]


def test_it_reads_the_scales() -> None:
    assert [each.scale for each in layout().read_header(header()).segments] == [A_SCALE, B_SCALE]


@pytest.mark.parametrize(
    "change",
    [
        *({"scale": scale} for scale in (0.0, -1.0, math.nan, math.inf, 2.0**-41, 2.0**61)),
        {"dtype": DataType.BFLOAT16},
        {"dtype": DataType.FLOAT8_E5M2},
        {"dtype": None},
        {"length_bytes": 2 * RANK * NUM_IN},
    ],
)
def test_another_type_or_scale_is_corrupt(change: dict[str, object]) -> None:
    with pytest.raises(CorruptImage, match="is misplaced"):
        layout().read_header(header(**change))


def test_images_of_other_formats_are_corrupt() -> None:
    with pytest.raises(CorruptImage, match="image format 2 is not one we read"):
        layout().read_header(replace(header(), image_format=2))


def test_a_server_without_the_setting_refuses_by_its_name() -> None:
    plain = layout(adapter_dtype=None, image_formats=IMAGE_FORMATS)
    with pytest.raises(AdapterUnusable, match="does not apply without --adapter-dtype fp8"):
        plain.read_header(replace(header(), image_format=2))


def test_a_row_has_the_product_of_the_scales() -> None:
    arena = Arena(layout(), 4096, 2, RANK, torch.device("cpu"))
    found = layout().read_header(header())
    extents = [Extent(0, 1024, found.total_bytes)]
    arena.apply([TableWrite(Resident(found, 1, extents, RANK))])
    assert arena.table.scales[1].tolist() == [A_SCALE * B_SCALE]
    assert arena.table.a_granules[1].tolist() == [4]
    assert arena.table.b_granules[1].tolist() == [6]
    assert arena.flat.dtype == torch.bfloat16
    assert arena.table.is_float8


def test_the_largest_adapter_takes_half() -> None:
    plain = layout(adapter_dtype=None, image_formats=IMAGE_FORMATS)
    assert 2 * layout().largest_image(64).num_bytes == plain.largest_image(64).num_bytes


def test_devices_that_do_not_convert_float8_are_refused_by_name() -> None:
    check_float8("NVIDIA L4", (8, 9))
    check_float8("NVIDIA H100", (9, 0))
    with pytest.raises(ValueError, match=r"needs compute capability 8\.9 .* NVIDIA A100 has 8\.0"):
        check_float8("NVIDIA A100", (8, 0))
