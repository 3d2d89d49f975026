"""Image formats over a real channel: servers of both releases, fused modules, hostile layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.images.compile import compile_image
from adapter_store.images.plan.layout import layout_id
from contract.images.dtypes import FLOAT8, DataType
from contract.protobuf import read_header
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.store.client import refusal_of
from tests.support.store.format_2 import GATE_UP, HIDDEN, INNER, QKV, change, layout_of
from tests.support.store.messages import layout_message

pytestmark = pytest.mark.slow


@pytest.fixture
def fused(make_adapter) -> Path:
    """As of a model that computes q, k and v in one module, and gate and up."""
    sizes = {QKV: 64, GATE_UP: 2 * INNER}
    tensors = {
        f"base_model.model.{module}.lora_{side}.weight": torch.randn(shape)
        for module, size in sizes.items()
        for side, shape in (("A", (4, HIDDEN)), ("B", (size, 4)))
    }
    return make_adapter(("qkv_proj", "gate_up_proj"), tensors=tensors)


def test_servers_of_both_releases_get_images_of_their_own(client, make_adapter, make_layout):
    """Of the same bytes, where the adapter has nothing that only the newer knows."""
    digest = client.register("a", make_adapter()).adapter.digest
    layouts = [make_layout(), dataclasses.replace(make_layout(), image_format=2)]
    answers = [
        client.stub.RegisterLayout(pb.RegisterLayoutRequest(layout=layout_message(each)))
        for each in layouts
    ]
    assert [answer.image_format for answer in answers] == [1, 2]
    assert [answer.layout_id for answer in answers] == [layout_id(each) for each in layouts]
    first, second = (client.pull(digest, answer.layout_id) for answer in answers)
    assert first.is_whole
    assert second.is_whole
    assert first.data == second.data
    assert first.header.image_id != second.header.image_id
    assert {(s.dtype, len(s.shape)) for s in first.header.segments} == {(0, 0)}
    assert {(s.dtype, len(s.shape)) for s in second.header.segments} == {(pb.DATA_TYPE_FLOAT32, 2)}


def test_a_fused_module_is_cut_and_its_a_is_sent_once(client, fused):
    layout = layout_of()
    digest = client.register("a", fused, base_model="org/base").adapter.digest
    pulled = client.pull(digest, client.register_layout(layout))
    assert pulled.is_whole
    assert pulled.data == bytes(compile_image(open_checkpoint(fused), layout).buffer.numpy().data)
    names = [layout.targets[segment.target].name for segment in pulled.header.segments[::2]]
    assert [name.rpartition(".")[2] for name in names] == [
        *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    ]
    offsets = [segment.offset for segment in pulled.header.segments[::2]]
    assert offsets[0] == offsets[1] == offsets[2] == 0
    assert offsets[3] == offsets[4] > 0


def test_it_is_compiled_from_the_blob_after_a_restart(serve, fused):
    """Then its bytes are hashed again."""
    layout = layout_of()
    store = serve()
    digest = store.client.register("a", fused, base_model="org/base").adapter.digest
    store.stop()
    client = serve().client
    assert client.pull(digest, client.register_layout(layout)).is_whole


def test_servers_may_call_the_base_by_different_names(client, make_adapter, make_layout):
    """The layout is the same, and so are the images."""
    digest = client.register("a", make_adapter(), base_model="org/one").adapter.digest
    layouts = [
        dataclasses.replace(make_layout(base_model=name), image_format=2)
        for name in ("org/other", "org/one")
    ]
    ids = {client.register_layout(each) for each in layouts}
    assert len(ids) == 1
    [state] = client.get("a").layout_states
    assert {state.layout_id} == ids
    assert client.pull(digest, state.layout_id).is_whole


Change = Callable[[pb.ModelLayout], object]

HEAD, Q, K, EXPERTS, NORM = 9, 2, 3, 7, 1
"""Positions in `layout_of`."""


def set_slice(field: str, start: int, end: int) -> Callable[[pb.Target], object]:
    return lambda target: getattr(target, field).CopyFrom(pb.Slice(start=start, end=end))


def add_names(count: int) -> Callable[[pb.Target], object]:
    return lambda target: target.other_names.extend(
        pb.OtherName(name=f"n{number}") for number in range(count)
    )


def tie_with_other_hashes(target: pb.Target) -> None:
    target.tied_to, target.base_dtype = "model.embed_tokens", pb.DATA_TYPE_BFLOAT16
    target.base_hashes.extend([b"1" * 32] * 3)


HOSTILE: dict[str, tuple[int, Callable[[pb.Target], object]]] = {
    "targets[2].other_names[1].name": (Q, lambda t: t.other_names.add(name="../x")),
    "targets[2].other_names": (Q, add_names(16)),
    "targets[9].other_names (a target's own)": (
        HEAD,
        lambda t: t.other_names.add(name="model.embed_tokens"),
    ),
    "targets[2].other_names[0].outputs": (
        Q,
        lambda t: t.other_names[0].outputs.CopyFrom(pb.Slice(start=4, end=30)),
    ),
    "targets[2].other_names[0].block_sizes": (Q, lambda t: t.other_names[0].block_sizes.append(1)),
    "targets[4].other_names (gap)": (
        K,
        lambda t: t.other_names[0].outputs.CopyFrom(pb.Slice(start=33, end=49)),
    ),
    "targets[9].other_names[0].block_part": (
        HEAD,
        lambda t: t.other_names.add(name="x", block_sizes=[1], block_part=1),
    ),
    "targets[9].other_names[0].block_sizes": (
        HEAD,
        lambda t: t.other_names.add(name="x", block_sizes=[7]),
    ),
    "targets[9].other_names (one of two blocks)": (
        HEAD,
        lambda t: t.other_names.add(name="x", block_sizes=[1, 1]),
    ),
    "targets[9].space": (HEAD, lambda t: setattr(t, "space", "a\nb")),
    "targets[9].held": (HEAD, lambda t: setattr(t, "held", 17)),
    "targets[9].experts": (HEAD, lambda t: setattr(t, "experts", 2)),
    "targets[7].experts": (EXPERTS, lambda t: setattr(t, "experts", 1 << 30)),
    "targets[7].expert_slice": (EXPERTS, set_slice("expert_slice", 2, 5)),
    "targets[9].expert_slice": (HEAD, set_slice("expert_slice", 0, 1)),
    "targets[9].rank_part": (
        HEAD,
        lambda t: t.rank_part.CopyFrom(pb.RankPart(index=2, count=2)),
    ),
    "targets[1].rank_part": (NORM, lambda t: t.rank_part.CopyFrom(pb.RankPart(index=0, count=2))),
    "targets[1].in_features": (NORM, lambda t: setattr(t, "in_features", 4)),
    "targets[9].base_hashes": (HEAD, lambda t: t.base_hashes.extend([b"1" * 32] * 2)),
    "targets[9].base_hashes (length)": (HEAD, lambda t: t.base_hashes.extend([b"1"] * 3)),
    "targets[9].base_dtype": (HEAD, lambda t: t.base_hashes.extend([b"1" * 32] * 3)),
    "targets[9].tied_to": (HEAD, lambda t: setattr(t, "tied_to", "lm_head")),
    "targets[9].tied_to (unknown)": (HEAD, lambda t: setattr(t, "tied_to", "model.tokens")),
    "targets[2].tied_to (another shape)": (
        Q,
        lambda t: setattr(t, "tied_to", "model.embed_tokens"),
    ),
    "targets[9].tied_to (other hashes)": (HEAD, tie_with_other_hashes),
    "targets[9].base_dtype (unknown)": (HEAD, lambda t: setattr(t, "base_dtype", 99)),
}


def test_hostile_targets_are_refused_by_field(client):
    wrong = {}
    for case, (index, hurt) in HOSTILE.items():
        message = layout_message(layout_of())
        hurt(message.targets[index])
        request = pb.RegisterLayoutRequest(layout=message)
        said = refusal_of(partial(client.stub.RegisterLayout, request))
        field = f"layout.{case.partition(' ')[0]}"
        if not (said.startswith("INVALID_ARGUMENT: ") and field in said):
            wrong[case] = said
    assert wrong == {}


def test_what_format_1_cannot_say_needs_a_server_that_reads_format_2(client, refused):
    message = layout_message(layout_of())
    message.image_formats[:] = [1]
    with refused("INVALID_ARGUMENT", "layout.targets[0]: needs an image format of at least 2"):
        client.stub.RegisterLayout(pb.RegisterLayoutRequest(layout=message))


def test_what_is_said_of_the_base_needs_format_2_as_well(client, refused):
    """It would be dropped: the stored layout would be another than the one that was registered."""
    message = layout_message(layout_of())
    for index in (Q, HEAD):
        message.targets[index].other_names.clear()
    del message.targets[:Q], message.targets[1:]
    message.targets[0].ClearField("space")
    message.image_formats[:] = [1]
    message.targets[0].base_dtype = pb.DATA_TYPE_FLOAT32
    with refused("INVALID_ARGUMENT", "layout.targets[0]: needs an image format of at least 2"):
        client.stub.RegisterLayout(pb.RegisterLayoutRequest(layout=message))
    message.targets[0].ClearField("base_dtype")
    client.stub.RegisterLayout(pb.RegisterLayoutRequest(layout=message))


def test_a_float8_image_is_pulled_with_its_scales(serve, fused):
    """Compiled, and, by the next process, read from the disk."""
    layout = dataclasses.replace(layout_of(), image_format=3, adapter_dtype=FLOAT8)
    store = serve()
    digest = store.client.register("a", fused, base_model="org/base").adapter.digest
    expected = compile_image(open_checkpoint(fused), layout)
    for _ in range(2):
        answer = store.client.stub.RegisterLayout(
            pb.RegisterLayoutRequest(layout=layout_message(layout))
        )
        assert answer.image_format == 3
        assert answer.layout_id == layout_id(layout)
        pulled = store.client.pull(digest, answer.layout_id)
        assert pulled.data == bytes(expected.buffer.numpy().data)
        assert read_header(pulled.header).segments == expected.plan.segments
        assert {s.dtype for s in pulled.header.segments} == {pb.DATA_TYPE_FLOAT8_E4M3}
        assert all(s.scale not in (0.0, 1.0) for s in pulled.header.segments)
        assert pulled.is_whole
        store.idle()
        store.stop()
        store = serve()


def test_float8_adapters_need_a_server_and_a_store_of_format_3(client, refused):
    message = layout_message(dataclasses.replace(layout_of(), image_format=3, adapter_dtype=FLOAT8))
    message.image_formats[:] = [1, 2]
    with refused("INVALID_ARGUMENT", "layout.adapter_dtype: F8_E4M3 needs image format 3"):
        client.stub.RegisterLayout(pb.RegisterLayoutRequest(layout=message))
    message.image_formats[:] = [4]  # as format 3 is to a store of an earlier release
    with refused("FAILED_PRECONDITION", "layout.image_formats: [4] has none of this store's"):
        client.stub.RegisterLayout(pb.RegisterLayoutRequest(layout=message))


def test_no_layout_computes_in_float8(client, refused):
    message = layout_message(layout_of())
    message.dtype = pb.DATA_TYPE_FLOAT8_E4M3
    with refused("INVALID_ARGUMENT", "layout.dtype: F8_E4M3 is not a type that models compute in"):
        client.stub.RegisterLayout(pb.RegisterLayoutRequest(layout=message))


def test_what_is_known_of_the_base_is_part_of_the_layout(client, make_layout):
    layout = layout_of()
    hashed = change(layout, "lm_head", base_hashes=(b"1" * 32,) * 3, base_dtype=DataType.BFLOAT16)
    tied = change(layout, "lm_head", tied_to="model.embed_tokens")
    assert len({client.register_layout(each) for each in (layout, hashed, tied)}) == 3


PARTS = ["gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]


def test_verdict_on_a_fused_module_is_by_the_targets_that_it_computes(serve, fused):
    """A server that is restricted to some of them names the others."""
    store = serve()
    whole, part = (
        store.client.announce(layout_of(), lora_targets=names).announcement_id
        for names in (PARTS, ["gate_proj", "q_proj", "up_proj"])
    )
    store.client.register("a", fused, base_model="org/base")
    store.idle()
    adapter = store.client.get("a")
    assert list(adapter.targets) == ["gate_up_proj", "qkv_proj"]
    (state,) = adapter.layout_states
    assert {each.announcement_id: each.reason for each in state.servers} == {
        whole: "",
        part: "targets k_proj, v_proj are not among this server's --lora-targets "
        "(gate_proj, q_proj, up_proj)",
    }
