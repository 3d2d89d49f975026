"""The rules of layouts, checked when a server registers one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from contract.images.dtypes import FLOAT8, FLOAT8_FORMAT
from contract.images.layouts import InvalidLayout, Layout, runs
from contract.images.targets import HASHED_ROWS, OtherName, Target, TargetKind

MAX_TARGETS = 1 << 17
MAX_FEATURES = 1 << 28
MAX_NAME_CHARS = 512
MAX_EXPERTS = 1 << 14
MAX_RANK_PARTS = 1 << 10
MAX_OTHER_NAMES = 16
"""Of one target."""
MAX_BLOCK_SIZES = 16
MAX_ALL_OTHER_NAMES = 1 << 18
MAX_ALL_HASHES = 1 << 16
"""Hashes of the base's weights in a layout, 2 MiB."""

_NAME = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")
_SHA256 = re.compile(r"(sha256:)?[0-9a-f]{64}")
_HASH_BYTES = 32


def validate(layout: Layout) -> None:
    """Raises InvalidLayout unless servers and stores can agree on its images."""
    _require(0 < len(layout.base_model) <= MAX_NAME_CHARS, "base_model", "1 to 512 characters")
    _require(layout.base_model.isprintable(), "base_model", "not printable")
    _require(
        _SHA256.fullmatch(layout.config_sha256) is not None,
        "config_sha256",
        "not a sha256 in lower-case hex",
    )
    _require(
        layout.dtype.is_computable,
        "dtype",
        f"{layout.dtype.value} is not a type that models compute in",
    )
    _validate_adapter_dtype(layout)
    _require(0 < len(layout.targets) <= MAX_TARGETS, "targets", f"needs 1 to {MAX_TARGETS}")
    seen: dict[str, int] = {}
    for index, target in enumerate(layout.targets):
        field = f"targets[{index}]"
        if layout.image_format == 1:
            _require(not target.needs_format_2, field, "needs an image format of at least 2")
        _validate_target(target, field)
        first = seen.setdefault(target.name, index)
        _require(first == index, f"{field}.name", f"same as targets[{first}]")
    _validate_order(layout)
    _validate_groups(layout)
    _validate_other_names(layout, seen)
    _validate_ties(layout, seen)
    num_hashes = sum(len(target.base_hashes) for target in layout.targets)
    _require(num_hashes <= MAX_ALL_HASHES, "targets", f"more than {MAX_ALL_HASHES} base_hashes")


def _validate_adapter_dtype(layout: Layout) -> None:
    dtype, field = layout.adapter_dtype, "adapter_dtype"
    if dtype is None:
        return
    is_known = dtype is FLOAT8
    _require(is_known, field, f"{dtype.value} is not {FLOAT8.value}; leave it out for dtype's")
    is_new = layout.image_format >= FLOAT8_FORMAT
    _require(is_new, field, f"{dtype.value} needs image format {FLOAT8_FORMAT} or later")


def _validate_target(target: Target, field: str) -> None:
    _require(_is_module(target.name), f"{field}.name", "not a module path")
    is_name = 0 < len(target.group) <= MAX_NAME_CHARS and target.group.isprintable()
    _require(is_name, f"{field}.group", "not a printable name")
    is_space = len(target.space) <= MAX_NAME_CHARS and (target.space + " ").isprintable()
    _require(is_space, f"{field}.space", "not a printable name")
    _require(target.layer is None or target.layer >= 0, f"{field}.layer", "negative")
    _validate_sizes(target, field)
    _validate_experts(target, field)
    _validate_rank_part(target, field)
    _validate_hashes(target, field)
    for index, other in enumerate(target.other_names):
        _validate_other_name(other, target, f"{field}.other_names[{index}]")
    too_many = len(target.other_names) > MAX_OTHER_NAMES
    _require(not too_many, f"{field}.other_names", f"more than {MAX_OTHER_NAMES}")


def _validate_sizes(target: Target, field: str) -> None:
    is_vector = target.kind is TargetKind.VECTOR
    least_in = most_in = 0
    if not is_vector:
        least_in, most_in = 1, MAX_FEATURES
    # Without outputs of its own: the adapter's, such as a classifier's, and its bias's.
    least_out = 0 if target.kind in (TargetKind.LINEAR, TargetKind.VECTOR) else 1
    for side, size, part, least, most in (
        ("in", target.in_features, target.in_slice, least_in, most_in),
        ("out", target.out_features, target.out_slice, least_out, MAX_FEATURES),
    ):
        _require(least <= size <= most, f"{field}.{side}_features", f"{least} to {most}")
        _validate_slice(part, size, f"{field}.{side}_slice", "features")


def _validate_slice(part: tuple[int, int] | None, size: int, field: str, of: str) -> None:
    if part is not None:
        is_within = 0 <= part[0] < part[1] <= size
        _require(is_within, field, f"[{part[0]}, {part[1]}) is not within {size} {of}")


def _validate_experts(target: Target, field: str) -> None:
    if target.kind is TargetKind.EXPERTS:
        is_mixture = 2 <= target.experts <= MAX_EXPERTS
        _require(is_mixture, f"{field}.experts", f"2 to {MAX_EXPERTS} of a target of experts")
    else:
        _require(target.experts == 1, f"{field}.experts", "of targets of experts only")
        _require(target.expert_slice is None, f"{field}.expert_slice", "without experts")
    _validate_slice(target.expert_slice, target.experts, f"{field}.expert_slice", "experts")


def _validate_rank_part(target: Target, field: str) -> None:
    if target.rank_part is None:
        return
    index, count = target.rank_part
    field = f"{field}.rank_part"
    _require(target.kind is not TargetKind.VECTOR, field, "a vector has no rank")
    is_part = 0 <= index < count <= MAX_RANK_PARTS
    _require(is_part, field, f"part {index} of {count} is not one of at most {MAX_RANK_PARTS}")


def _validate_hashes(target: Target, field: str) -> None:
    if not target.base_hashes:
        return
    _require(target.kind is not TargetKind.EXPERTS, f"{field}.base_hashes", "not of experts")
    expected = -(-target.num_rows // HASHED_ROWS)
    found = len(target.base_hashes)
    detail = f"{found} of {target.num_rows} rows, expected {expected}"
    _require(found == expected, f"{field}.base_hashes", detail)
    is_hash = all(len(each) == _HASH_BYTES for each in target.base_hashes)
    _require(is_hash, f"{field}.base_hashes", "not a sha256 of 32 bytes")
    _require(target.base_dtype is not None, f"{field}.base_dtype", "needed for base_hashes")


def _validate_other_name(other: OtherName, target: Target, field: str) -> None:
    _require(_is_module(other.name), f"{field}.name", "not a module path")
    is_whole = other.outputs is None and not other.block_sizes
    is_matrix = target.kind in (TargetKind.LINEAR, TargetKind.EXPERTS)
    _require(is_whole or is_matrix, field, f"{target.kind.value} targets have no parts")
    if other.outputs is not None:
        start, end = other.outputs
        _require(not other.block_sizes, f"{field}.block_sizes", "outputs have it already")
        size = f"{target.out_features} outputs"
        is_part = 0 <= start < end <= MAX_FEATURES and end - start == target.out_features
        _require(is_part, f"{field}.outputs", f"[{start}, {end}) is not the place of {size}")
    if other.block_sizes:
        sizes = other.block_sizes
        is_size = len(sizes) <= MAX_BLOCK_SIZES and all(0 < n <= MAX_FEATURES for n in sizes)
        _require(is_size, f"{field}.block_sizes", f"at most {MAX_BLOCK_SIZES} sizes above 0")
        _require(other.block_part < len(sizes), f"{field}.block_part", "not one of block_sizes")
        is_even = target.out_features % sizes[other.block_part] == 0
        _require(is_even, f"{field}.block_sizes", f"do not divide {target.out_features} outputs")


def _validate_other_names(layout: Layout, targets: dict[str, int]) -> None:
    """Requires that a name means one target, or all outputs of a module that computes several."""
    users: defaultdict[str, list[tuple[int, OtherName]]] = defaultdict(list)
    num_names = 0
    for index, target in enumerate(layout.targets):
        num_names += len(target.other_names)
        for other in target.other_names:
            field = f"targets[{index}].other_names"
            _require(other.name not in targets, field, f"{other.name} is a target's own name")
            users[other.name].append((index, other))
    _require(num_names <= MAX_ALL_OTHER_NAMES, "targets", f"more than {MAX_ALL_OTHER_NAMES} names")
    for name, shared in users.items():
        index = shared[-1][0]
        field = f"targets[{index}].other_names"
        is_one = len(shared) == 1 and shared[0][1].outputs is None and not shared[0][1].block_sizes
        if not is_one:
            _require(_is_tiled(layout, shared), field, f"{name} is not, once, of each output")
            members = [layout.targets[each] for each, _ in shared]
            inputs = {(each.kind, each.in_features, each.experts) for each in members}
            _require(len(inputs) == 1, field, f"targets of {name} do not read the same input")


def _is_tiled(layout: Layout, shared: Sequence[tuple[int, OtherName]]) -> bool:
    """Returns whether the parts make up the module's outputs, each once."""
    sizes = {other.block_sizes for _, other in shared}
    if len(sizes) > 1 or len({other.transposed for _, other in shared}) > 1:
        return False
    [block_sizes] = sizes
    if block_sizes:
        parts = sorted(other.block_part for _, other in shared)
        blocks = {
            layout.targets[index].out_features // block_sizes[other.block_part]
            for index, other in shared
        }
        return parts == list(range(len(block_sizes))) and len(blocks) == 1
    ranges = sorted(other.outputs for _, other in shared if other.outputs is not None)
    ends = [0, *(end for _, end in ranges)]
    is_gapless = all(start == end for (start, _), end in zip(ranges, ends, strict=False))
    return len(ranges) == len(shared) and is_gapless


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
                list(_group_facts(first)) == list(_group_facts(target)),
                field,
                f"does not read the same input as {first.name}",
            )
        last[key] = index


def _group_facts(target: Target) -> Iterator[object]:
    """Yields the common fields of targets of one group."""
    yield from (target.kind, target.in_features, target.in_slice, target.space)
    yield from (target.experts, target.expert_slice)


def _validate_ties(layout: Layout, indices: Mapping[str, int]) -> None:
    """Requires that a tied target has the shape of an embedding, and the known facts of its
    weight."""
    tied: set[str] = set()
    for index, target in enumerate(layout.targets):
        if not target.tied_to:
            continue
        field = f"targets[{index}].tied_to"
        _require(target.tied_to not in tied, field, "the embedding of another target, too")
        tied.add(target.tied_to)
        embedding = layout.targets[indices.get(target.tied_to, index)]
        is_known = embedding.kind is TargetKind.EMBEDDING and target.kind is TargetKind.LINEAR
        _require(is_known, field, "not the embedding of a linear target")
        shape = embedding.out_features, embedding.in_features
        is_alike = (target.in_features, target.out_features) == shape
        _require(is_alike, field, f"{embedding.name} has another shape")
        is_alike = (target.base_hashes, target.base_dtype) == (
            *(embedding.base_hashes, embedding.base_dtype),
        )
        _require(is_alike, field, f"{embedding.name} has other base_hashes")


def _is_module(name: str) -> bool:
    return len(name) <= MAX_NAME_CHARS and _NAME.fullmatch(name) is not None


def _require(condition: bool, field: str, detail: str) -> None:
    if not condition:
        raise InvalidLayout(f"layout.{field}", detail)
