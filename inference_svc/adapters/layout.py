"""The weights of a model that LoRA may change: targets in order of use, and their groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import numpy as np
import torch

from inference_svc.adapters.extents import GRANULE_BYTES, round_up
from inference_svc.adapters.image_source import ImageHeader, Segment
from inference_svc.adapters.resident import Shape
from inference_svc.errors import AdapterUnusable, CorruptImage
from inference_svc.model.base_hashes import BaseHashes, HashesByName
from inference_svc.model.description import (
    EMBED_TOKENS,
    LM_HEAD,
)
from inference_svc.model.headers import TowerModule
from kernels.lora.plan import LoraContents
from kernels.lora.table import INDEX_BYTES

IMAGE_FORMATS = (1, 2)
"""Image formats that this service reads."""

KIND_WORDS = {
    "bias": "biases of LoRA",
    "magnitude": "DoRA magnitudes",
    "row_ids": "rows of its own for tokens",
    "rows": "rows of its own for tokens",
    "full": "whole weights of its own",
}
"""Kinds of segments in words."""
SEGMENT_KINDS = ("magnitude", "bias", "row_ids", "rows", "full")
"""The kinds of segments that this service applies besides A and B."""
ADDED_KINDS = ("a", "b", "bias")
"""Kinds of segments that add to the base's outputs: sums may have any number of them."""
_REPLACED = ("full", "row_ids", "rows")
_SHARED = ("a", *_REPLACED)
"""Kinds whose bytes targets may share: an A of a fused module, and a tied head's rows."""

FLOAT8 = "float8_e4m3fn"
"""A type of values that the contract has for segments, and that no store compiles yet."""

EXPERTS = "experts"
"""The kind of targets that are one projection of all experts."""
EMBEDDING, HEAD = "embed", "head"
"""Groups."""
TEXT, SAMPLED = "text", "sampled"
"""Spaces: all tokens, and those whose logits are computed."""

MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class OtherName:
    """A further name of a target; or a module that computes several targets, and which of its
    `outputs` are one target's: or, of blocks of these sizes that follow one another, the part
    `block_part` of each. `is_transposed`: adapters keep its weight as [in, out]."""

    name: str
    outputs: tuple[int, int] | None = None
    block_sizes: tuple[int, ...] = ()
    block_part: int = 0
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class LayoutTarget:
    """One weight that adapters may change. `kind` is "linear", "embedding", "experts", one
    projection of all `num_experts` of a mixture, or "vector", which LoRA does not change. `space`
    is the kind of tokens that pass through it, `tied_to` the embedding whose weight it has, `base`
    describes the checkpoint's weight. `is_unused`: no request passes through it; adapters may have
    it all the same."""

    name: str
    layer: int | None
    group: str
    kind: str
    in_features: int
    out_features: int
    other_names: tuple[OtherName, ...] = ()
    space: str = ""
    tied_to: str = ""
    base: BaseHashes | None = None
    is_unused: bool = False
    num_experts: int = 1

    @property
    def module(self) -> str:
        """The last component of its name, such as "q_proj"."""
        return self.name.rpartition(".")[2]

    @property
    def short_name(self) -> str:
        """Its name without the layer, such as "q_proj", "input_layernorm" or "q_proj.bias"."""
        module = self.name.removesuffix(".bias")
        return module.rpartition(".")[2] + self.name[len(module) :]


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """All targets of a model; the store identifies a layout by a layout_id.

    `targets` are the modules that LoRA may change, in order of use: the columns of the table of
    resident adapters. `vectors`, norms and biases of the base, have none, nor have `unused`, of
    towers that are not served. Images of format 1 know of `targets` only, but for experts, and
    count these.
    """

    base_model: str
    config_sha256: str
    dtype: torch.dtype
    image_formats: tuple[int, ...]
    targets: tuple[LayoutTarget, ...]
    vectors: tuple[LayoutTarget, ...] = ()
    unused: tuple[LayoutTarget, ...] = ()
    weights: tuple[int, ...] = field(init=False)
    """Indices into `all_targets` of targets for which adapters may replace the base's weight: the
    embedding, the head, norms; in the order in which the table of resident adapters counts them."""
    biases: Mapping[int, int] = field(init=False)
    """The target that adds each bias of the base, by the index of the bias into `all_targets`."""
    order_of_use: tuple[int, ...] = field(init=False)
    """Indices into `all_targets` as a store is told of them, and as images from format 2 on count
    them: embedding, layers, head."""

    @property
    def all_targets(self) -> tuple[LayoutTarget, ...]:
        """Targets, then vectors, then unused modules."""
        return self.targets + self.vectors + self.unused

    def __post_init__(self) -> None:
        found = self.all_targets

        def place(index: int) -> float:
            target = found[index]
            if target.layer is None:
                return math.inf if target.group == HEAD or target.space == SAMPLED else -1
            return target.layer

        order = sorted(range(len(found)), key=place)
        object.__setattr__(self, "order_of_use", tuple(order))
        columns = {target.name: column for column, target in enumerate(self.targets)}
        vectors = range(len(self.targets), len(self.targets) + len(self.vectors))
        biases = {
            index: columns[found[index].name.removesuffix(".bias")]
            for index in vectors
            if found[index].name.endswith(".bias")
        }
        tables = (columns[name] for name in (EMBED_TOKENS, LM_HEAD) if name in columns)
        weights = (*tables, *(index for index in vectors if index not in biases))
        object.__setattr__(self, "biases", biases)
        object.__setattr__(self, "weights", weights)

    @property
    def weight_indices(self) -> dict[str, int]:
        """The place of each of `weights` among these, by its name."""
        return {self.all_targets[each].name: index for index, each in enumerate(self.weights)}

    @property
    def of_format_1(self) -> ModelLayout:
        """The layout in words that stores of before format 2 know."""
        targets = (
            replace(target, other_names=(), space="", tied_to="", base=None)
            for target in self.targets
            if target.kind != EXPERTS
        )
        return replace(self, image_formats=(1,), targets=tuple(targets), vectors=(), unused=())

    def with_base(self, hashes: HashesByName) -> ModelLayout:
        """Returns the layout with the known hashes of the base's own weights."""

        def known(targets: Iterable[LayoutTarget]) -> tuple[LayoutTarget, ...]:
            return tuple(replace(target, base=hashes.get(target.name)) for target in targets)

        return replace(self, targets=known(self.targets), vectors=known(self.vectors))

    def with_towers(self, modules: Iterable[TowerModule]) -> ModelLayout:
        """Returns the layout with the modules of the whole model that are not served."""
        unused = (
            LayoutTarget(
                *(name, None, name, "linear", num_in, num_out),
                tuple(map(OtherName, others)),
                space=tower,
                is_unused=True,
            )
            for tower, (name, *others), num_in, num_out in modules
        )
        return replace(self, unused=tuple(unused))

    @property
    def modules(self) -> tuple[str, ...]:
        """Distinct last components of the targets' names, in order of use."""
        return tuple(dict.fromkeys(target.module for target in self.targets))

    @property
    def fused_modules(self) -> dict[str, tuple[str, ...]]:
        """The modules that a module computes which is several of them in one, by the last
        components of names, such as "qkv_proj"; of all layers together where these differ."""
        found: dict[str, dict[str, None]] = {}
        for target in self.targets:
            for other in target.other_names:
                found.setdefault(other.name.rpartition(".")[2], {})[target.module] = None
        return {name: tuple(members) for name, members in found.items()}

    def largest_image(self, rank: int, lora_targets: Collection[str] = ()) -> Shape:
        """Returns the shape of an image that has every target at this rank; of a server that is
        restricted to some, these."""
        end, cuts = 0, []
        for target in self.targets:
            if lora_targets and target.module not in lora_targets:
                continue
            cuts.append(end)
            for features in (target.in_features, target.out_features):
                matrix_bytes = round_up(rank * features * self.dtype.itemsize)
                if target.kind == EXPERTS:
                    end += round_up(target.num_experts * INDEX_BYTES)
                end += target.num_experts * matrix_bytes
        return Shape(end, tuple(cuts))

    def read_header(self, header: ImageHeader) -> ImageHeader:
        """Returns the header with indices into `all_targets`. Raises CorruptImage unless the image
        consists of segments that our targets may have, in order, each complete, aligned and within
        the image; from format 2 on a shared segment may lie where an earlier one lies. Raises
        AdapterUnusable for a segment or module that we do not apply.

        The ranks of an A and its B are one as no target that we announce has a part of A's: the
        tables of adapters and the kernels could have two.
        """
        if header.image_format not in self.image_formats:
            raise CorruptImage(f"image format {header.image_format} is not one we read")
        if header.image_format == 1:
            kinds = (target.kind for target in self.targets)
            order: Sequence[int] = [i for i, kind in enumerate(kinds) if kind != EXPERTS]
        else:
            order = self.order_of_use
        if not header.segments and header.image_format == 1:
            raise CorruptImage("the image has no segments")
        segments = self._with_columns(header.segments, order)
        if any(segment.dtype == FLOAT8 for segment in segments):
            raise AdapterUnusable(
                f"it has values in {FLOAT8}, which this server does not apply", subject="adapter"
            )
        self._check_kinds(segments)
        for segment in segments:
            self._check_form(segment, header.image_format)
        _check_places(header, segments)
        return replace(header, segments=segments)

    def _with_columns(
        self, segments: Sequence[Segment], order: Sequence[int]
    ) -> tuple[Segment, ...]:
        """Returns the segments with indices into `all_targets`."""
        previous = 0
        for segment in segments:
            if not previous <= segment.target < len(order):
                raise CorruptImage(f"segment at byte {segment.offset} does not fit the layout")
            previous = segment.target
        return tuple(
            Segment(
                *(order[each.target], each.kind, each.rank, each.offset, each.length_bytes),
                *(each.dtype, each.shape, each.scale),
            )
            for each in segments  # many: `replace` would take a millisecond
        )

    def _check_kinds(self, segments: Sequence[Segment]) -> None:
        """Raises CorruptImage unless each target has complete contents, in order: an A, its B of
        one rank, a bias and a magnitude, and then all or some rows of the base's weight, each with
        an id; and AdapterUnusable for a whole weight of a target that has none to replace."""
        refused: list[str] = []
        for target, found in groupby(segments, lambda segment: segment.target):
            own = list(found)
            kinds = tuple(segment.kind for segment in own)
            is_known = kinds in _COMPLETE and (kinds == ("full",) or target < len(self.targets))
            is_known &= kinds == ("a", "b") or self.all_targets[target].kind != EXPERTS
            if not is_known or len({each.rank for each in own if each.kind in ("a", "b")}) > 1:
                raise CorruptImage(
                    f"segment at byte {own[0].offset} is not an A followed by its B, nor another "
                    f"content that a target may have: {', '.join(kinds)}"
                )
            if kinds[-1] == "rows" and own[-2].shape[:1] != own[-1].shape[:1]:
                raise CorruptImage(
                    f"rows at byte {own[-1].offset} are more or fewer than their ids"
                )
            if not {*kinds}.isdisjoint(_REPLACED) and not self._is_replaceable(target):
                refused.append(self.all_targets[target].short_name)
        if refused:
            what = refused_kinds(("full",), refused)
            raise AdapterUnusable(f"it has {what}", subject="adapter")

    def _is_replaceable(self, target: int) -> bool:
        return target in self.biases or target in self.weights

    def check_contents(
        self,
        header: ImageHeader,
        read: Callable[[int, int], bytes],
        max_added_tokens: int = 0,
    ) -> None:
        """Checks the contents of an image, as `read_header` returned it, that do not take part in
        the computation; see `check_rows` and `check_experts`."""
        self.check_rows(header, read, max_added_tokens)
        self.check_experts(header, read)

    def check_rows(
        self,
        header: ImageHeader,
        read: Callable[[int, int], bytes],
        max_added_tokens: int = 0,
    ) -> None:
        """Checks which rows an image, as `read_header` returned it, has in the base's place; `read`
        returns bytes of it from an offset. Raises CorruptImage for ids that do not ascend, and
        AdapterUnusable for one too far behind the base's last, or behind it where an A is looked up
        by token, which would be read beyond its end."""
        looks_up = self.has_lookup(header)
        for segment in header.segments:
            if segment.kind != "row_ids":
                continue
            ids = np.frombuffer(read(segment.offset, segment.length_bytes), np.int32)
            if not len(ids) or ids[0] < 0 or (np.diff(ids.astype(np.int64)) <= 0).any():
                raise CorruptImage(f"row ids at byte {segment.offset} do not ascend")
            target = self.all_targets[segment.target]
            num_rows = target.in_features if target.kind == "embedding" else target.out_features
            if looks_up and ids[-1] >= num_rows:
                raise AdapterUnusable(
                    f"it has a row for token {ids[-1]}, after the {num_rows} rows of the model, "
                    "and A and B of the embedding, which have no row for it",
                    subject="adapter",
                )
            if ids[-1] >= num_rows + max_added_tokens:
                raise AdapterUnusable(
                    f"it has a row for token {ids[-1]}, and this server accepts "
                    f"{max_added_tokens} tokens after the {num_rows} of the model "
                    "(--max-added-tokens)",
                    subject="adapter",
                )

    def check_experts(self, header: ImageHeader, read: Callable[[int, int], bytes]) -> None:
        """Checks the indices of experts that an image, as `read_header` returned it, has: kernels
        compute with their values. Raises CorruptImage unless each matrix is aligned and within its
        segment, of a rank up to the segment's, and A and B of an expert of one."""
        for a, b in pairwise(header.segments):
            target = self.all_targets[a.target]
            if target.kind != EXPERTS or a.kind != "a":
                continue
            of_a, of_b = (
                _index_of(segment, read, target.num_experts, features * self.dtype.itemsize)
                for segment, features in ((a, target.in_features), (b, target.out_features))
            )
            if not np.array_equal(of_a, of_b):
                raise CorruptImage(f"A and B of experts at byte {a.offset} differ in rank")

    def refusal(self, header: ImageHeader, lora_targets: Collection[str] = ()) -> str | None:
        """Returns the targets that an image changes and that a server which is restricted to these
        targets, none: to none in particular, does not accept; in words that follow "has"."""
        found = dict.fromkeys(
            self.all_targets[self.biases.get(segment.target, segment.target)].module
            for segment in header.segments
        )
        return refused_targets([name for name in found if name not in lora_targets], lora_targets)

    def has_lookup(self, header: ImageHeader) -> bool:
        """Returns whether an image has an A that is looked up by token, with a row for each of the
        base's."""
        return any(
            each.kind == "a" and self.all_targets[each.target].kind == "embedding"
            for each in header.segments
        )

    def replaced_targets(self, header: ImageHeader) -> frozenset[str]:
        """Returns the names of targets whose base weights an image, as `read_header` returned it,
        scales or replaces, and does not only add to."""
        return frozenset(
            self.all_targets[self.biases.get(segment.target, segment.target)].name
            for segment in header.segments
            if segment.kind not in ADDED_KINDS
        )

    def computed_with(self, target: int, kind: str) -> str:
        """Returns the group that a segment of this kind is computed with; of weights that are
        replaced their name."""
        column = self.biases.get(target, target)
        is_replaced = kind in _REPLACED and column == target
        return self.all_targets[column].name if is_replaced else self.targets[column].group

    def contents(self, header: ImageHeader) -> LoraContents:
        """Returns the table's row of an image, as `read_header` returned it."""
        places = {target: place for place, target in enumerate(self.weights)}
        kinds = {segment.kind for segment in header.segments}
        targets, weights = set[int](), set[int]()
        for segment in header.segments:
            if segment.kind in _REPLACED and segment.target in places:
                weights.add(places[segment.target])
            else:
                targets.add(self.biases.get(segment.target, segment.target))
        has_biases = any(segment.target in self.biases for segment in header.segments)
        return LoraContents(
            frozenset(targets),
            frozenset(weights),
            has_vectors=has_biases or not kinds.isdisjoint(("bias", "magnitude")),
            has_rows="rows" in kinds,
        )

    def _check_form(self, segment: Segment, image_format: int) -> None:
        """Raises CorruptImage for a segment that does not have the values of its target."""
        dtype, shape = self.form_of(segment)
        target = self.all_targets[segment.target]
        if target.kind == EXPERTS:  # its index has its contents: see `check_experts`
            is_whole = segment.length_bytes >= round_up(target.num_experts * INDEX_BYTES)
        else:
            is_whole = segment.length_bytes == math.prod(shape) * dtype.itemsize
            is_whole &= segment.kind not in ("a", "b") or segment.rank > 0
        if image_format > 1:
            name = str(dtype).removeprefix("torch.")
            is_whole &= (segment.dtype, segment.scale) == (name, 1.0)
            is_whole &= tuple(segment.shape) == shape
        if not is_whole:
            raise CorruptImage(f"segment at byte {segment.offset} is misplaced")

    def form_of(self, segment: Segment) -> tuple[torch.dtype, tuple[int, ...]]:
        """Returns the dtype and the shape that a segment must have."""
        target, kind = self.all_targets[segment.target], segment.kind
        num_in, num_out = target.in_features, target.out_features
        is_embedding = target.kind == "embedding"
        shape: tuple[int, ...]
        if target.kind == EXPERTS:
            shape = (target.num_experts, num_in if kind == "a" else num_out)
        elif kind == "a":
            shape = (num_in, segment.rank) if is_embedding else (segment.rank, num_in)
        elif kind == "b":
            shape = (segment.rank, num_out)
        elif kind in ("bias", "magnitude") or target.kind == "vector":
            shape = (num_out,)
        else:
            num_rows, features = (num_in, num_out) if is_embedding else (num_out, num_in)
            if kind != "full":
                num_rows = segment.shape[0] if segment.shape else 0
            shape = (num_rows,) if kind == "row_ids" else (num_rows, features)
        dtypes = {
            "bias": torch.float32,
            "magnitude": torch.float32,
            "row_ids": torch.int32,
        }
        return dtypes.get(kind, self.dtype), shape


_LORA_KINDS = tuple(
    ("a", "b", *bias, *magnitude) for bias in ((), ("bias",)) for magnitude in ((), ("magnitude",))
)
_COMPLETE = frozenset(
    (*lora, *replaced)
    for lora in ((), *_LORA_KINDS)
    for replaced in ((), ("full",), ("row_ids", "rows"))
    if lora or replaced
)
"""The contents that an adapter may have for a target, in the order of an image."""


def _index_of(
    segment: Segment, read: Callable[[int, int], bytes], num_experts: int, row_bytes: int
) -> np.ndarray:
    """Returns the rank of each expert, int64 [experts], as a segment's index says."""
    content = read(segment.offset, num_experts * INDEX_BYTES)
    index = np.frombuffer(content, np.int32).reshape(num_experts, -1)
    granules, ranks = index[:, :2].astype(np.int64).T
    scales = index[:, 2].copy().view(np.float32)
    first = round_up(num_experts * INDEX_BYTES)
    ends = granules * GRANULE_BYTES + ranks * row_bytes
    is_within = (granules * GRANULE_BYTES >= first) & (ends <= segment.length_bytes)
    is_right = (ranks == 0) | ((ranks > 0) & (ranks <= segment.rank) & is_within)
    is_right &= (scales == 1.0) | ((segment.kind == "b") & np.isfinite(scales))
    if not is_right.all():
        expert = int(np.flatnonzero(~is_right)[0])
        raise CorruptImage(f"expert {expert} of the segment at byte {segment.offset} is misplaced")
    if int(ranks.max(initial=0)) != segment.rank:
        raise CorruptImage(f"experts of the segment at byte {segment.offset} have other ranks")
    return ranks


def _check_places(header: ImageHeader, segments: Iterable[Segment]) -> None:
    """Raises CorruptImage unless segments lie one behind the other, except segments that share the
    bytes of an earlier one, and the image ends with the last."""
    end = 0
    earlier: dict[int, Segment] = {}
    for segment in segments:
        if segment.offset == end:
            end = round_up(segment.offset + segment.length_bytes)
            earlier[segment.offset] = segment
        elif (
            header.image_format == 1
            or segment.kind not in _SHARED
            or not _is_same(segment, earlier.get(segment.offset))
        ):
            raise CorruptImage(f"segment at byte {segment.offset} is misplaced")
    if header.total_bytes != end:
        raise CorruptImage(f"the image has {header.total_bytes} bytes; its segments need {end}")


def _is_same(segment: Segment, earlier: Segment | None) -> bool:
    """Returns whether a segment may share the bytes of an earlier one."""
    if earlier is None:
        return False
    of = ("kind", "rank", "length_bytes", "dtype", "shape")
    return all(getattr(segment, name) == getattr(earlier, name) for name in of)


def refused_targets(names: Sequence[str], lora_targets: Collection[str]) -> str | None:
    """Returns that an adapter has targets of these names, which are none of --lora-targets; None if
    there are none, or every target is accepted."""
    if not names or not lora_targets:
        return None
    what = "a target {}, which is" if len(names) == 1 else "targets {}, which are"
    accepted = listed(sorted(lora_targets))
    return f"{what.format(listed(names))} not among this server's --lora-targets ({accepted})"


def refused_kinds(kinds: Iterable[str], targets: Iterable[str] = ()) -> str | None:
    """Returns the kinds among these segments, of these targets, that this service does not apply,
    in words; None if it applies all of them."""
    words = dict.fromkeys(
        KIND_WORDS.get(kind, f"segments of kind {kind}") for kind in kinds if kind not in ("a", "b")
    )
    if not words:
        return None
    names = listed(sorted(set(targets)))
    return f"{listed(list(words))}, which this server does not apply" + (names and f": {names}")


def listed(names: Sequence[str]) -> str:
    """Returns the names in a text; of many the first and how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
