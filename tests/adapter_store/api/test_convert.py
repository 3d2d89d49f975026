from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.api import convert
from adapter_store.api.pull_messages import MAX_KNOWN_SEGMENTS, to_pull_response
from adapter_store.core import (
    AdapterEvent,
    AdapterRecord,
    EventKind,
    ImageContent,
    ImageState,
    LayoutVerdict,
    SourceFile,
)
from adapter_store.images.tiers.disk_tier import TierCounts
from contract.images.dtypes import DataType
from contract.images.header import ImageChunk, ImageHeader, ImageTrailer, LayerEnd, Segment
from contract.images.segment_kinds import FURTHER_KINDS, LORA_KINDS, SegmentKind
from contract.images.targets import Target, TargetKind
from contract.protobuf import read_header
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from servicekit.errors import InvalidArgument
from servicekit.refs import AdapterName

NOW = datetime(2026, 2, 3, 4, 5, 6, 789000, tzinfo=UTC)
DIGEST = "sha256:" + "0a" * 32
KINDS = (*LORA_KINDS, *FURTHER_KINDS)


def test_adapter_has_every_field():
    record = AdapterRecord(
        name=AdapterName("t", "n"),
        version=3,
        digest=DIGEST,
        source_uri="s3://b/p",
        base_model="org/m",
        rank=16,
        targets=("k_proj", "q_proj"),
        source_bytes=1 << 40,
        create_time=NOW,
        update_time=NOW,
        pinned=True,
        labels={"a": "b"},
        verdicts=tuple(
            LayoutVerdict(f"L{i}", s, "why", 256, content=ImageContent((), (), added_tokens=i))
            for i, s in enumerate(ImageState)
        ),
        description="about refunds",
        created_by="trainer-a",
        source_revision="0f3c",
        config_base_model="/mnt/models/llama",
        files=(SourceFile("adapter_config.json", 10, "ab" * 32),),
        signed_by="release-2026",
        signature=bytes(64),
        delete_time=NOW,
        segment_kinds=(SegmentKind.FULL, SegmentKind.MAGNITUDE),
        invocation_tokens=(7, 0),
        tokenizer_digest="sha256:" + "1" * 64,
        chat_template_digest="sha256:" + "2" * 64,
        class_labels=("sad", "happy"),
        ephemeral=True,
        expire_time=NOW,
    )
    message = convert.to_adapter(record)
    unset = [f.name for f in message.DESCRIPTOR.fields if not getattr(message, f.name)]
    assert unset == []
    kinds = [pb.SEGMENT_KIND_MAGNITUDE, pb.SEGMENT_KIND_FULL]
    assert (list(message.segment_kinds), list(message.invocation_tokens)) == (kinds, [7, 0])
    assert (message.name, message.source_bytes) == ("t/n", 1 << 40)
    assert message.create_time.ToDatetime(UTC) == NOW
    assert [pb.ImageState.Name(s.state)[12:].lower() for s in message.layout_states] == [
        state.value for state in ImageState
    ]


@pytest.mark.parametrize("kind", EventKind)
def test_every_kind_of_event(kind):
    event = convert.to_event(AdapterEvent(7, kind, "t/n", 2, DIGEST, NOW)).event
    assert pb.EventKind.Name(event.kind) == f"EVENT_KIND_{kind.value.upper()}"
    assert (event.revision, event.name, event.version, event.digest) == (7, "t/n", 2, DIGEST)


def layout_message(**fields) -> pb.ModelLayout:
    target = pb.Target(
        name="model.layers.0.q", layer=0, group="g", kind=1, in_features=4, out_features=8
    )
    values = {"base_model": "org/m", "dtype": 3, "targets": [target], **fields}
    return pb.ModelLayout(**values)


def test_layer_zero_and_no_layer_differ():
    embedding = pb.Target(name="e", group="embed", kind=2, in_features=9, out_features=4)
    message = layout_message()
    message.targets.insert(0, embedding)
    first, second = convert.from_layout(message).targets
    assert first == Target("e", None, "embed", TargetKind.EMBEDDING, 9, 4)
    assert second == Target("model.layers.0.q", 0, "g", TargetKind.LINEAR, 4, 8)


def test_slices_and_experts():
    message = layout_message()
    message.targets[0].in_slice.CopyFrom(pb.Slice(start=0, end=2))
    message.targets[0].experts = 8
    (target,) = convert.from_layout(message).targets
    assert (target.in_slice, target.out_slice, target.experts) == ((0, 2), None, 8)


@pytest.mark.parametrize("dtype", [0, 17])
def test_unknown_dtypes_are_named(dtype):
    with pytest.raises(InvalidArgument) as caught:
        convert.from_layout(layout_message(dtype=dtype))
    assert caught.value.subject == "layout.dtype"


def test_unknown_target_kinds_are_named():
    message = layout_message()
    message.targets[0].kind = 9
    with pytest.raises(InvalidArgument) as caught:
        convert.from_layout(message)
    assert caught.value.subject == "layout.targets[0].kind"


@pytest.mark.parametrize("kind", [pb.RegisterAdapterRequest, pb.UploadMeta])
def test_registrations(kind):
    asked = convert.from_registration(
        kind(name="t/n", base_model="b", expected_digest=DIGEST, pinned=True, labels={"a": "b"})
    )
    assert (asked.name, asked.base_model) == (AdapterName("t", "n"), "b")
    assert (asked.expected_digest, asked.if_current_digest) == (DIGEST, "")
    assert (asked.pinned, asked.labels) == (True, {"a": "b"})


@pytest.mark.parametrize("field", ["name", "expected_digest", "if_current_digest"])
def test_registrations_name_the_bad_field(field):
    message = pb.RegisterAdapterRequest(**{"name": "n", field: "No!"})
    with pytest.raises(InvalidArgument) as caught:
        convert.from_registration(message)
    assert caught.value.subject == field


def response(message) -> pb.PullAdapterResponse:
    return pb.PullAdapterResponse.FromString(to_pull_response(message))


def test_pull_messages():
    bf16 = DataType.BFLOAT16
    segments = tuple(
        Segment(i, kind, 4, 256 * i, 100, bf16, (4, 25), 0.5) for i, kind in enumerate(KINDS)
    )
    header = ImageHeader("i", DIGEST, "L", 2, 1 << 33, segments, 512)
    message = response(header).header
    assert [pb.SegmentKind.Name(s.kind)[13:].lower() for s in message.segments] == [
        kind.value for kind in KINDS
    ]
    assert {(s.dtype, tuple(s.shape), s.scale) for s in message.segments} == {
        (pb.DATA_TYPE_BFLOAT16, (4, 25), 0.5)
    }
    message = response(replace(header, image_format=1)).header
    assert {(s.dtype, len(s.shape), s.HasField("scale")) for s in message.segments} == {
        (0, 0, False)
    }
    assert (message.total_bytes, message.offset) == (1 << 33, 512)
    assert response(ImageChunk(5, memoryview(b"ab"))).chunk.data == b"ab"
    assert response(LayerEnd(0, 9, b"h")).layer_end.end_offset == 9
    assert response(ImageTrailer(b"t")).trailer.sha256 == b"t"


@pytest.mark.parametrize("count", [2, MAX_KNOWN_SEGMENTS + 1])
def test_headers_with_the_same_segments_differ_in_all_else(count):
    segments = tuple(Segment(i, KINDS[0], 4, 256 * i, 100) for i in range(count))
    header = ImageHeader("i", DIGEST, "L", 1, 1 << 33, segments)
    ends, trailer = (LayerEnd(0, 9, b"h"), LayerEnd(1, 12, b"g")), ImageTrailer(b"t")
    whole = replace(header, image_id="j", share_ticket=b"k", ends=ends, trailer=trailer)
    for each in (header, whole, header):
        assert read_header(response(each).header) == each


@given(st.integers(0, 2**64 - 1), st.binary(max_size=300))
def test_a_chunk_is_serialized_as_the_library_does(offset, data):
    whole = pb.PullAdapterResponse(chunk=pb.ImageChunk(offset=offset, data=data))
    assert response(ImageChunk(offset, memoryview(data))) == whole
    for length in (127, 128, (1 << 14) - 1, 1 << 14, 1 << 21):
        chunk = response(ImageChunk(offset, memoryview(bytes(length)))).chunk
        assert (chunk.offset, len(chunk.data)) == (offset, length)


def test_tiers():
    message = convert.to_tier_status(TierCounts(6, 5, 4, 3, 2, 1))
    assert [value for _, value in message.ListFields()] == [5, 6, 4, 3, 2, 1]
