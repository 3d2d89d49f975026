"""Plans an image: where everything lies in it, from shapes alone, before a byte is compiled.

Image format 1: the segments of the targets that the adapter has, in the layout's order of use, A
then B, each starting on 256 bytes with zeros before it as needed. `A` is [rank, in] (an
embedding's [vocab, rank]), `B` is transposed to [rank, out], both row-major in the layout's dtype,
cut to the layout's slices. The parts are the bytes of one run of equal layer each, up to the
next part's start; a run without segments has no part. The image's length is a multiple of 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adapter_store.checkpoint.digest import canonical_json, sha256_text
from adapter_store.checkpoint.module_patterns import OUTPUT_LAYER, path_tails
from adapter_store.checkpoint.open import Checkpoint
from adapter_store.checkpoint.tensors import TargetWeights
from adapter_store.core import DataType, Layout, Segment, SegmentKind, Target, TargetKind
from adapter_store.errors import IncompatibleAdapter
from adapter_store.images.layout import layout_id, runs

IMAGE_FORMAT = 1
IMAGE_FORMATS = (IMAGE_FORMAT,)
"""The formats that this store can compile, oldest first."""

COMPILER_REVISION = 1
"""Incremented whenever the same input would compile to other bytes."""

SEGMENT_ALIGNMENT = 256

ADDED_TOKENS = (
    ": tokens were added to the vocabulary of the base model; an adapter cannot have any of its own"
)


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """An image's identity and structure. Images with equal `image_id` have the same bytes.

    `names` and `shapes` describe the tensors of `segments`, one for one; `parts` are the parts'
    byte ranges [start, end), which cover the image.
    """

    image_id: str
    digest: str
    layout_id: str
    image_format: int
    dtype: DataType
    segments: tuple[Segment, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    parts: tuple[tuple[int, int], ...]
    total_bytes: int


def plan_image(checkpoint: Checkpoint, layout: Layout, *, identity: str = "") -> ImagePlan:
    """Plans the image of `checkpoint` under a valid `layout`, of the base model that the adapter
    was registered for.

    `identity` is the layout's id where it is known: that of a large layout takes long to compute.

    Raises IncompatibleAdapter, with the tensor or target as subject: FORMAT_UNKNOWN,
    TARGET_UNKNOWN, KIND_MISMATCH, SHAPE_MISMATCH or TARGET_MISSING; and CorruptData if it seems so
    because the source differs from its digest.
    """
    try:
        _check_fits(checkpoint, layout)
    except IncompatibleAdapter:
        checkpoint.verify()  # a damaged blob must not look like an adapter that does not fit
        raise
    segments: list[Segment] = []
    names: list[str] = []
    shapes: list[tuple[int, int]] = []
    parts: list[tuple[int, int]] = []
    end = 0
    for run_start, run_end in runs(layout):
        part_start = end
        for index in range(run_start, run_end):
            target = layout.targets[index]
            weights = checkpoint.targets.get(target.name)
            if weights is None:
                continue
            for kind, shape in _segment_shapes(target, weights):
                length = shape[0] * shape[1] * layout.dtype.itemsize
                segments.append(Segment(index, kind, weights.rank, end, length))
                names.append(f"{target.name}.{kind.value.upper()}")
                shapes.append(shape)
                end = align(end + length)
        if end > part_start:
            parts.append((part_start, end))
    identity = identity or layout_id(layout)
    return ImagePlan(
        image_id=image_id(checkpoint.digest, identity, layout.image_format),
        digest=checkpoint.digest,
        layout_id=identity,
        image_format=layout.image_format,
        dtype=layout.dtype,
        segments=tuple(segments),
        names=tuple(names),
        shapes=tuple(shapes),
        parts=tuple(parts),
        total_bytes=end,
    )


def image_id(digest: str, layout_id: str, image_format: int) -> str:
    """Returns the identity of the image that this compiler makes, before it is compiled."""
    return sha256_text(
        canonical_json(["loadout-image", digest, layout_id, image_format, COMPILER_REVISION])
    )


def align(offset: int) -> int:
    """Returns the next offset at which a segment may start."""
    return -(-offset // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT


def _segment_shapes(
    target: Target, weights: TargetWeights
) -> Iterator[tuple[SegmentKind, tuple[int, int]]]:
    rank, num_in, num_out = weights.rank, target.num_in, target.num_out
    is_embedding = target.kind is TargetKind.EMBEDDING
    yield SegmentKind.A, (num_in, rank) if is_embedding else (rank, num_in)
    yield SegmentKind.B, (rank, num_out)


def _check_fits(checkpoint: Checkpoint, layout: Layout) -> None:
    if layout.image_format not in IMAGE_FORMATS:
        raise IncompatibleAdapter(
            f"image format {layout.image_format} is not known",
            subject="image_format",
            reason="FORMAT_UNKNOWN",
        )
    by_name = {target.name: target for target in layout.targets}
    for weights in checkpoint.targets.values():
        target = by_name.get(weights.name)
        if target is None:
            raise _incompatible(
                weights.a.key, "TARGET_UNKNOWN", f"{layout.base_model} has no {weights.name}"
            )
        if target.kind is not weights.kind:
            raise _incompatible(
                weights.a.key, "KIND_MISMATCH", f"{weights.name} is a {target.kind.value} target"
            )
        _check_shapes(weights, target)
    _check_complete(checkpoint, layout)


def _check_shapes(weights: TargetWeights, target: Target) -> None:
    for record, side, found, expected in (
        (weights.a, "in", weights.in_features, target.in_features),
        (weights.b, "out", weights.out_features, target.out_features),
    ):
        if found != expected:
            why = ADDED_TOKENS if _is_vocabulary(target, side) and found > expected else ""
            raise _incompatible(
                record.key,
                "SHAPE_MISMATCH",
                f"shape {list(record.shape)} has {found} {side}_features, "
                f"{target.name} has {expected}{why}",
            )


def _is_vocabulary(target: Target, side: str) -> bool:
    """Returns whether this side of a target has a feature for each token."""
    if target.kind is TargetKind.EMBEDDING:
        return side == "in"
    return side == "out" and target.name == OUTPUT_LAYER


def _check_complete(checkpoint: Checkpoint, layout: Layout) -> None:
    """Requires that every listed module of this model has weights in some layer.

    A list may name modules of other models, and weights may be pruned in some layers; but a module
    that is listed, present in the model and absent from the adapter was lost on the way.
    """
    config = checkpoint.config
    lost = checkpoint.lost_modules
    if not lost:
        return
    for target in layout.targets:
        entry = next((tail for tail in path_tails(target.name) if tail in lost), None)
        is_embedding = target.kind is TargetKind.EMBEDDING
        if entry is not None and config.selects(target.name, is_embedding=is_embedding):
            raise IncompatibleAdapter(
                f"target_modules lists {entry!r}, but the adapter has no weights for it",
                subject=target.name,
                reason="TARGET_MISSING",
            )


def _incompatible(key: str, reason: str, detail: str) -> IncompatibleAdapter:
    return IncompatibleAdapter(f"{key}: {detail}", subject=key, reason=reason)
