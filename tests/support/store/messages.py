"""Layouts as the messages that a server sends."""

from __future__ import annotations

import dataclasses

from adapter_store.api import convert as of_store
from contract.images.layout_rules import validate
from contract.images.layouts import Layout
from contract.protobuf import write_layout
from inference_svc.adapters.layout import ModelLayout
from inference_svc.store.convert import from_layout
from loadout.adapter_store.v1 import adapter_store_pb2 as pb


def layout_message(layout: Layout) -> pb.ModelLayout:
    """As a server sends it that reads images up to the layout's format."""
    return write_layout(layout, range(1, layout.image_format + 1))


def as_stored(layout: ModelLayout, image_format: int = 2) -> Layout:
    message = pb.ModelLayout.FromString(from_layout(layout).SerializeToString())
    made = dataclasses.replace(of_store.from_layout(message), image_format=image_format)
    validate(made)
    return made
