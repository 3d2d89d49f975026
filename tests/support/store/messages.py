"""Layouts as the messages that a server sends."""

from __future__ import annotations

import dataclasses

from adapter_store.api import convert as of_store
from adapter_store.core import Layout, Target
from adapter_store.images.layout_checks import validate
from inference_svc.adapters.layout import ModelLayout
from inference_svc.store.convert import from_layout
from loadout.adapter_store.v1 import adapter_store_pb2 as pb

DTYPES = {"F32": pb.DATA_TYPE_FLOAT32, "F16": pb.DATA_TYPE_FLOAT16, "BF16": pb.DATA_TYPE_BFLOAT16}


def layout_message(layout: Layout) -> pb.ModelLayout:
    """As a server sends it that reads images up to the layout's format."""
    return pb.ModelLayout(
        base_model=layout.base_model,
        config_sha256=layout.config_sha256,
        dtype=DTYPES[layout.dtype.value],
        image_formats=range(1, layout.image_format + 1),
        targets=map(target_message, layout.targets),
    )


def target_message(target: Target) -> pb.Target:
    message = pb.Target(
        name=target.name,
        layer=target.layer,
        group=target.group,
        kind=pb.TargetKind.Value(f"TARGET_KIND_{target.kind.name}"),
        in_features=target.in_features,
        out_features=target.out_features,
        experts=target.experts,
        space=target.space,
        held=pb.Held.Value(f"HELD_{target.held.name}"),
        base_hashes=target.base_hashes,
        base_dtype=DTYPES[target.base_dtype.value] if target.base_dtype else 0,
        tied_to=target.tied_to,
    )
    for name in ("in_slice", "out_slice", "expert_slice"):
        if (part := getattr(target, name)) is not None:
            getattr(message, name).CopyFrom(pb.Slice(start=part[0], end=part[1]))
    if target.rank_part is not None:
        index, count = target.rank_part
        message.rank_part.CopyFrom(pb.RankPart(index=index, count=count))
    for other in target.other_names:
        added = message.other_names.add(
            name=other.name,
            block_sizes=other.block_sizes,
            block_part=other.block_part,
            transposed=other.transposed,
        )
        if other.outputs is not None:
            added.outputs.CopyFrom(pb.Slice(start=other.outputs[0], end=other.outputs[1]))
    return message


def as_stored(layout: ModelLayout, image_format: int = 2) -> Layout:
    message = pb.ModelLayout.FromString(from_layout(layout).SerializeToString())
    made = dataclasses.replace(of_store.from_layout(message), image_format=image_format)
    validate(made)
    return made
