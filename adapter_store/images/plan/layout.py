"""Layouts: their identity, and their form in the catalog."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from adapter_store.catalog.layouts import Layouts
from adapter_store.checkpoint.reading.digest import canonical_json, sha256_text
from contract.images import layout_rules
from contract.images.dtypes import DataType
from contract.images.layouts import InvalidLayout, Layout
from contract.images.targets import Held, OtherName, Target, TargetKind
from servicekit.errors import InvalidArgument, NotFound

_TARGETS = re.compile(r'"targets":\s*\[')  # in a string its quotes would be escaped
_BETWEEN = re.compile(r"[\s,]*")
MAX_CACHED_TARGETS = 1 << 19
"""How many targets the parsed layouts in memory may have together: about 40 MB."""


def validate(layout: Layout) -> None:
    """Checks a layout that a server registers. Raises InvalidArgument, with the field as
    subject."""
    try:
        layout_rules.validate(layout)
    except InvalidLayout as error:
        raise refused_layout(error) from error


def refused_layout(error: InvalidLayout) -> InvalidArgument:
    return InvalidArgument(str(error), subject=error.field)


def layout_id(layout: Layout) -> str:
    """Returns "sha256:<hex>" of the layout's canonical JSON: equal ids compute alike."""
    return text_id(to_text(layout))


def text_id(text: str) -> str:
    """Returns the layout's id from the text of `to_text`."""
    return sha256_text(text)


def to_text(layout: Layout) -> str:
    """Returns the layout's canonical JSON. In format 1 absent slices and layers are null, and
    aliases, which are announced, are an empty list, so that layouts without any have the ids that
    they always had. From format 2 on absent fields are left out, and so is the base model's name,
    which is announced.

    It is written, and `from_text` reads it, one target at a time: a hundred thousand in one call
    would stop all other threads of the process.
    """
    fields: dict[str, Any] = {
        "config_sha256": layout.config_sha256,
        "dtype": layout.dtype.value,
        "image_format": layout.image_format,
    }
    if layout.adapter_dtype is not None:
        fields["adapter_dtype"] = layout.adapter_dtype.value
    if layout.image_format == 1:
        fields |= {"base_model": layout.base_model, "aliases": []}
    head = canonical_json(fields)
    to_fields = _format_1_fields if layout.image_format == 1 else _target_fields
    targets = ",".join(canonical_json(to_fields(target)) for target in layout.targets)
    return f'{head[:-1]},"targets":[{targets}]}}'  # the last of the sorted keys


def _format_1_fields(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "layer": target.layer,
        "group": target.group,
        "kind": target.kind.value,
        "in_features": target.in_features,
        "out_features": target.out_features,
        "experts": target.experts,
        "in_slice": target.in_slice and list(target.in_slice),
        "out_slice": target.out_slice and list(target.out_slice),
    }


def _target_fields(target: Target) -> dict[str, Any]:
    more = {
        "experts": target.experts if target.experts > 1 else None,
        "other_names": [_without_defaults(asdict(each)) for each in target.other_names],
        "space": target.space,
        "expert_slice": target.expert_slice,
        "rank_part": target.rank_part,
        "held": None if target.held is Held.HERE else target.held.value,
        "base_hashes": b"".join(target.base_hashes).hex(),
        "base_dtype": target.base_dtype and target.base_dtype.value,
        "tied_to": target.tied_to,
    }
    return _without_defaults(_format_1_fields(target) | more)


def _without_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in fields.items()
        if value is not None and value is not False and value not in ("", [], ())
    }


def from_text(text: str) -> Layout:
    """Parses a text that `to_text` returned, or an earlier release wrote: the same with aliases,
    and maybe with spaces, and unsorted but for the targets, which come last. From format 2 on the
    base model is "". The text is trusted."""
    start = _TARGETS.search(text)
    assert start is not None
    data = json.loads(text[: start.start()] + '"targets":[]}')
    return Layout(
        base_model=data.get("base_model", ""),
        config_sha256=data["config_sha256"],
        dtype=DataType(data["dtype"]),
        image_format=data["image_format"],
        targets=tuple(_read_targets(text, start.end())),
        adapter_dtype=_data_type(data.get("adapter_dtype")),
    )


def _read_targets(text: str, position: int) -> Iterator[Target]:
    decode = json.JSONDecoder().raw_decode
    while True:
        between = _BETWEEN.match(text, position)
        assert between is not None
        if text[between.end()] == "]":
            return
        fields, position = decode(text, between.end())
        yield _read_target(fields)


def _read_target(fields: dict[str, Any]) -> Target:
    found = {"layer": None, **fields, "kind": TargetKind(fields["kind"])}
    for key in ("in_slice", "out_slice", "expert_slice", "rank_part"):
        found[key] = _pair(fields.get(key))
    found["held"] = Held(fields.get("held", Held.HERE.value))
    hashes = bytes.fromhex(fields.get("base_hashes", ""))
    found["base_hashes"] = tuple(hashes[at : at + 32] for at in range(0, len(hashes), 32))
    found["base_dtype"] = _data_type(fields.get("base_dtype"))
    found["other_names"] = tuple(map(_read_other_name, fields.get("other_names", ())))
    return Target(**found)


def _read_other_name(fields: dict[str, Any]) -> OtherName:
    sizes = tuple(fields.get("block_sizes", ()))
    outputs = _pair(fields.get("outputs"))
    return OtherName(**{**fields, "outputs": outputs, "block_sizes": sizes})


def _data_type(value: str | None) -> DataType | None:
    return None if value is None else DataType(value)


def _pair(value: list[int] | None) -> tuple[int, int] | None:
    return None if value is None else (value[0], value[1])


class LayoutCache:
    """Parsed layouts: those used last, of MAX_CACHED_TARGETS together. Thread-safe."""

    def __init__(self, registered: Layouts) -> None:
        self._registered = registered
        self._lock = threading.Lock()
        self._layouts: OrderedDict[str, Layout] = OrderedDict()
        self._num_targets = 0

    def get(self, layout_id: str) -> Layout:
        """Raises NotFound."""
        with self._lock:
            if layout_id in self._layouts:
                self._layouts.move_to_end(layout_id)
                return self._layouts[layout_id]
        body = self._registered.body(layout_id)
        if body is None:
            raise no_layout(layout_id)
        layout = from_text(body)
        with self._lock:
            self._put(layout_id, layout)
        return layout

    def _put(self, layout_id: str, layout: Layout) -> None:
        if layout_id not in self._layouts:
            self._layouts[layout_id] = layout
            self._num_targets += len(layout.targets)
        while self._num_targets > MAX_CACHED_TARGETS and len(self._layouts) > 1:
            _, oldest = self._layouts.popitem(last=False)
            self._num_targets -= len(oldest.targets)


def no_layout(layout_id: str) -> NotFound:
    return NotFound(f"no layout {layout_id}; register it", subject=layout_id)
