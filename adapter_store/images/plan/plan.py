"""Plans an image: where everything lies in it, from shapes alone, before a byte is compiled.

The segments of the targets that the adapter has and the layout holds, in the layout's order of use,
the segments of one target in the order of `sources`, each starting on 256 bytes with zeros before
it as needed. An A that targets of one layer share, as they do of a fused module, lies there once,
and so do rows of an embedding that a tied head shares. The parts are the bytes of one run of equal
layer each, up to the next part's start; a run without segments has no part. The image's length is a
multiple of 256; it may be empty.

Image format 1 has A and B of matrices and embeddings only. Its bytes are the same as in format 2.
Format 3 is format 2, and A and B may be float8, with a scale for each segment.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from adapter_store.checkpoint.open import Checkpoint
from adapter_store.checkpoint.reading.digest import canonical_json, sha256_text
from adapter_store.checkpoint.weights import Replacement
from adapter_store.errors import IncompatibleAdapter
from adapter_store.images.plan.base_rows import Kept, kept_rows
from adapter_store.images.plan.fit import count_added_tokens, fit
from adapter_store.images.plan.layout import layout_id
from adapter_store.images.plan.sources import SegmentSource, has_even_experts, segment_sources
from adapter_store.images.plan.uses import Use
from contract.images import rules
from contract.images.dtypes import FLOAT8, DataType
from contract.images.header import ImageHeader, Segment, align
from contract.images.layouts import Layout, runs
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Held

_ALL = Kept(is_whole=True)
_SUFFIXES = {kind: kind.value.upper() for kind in SegmentKind}
IMAGE_FORMATS = (1, 2, 3)
"""The formats that this store can compile, oldest first."""

COMPILER_REVISION = 1
"""Incremented whenever the same input would compile to other bytes."""

COMPILER = f"formats (1,), revision {COMPILER_REVISION}"
"""The formats of images and verdicts, as releases wrote them that knew one format: a further one is
of other layouts, and takes nothing from the images and verdicts that there are."""


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """An image's identity and structure. Images with equal `image_id` have the same bytes.

    `names` are the tensors' of `segments`, one for one, as are `sources`; `parts` are the parts'
    byte ranges [start, end), which cover the image.
    """

    image_id: str
    digest: str
    layout_id: str
    image_format: int
    dtype: DataType
    segments: tuple[Segment, ...]
    names: tuple[str, ...]
    parts: tuple[tuple[int, int], ...]
    total_bytes: int
    sources: tuple[SegmentSource, ...] = field(default=(), compare=False, repr=False)
    """The parts of the segments, until these are made."""
    added_tokens: int = 0
    """Rows that the adapter has behind the base's vocabulary, here or elsewhere."""
    unused: tuple[tuple[str, str], ...] = ()
    """The adapter's contents that no request passes through: the target's space, and the module."""
    uneven_experts: tuple[str, ...] = ()
    """Targets of experts, without layers, whose segments have other sizes in other ranks' parts."""
    has_scales: bool = True
    """Whether the scales of the segments are known. Those of float8 follow from values: see
    `scales`."""

    def without_sources(self) -> ImagePlan:
        return replace(self, sources=())

    def header(self, offset: int = 0) -> ImageHeader:
        """Returns the first message of a pull that starts at `offset`; of a plan with scales."""
        return ImageHeader(
            self.image_id,
            self.digest,
            self.layout_id,
            self.image_format,
            self.total_bytes,
            self.segments,
            offset,
        )

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the segments."""
        return tuple(segment.shape for segment in self.segments)


def plan_image(checkpoint: Checkpoint, layout: Layout, *, identity: str = "") -> ImagePlan:
    """Plans the image of `checkpoint` under a valid `layout`, of the base model that the adapter
    was registered for.

    `identity` is the layout's id where it is known, because it takes long to compute for a large
    layout.

    Raises IncompatibleAdapter, with the tensor or target as subject: FORMAT_UNKNOWN, and as `fit`;
    and CorruptData if it seems so because the source differs from its digest.
    """
    all_uses = _uses_of(checkpoint, layout)
    uses = [use for use in all_uses if use.target.held is Held.HERE]
    segments: list[Segment] = []
    names: list[str] = []
    sources: list[SegmentSource] = []
    parts: list[tuple[int, int]] = []
    end = 0
    position = 0
    replaced: dict[Hashable, int] = {}
    for run_start, run_end in runs(layout):
        assert position == len(uses) or uses[position].column >= run_start
        part_start = end
        shared: dict[Hashable, int] = {}
        while position < len(uses) and uses[position].column < run_end:
            use = uses[position]
            position += 1
            for source in _sources_of(checkpoint, use, layout):
                length = source.length_bytes
                offset = end
                if use.other is not None and source.kind is SegmentKind.A:
                    offset = shared.setdefault(source.identity, end)
                elif isinstance(use.changes, Replacement):
                    offset = replaced.setdefault(source.identity, end)
                segments.append(_segment(use.column, source, offset))
                names.append(f"{use.target.name}.{_SUFFIXES[source.kind]}")
                sources.append(source)
                if offset == end:  # else its bytes lie there already
                    end = align(end + length)
        if end > part_start:
            parts.append((part_start, end))
    identity = identity or layout_id(layout)
    plan = ImagePlan(
        image_id=image_id(checkpoint.digest, identity, layout.image_format),
        digest=checkpoint.digest,
        layout_id=identity,
        image_format=layout.image_format,
        dtype=layout.dtype,
        segments=tuple(segments),
        names=tuple(names),
        parts=tuple(parts),
        total_bytes=end,
        sources=tuple(sources),
        added_tokens=count_added_tokens(all_uses),
        unused=tuple(_unused(all_uses)),
        uneven_experts=tuple(sorted(_uneven(uses, layout))),
        has_scales=all(segment.dtype is not FLOAT8 for segment in segments),
    )
    rules.validate(plan.header(), layout)
    return plan


def _segment(column: int, source: SegmentSource, offset: int) -> Segment:
    return Segment(
        column,
        source.kind,
        source.rank,
        offset,
        source.length_bytes,
        source.dtype,
        source.shape,
    )


def _unused(uses: Iterable[Use]) -> Iterator[tuple[str, str]]:
    for use in uses:
        if use.target.held is Held.UNUSED:
            yield use.target.space or use.target.name, use.changes.name


def _uneven(uses: Iterable[Use], layout: Layout) -> set[str]:
    return {use.target.short_name for use in uses if not has_even_experts(use, layout)}


def _uses_of(checkpoint: Checkpoint, layout: Layout) -> list[Use]:
    """Returns the adapter's changes of the layout, in order. Raises as `plan_image`."""
    if layout.image_format not in IMAGE_FORMATS:
        raise IncompatibleAdapter(
            f"image format {layout.image_format} is not known",
            subject="image_format",
            reason="FORMAT_UNKNOWN",
        )
    try:
        return fit(checkpoint, layout)
    except IncompatibleAdapter:
        checkpoint.verify()  # a damaged blob must not look like an adapter that does not fit
        raise


def _sources_of(checkpoint: Checkpoint, use: Use, layout: Layout) -> Iterator[SegmentSource]:
    """Returns the segments of a target, in order."""
    kept = _ALL
    if isinstance(use.changes, Replacement):
        kept = kept_rows(checkpoint, use.changes, use.target)
    return segment_sources(use, layout, kept)


def image_id(digest: str, layout_id: str, image_format: int) -> str:
    """Returns the identity of the image that this compiler makes, before it is compiled."""
    return sha256_text(
        canonical_json(["loadout-image", digest, layout_id, image_format, COMPILER_REVISION])
    )
