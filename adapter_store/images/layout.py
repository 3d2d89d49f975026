"""Layouts: their validation, their identity, and their form in the catalog."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from adapter_store.checkpoint.digest import canonical_json, sha256_text
from adapter_store.core import Announcement, DataType, Layout, Target, TargetKind
from servicekit.errors import InvalidArgument

MAX_TARGETS = 1 << 17
MAX_ALIASES = 64
MAX_FEATURES = 1 << 28
MAX_RANK = 1 << 30
MAX_NAME_CHARS = 512

_NAME = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")
_TARGETS = re.compile(r'"targets":\s*\[')  # in a string its quotes would be escaped
_BETWEEN = re.compile(r"[\s,]*")
_SHA256 = re.compile(r"(sha256:)?[0-9a-f]{64}")


def layout_id(layout: Layout) -> str:
    """Returns "sha256:<hex>" of the layout's canonical JSON: equal ids compute alike."""
    return text_id(to_text(layout))


def text_id(text: str) -> str:
    """Returns the layout's id from what `to_text` returned."""
    return sha256_text(text)


def to_text(layout: Layout) -> str:
    """Returns the layout's canonical JSON. Absent slices and layers are null. Aliases, which are
    announced, are an empty list, so that layouts without any have the ids that they always had.

    It is written, and `from_text` reads it, one target at a time: a hundred thousand in one call
    would stop all other threads of the process.
    """
    head = canonical_json(
        {
            "base_model": layout.base_model,
            "aliases": [],
            "config_sha256": layout.config_sha256,
            "dtype": layout.dtype.value,
            "image_format": layout.image_format,
        }
    )
    targets = ",".join(canonical_json(_target_fields(target)) for target in layout.targets)
    return f'{head[:-1]},"targets":[{targets}]}}'  # the last of the sorted keys


def announcement_id(layout_id: str, announcement: Announcement) -> str:
    """Returns "sha256:<hex>": servers that say the same of the same layout have the same."""
    fields = [sorted(set(announcement.aliases)), announcement.max_rank, announcement.is_renewed]
    return sha256_text(canonical_json(["loadout-announcement", layout_id, *fields]))


def _target_fields(target: Target) -> dict[str, Any]:
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


def from_text(text: str) -> Layout:
    """Parses what `to_text` returned, or an earlier release wrote: the same with aliases, and maybe
    with spaces, and unsorted but for the targets, which come last. The text is trusted."""
    start = _TARGETS.search(text)
    assert start is not None
    data = json.loads(text[: start.start()] + '"targets":[]}')
    return Layout(
        base_model=data["base_model"],
        config_sha256=data["config_sha256"],
        dtype=DataType(data["dtype"]),
        image_format=data["image_format"],
        targets=tuple(_read_targets(text, start.end())),
    )


def _read_targets(text: str, position: int) -> Iterator[Target]:
    decode = json.JSONDecoder().raw_decode
    while True:
        between = _BETWEEN.match(text, position)
        assert between is not None
        if text[between.end()] == "]":
            return
        fields, position = decode(text, between.end())
        slices = {
            key: None if fields[key] is None else (int(fields[key][0]), int(fields[key][1]))
            for key in ("in_slice", "out_slice")
        }
        yield Target(**{**fields, **slices, "kind": TargetKind(fields["kind"])})


def runs(layout: Layout) -> Iterator[tuple[int, int]]:
    """Yields target ranges [start, end) of one layer each, in order of use: the embedding (no
    layer, before the first), every layer, the head (no layer, after the last)."""
    start = 0
    for index in range(1, len(layout.targets) + 1):
        if (
            index == len(layout.targets)
            or layout.targets[index].layer != layout.targets[start].layer
        ):
            yield start, index
            start = index


def validate(layout: Layout) -> None:
    """Raises InvalidArgument (subject: the field, such as "targets[3].in_features")."""
    _require(0 < len(layout.base_model) <= MAX_NAME_CHARS, "base_model", "1 to 512 characters")
    _require(layout.base_model.isprintable(), "base_model", "not printable")
    _require(
        _SHA256.fullmatch(layout.config_sha256) is not None,
        "config_sha256",
        "not a sha256 in lower-case hex",
    )
    _require(layout.dtype.is_computable, "dtype", "not one that models compute in")
    _require(0 < len(layout.targets) <= MAX_TARGETS, "targets", f"needs 1 to {MAX_TARGETS}")
    seen: dict[str, int] = {}
    for index, target in enumerate(layout.targets):
        _validate_target(target, f"targets[{index}]")
        first = seen.setdefault(target.name, index)
        _require(first == index, f"targets[{index}].name", f"same as targets[{first}]")
    _validate_order(layout)
    _validate_groups(layout)


def validate_announcement(announcement: Announcement) -> None:
    """Raises InvalidArgument (subject: the field, such as "announcement.aliases[3]")."""
    message = "announcement" if announcement.is_renewed else "layout"
    too_many = len(announcement.aliases) > MAX_ALIASES
    _require(not too_many, "aliases", f"more than {MAX_ALIASES}", message)
    for index, alias in enumerate(announcement.aliases):
        is_name = 0 < len(alias) <= MAX_NAME_CHARS and alias.isprintable()
        _require(is_name, f"aliases[{index}]", "not a printable name", message)
    is_rank = announcement.max_rank <= MAX_RANK
    _require(is_rank, "max_rank", f"above {MAX_RANK}", message)


def _validate_target(target: Target, field: str) -> None:
    is_name = len(target.name) <= MAX_NAME_CHARS and _NAME.fullmatch(target.name) is not None
    _require(is_name, f"{field}.name", "not a module path")
    _require(
        0 < len(target.group) <= MAX_NAME_CHARS and target.group.isprintable(),
        f"{field}.group",
        "not a printable name",
    )
    _require(target.layer is None or target.layer >= 0, f"{field}.layer", "negative")
    _require(target.experts == 1, f"{field}.experts", "mixtures of experts are not supported")
    for side, size, part in (
        ("in", target.in_features, target.in_slice),
        ("out", target.out_features, target.out_slice),
    ):
        _require(0 < size <= MAX_FEATURES, f"{field}.{side}_features", f"1 to {MAX_FEATURES}")
        if part is not None:
            _require(
                0 <= part[0] < part[1] <= size,
                f"{field}.{side}_slice",
                f"[{part[0]}, {part[1]}) is not within {size} features",
            )


def _validate_order(layout: Layout) -> None:
    """Requires the order embedding, layers ascending, head, each in one run, with embeddings only
    in the first."""
    previous: int | None = None
    for number, (start, _) in enumerate(runs(layout)):
        layer = layout.targets[start].layer
        field = f"targets[{start}].layer"
        if layer is None:
            is_last = all(target.layer is None for target in layout.targets[start:])
            _require(number == 0 or is_last, field, "targets without a layer lie between layers")
        else:
            _require(previous is None or layer > previous, field, "layers are not in order of use")
            previous = layer
    _, end_of_first = next(runs(layout))
    for index, target in enumerate(layout.targets):
        comes_first = index < end_of_first and target.layer is None
        _require(
            target.kind is not TargetKind.EMBEDDING or comes_first,
            f"targets[{index}].kind",
            "an embedding comes before the layers",
        )


def _validate_groups(layout: Layout) -> None:
    """Requires that targets of a group are neighbours in one layer and read the same slice of one
    input."""
    last: dict[tuple[int | None, str], int] = {}
    for index, target in enumerate(layout.targets):
        key = (target.layer, target.group)
        if key in last:
            first = layout.targets[last[key]]
            field = f"targets[{index}].group"
            _require(last[key] == index - 1, field, "targets of a group are not neighbours")
            _require(
                (first.kind, first.in_features, first.in_slice)
                == (target.kind, target.in_features, target.in_slice),
                field,
                f"does not read the same input as {first.name}",
            )
        last[key] = index


def _require(condition: bool, field: str, detail: str, message: str = "layout") -> None:
    if not condition:
        raise InvalidArgument(f"{message}.{field}: {detail}", subject=f"{message}.{field}")
