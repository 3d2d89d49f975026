"""Announcements: their validation, their identity, and the contents of an image that they are
about. None of it decides bytes of images."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from adapter_store.checkpoint.reading.digest import canonical_json, sha256_text
from adapter_store.core import Announcement, ImageContent
from adapter_store.images.plan.plan import ImagePlan
from contract.images.layouts import Layout
from contract.images.segment_kinds import FURTHER_KINDS, SegmentKind
from contract.images.targets import TargetKind
from servicekit.errors import InvalidArgument

MAX_ALIASES = 64
MAX_LORA_TARGETS = 256
MAX_SEGMENT_KINDS = 64
MAX_RANK = 1 << 30
MAX_ADDED_TOKENS = 1 << 28
MAX_ALIAS_CHARS = 512
MAX_UNUSED_SPACES = 16
"""How many a verdict names: a layout may have one for each of its targets, and every record of the
adapter carries them."""
MAX_MODULE_CHARS = 128
MAX_FORM_CHARS = 64
MAX_RANKS = 1024

_MODULE = re.compile(r"[A-Za-z0-9_\-]+")
_FORM = re.compile(r"[a-z0-9_]+( [a-z0-9_]+)*")


def announcement_id(layout_id: str, announcement: Announcement) -> str:
    """Returns "sha256:<hex>": servers that say the same of the same layout have the same.

    Fields at their defaults are left out: servers that say no more than those of earlier releases
    have the ids that these have.
    """
    fields = [sorted(set(announcement.aliases)), announcement.max_rank, announcement.is_renewed]
    more: dict[str, Any] = {
        "base_model": announcement.base_model,
        "segment_kinds": sorted({kind.value for kind in announcement.segment_kinds}),
        "lora_targets": sorted(set(announcement.lora_targets)),
        "max_added_tokens": announcement.max_added_tokens,
        "applies_invocation_tokens": announcement.applies_invocation_tokens,
        "weight_form": announcement.weight_form,
        "part": announcement.part if announcement.part.num_ranks else None,
    }
    said = {key: value for key, value in more.items() if value}
    return sha256_text(
        canonical_json(["loadout-announcement", layout_id, *fields, *([said] if said else [])])
    )


def validate_announcement(announcement: Announcement, layout: Layout) -> None:
    """Raises InvalidArgument (subject: the field, such as "announcement.aliases[3]")."""
    message = "announcement" if announcement.is_renewed else "layout"

    def require(condition: bool, field: str, detail: str) -> None:
        if not condition:
            raise InvalidArgument(f"{message}.{field}: {detail}", subject=f"{message}.{field}")

    aliases, lora_targets = announcement.aliases, announcement.lora_targets
    require(len(aliases) <= MAX_ALIASES, "aliases", f"more than {MAX_ALIASES}")
    for index, alias in enumerate(aliases):
        is_name = 0 < len(alias) <= MAX_ALIAS_CHARS and alias.isprintable()
        require(is_name, f"aliases[{index}]", "not a printable name")
    require(announcement.max_rank <= MAX_RANK, "max_rank", f"above {MAX_RANK}")
    too_many = len(lora_targets) > MAX_LORA_TARGETS
    require(not too_many, "lora_targets", f"more than {MAX_LORA_TARGETS}")
    known = {target.module for target in layout.targets} if lora_targets else set()
    for index, name in enumerate(lora_targets):
        field = f"lora_targets[{index}]"
        is_name = len(name) <= MAX_MODULE_CHARS and _MODULE.fullmatch(name) is not None
        require(is_name, field, "not the last component of a module path, such as q_proj")
        require(name in known, field, f"no target of the layout is called {name}")
    is_few = announcement.max_added_tokens <= MAX_ADDED_TOKENS
    require(is_few, "max_added_tokens", f"above {MAX_ADDED_TOKENS}")
    form = announcement.weight_form
    is_form = not form or (len(form) <= MAX_FORM_CHARS and _FORM.fullmatch(form) is not None)
    require(is_form, "weight_form", 'not a form of weights, such as "int4" or "gguf q4_k"')
    part = announcement.part
    require(part.num_ranks <= MAX_RANKS, "num_ranks", f"above {MAX_RANKS}")
    is_one = part.rank_index < max(1, part.num_ranks)
    require(is_one, "rank_index", f"{part.rank_index} where num_ranks is {part.num_ranks}")
    is_first = part.rank_index == 0
    is_named = not (is_first and part.first_announcement_id)
    require(is_named, "first_announcement_id", "the first of the processes names another as first")


def content_of(plan: ImagePlan, layout: Layout) -> ImageContent:
    """Returns the contents of an image that decide whether a server can serve it."""
    names: dict[SegmentKind, set[str]] = defaultdict(set)
    modules: set[str] = set()
    for segment in plan.segments:
        target = layout.targets[segment.target]
        modules.add(target.module)
        names[segment.kind].add(target.short_name)
    kinds = [kind for kind in FURTHER_KINDS if kind in names]
    return ImageContent(
        modules=tuple(sorted(modules)),
        segment_kinds=tuple(kinds),
        names=tuple(tuple(sorted(names[kind])) for kind in kinds),
        added_tokens=plan.added_tokens,
        unused_spaces=tuple(sorted({space for space, _ in plan.unused})[:MAX_UNUSED_SPACES]),
        uneven_experts=plan.uneven_experts,
        shared_biases=tuple(sorted(_shared_biases(plan, layout))),
    )


def _shared_biases(plan: ImagePlan, layout: Layout) -> set[str]:
    """Returns the names of biases in place of the base's, whole, of targets of which each rank has
    some inputs and some outputs: all ranks would add them."""
    replaced = {
        layout.targets[segment.target]
        for segment in plan.segments
        if segment.kind is SegmentKind.FULL
    }
    biases = {each.name: each for each in replaced if each.kind is TargetKind.VECTOR}
    return {
        biases[name].short_name
        for target in layout.targets
        if target.in_slice is not None and target.out_slice is not None
        if (name := f"{target.name}.bias") in biases and biases[name].out_slice is None
    }
