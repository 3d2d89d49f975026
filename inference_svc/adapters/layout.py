"""The weights of a model that LoRA may change: targets in order of use, and their groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from contract.images import rules
from contract.images.dtypes import FLOAT8, FLOAT8_FORMAT, DataType
from contract.images.expert_index import index_bytes
from contract.images.header import ImageHeader, InvalidImage, Segment, align
from contract.images.layouts import Layout
from contract.images.segment_kinds import (
    ADDED_KINDS,
    KIND_WORDS,
    LORA_KINDS,
    REPLACED_KINDS,
    ROW_KINDS,
    SegmentKind,
)
from contract.images.targets import SAMPLED, Held, OtherName, Target, TargetKind
from contract.words import listed
from inference_svc.adapters.memory.resident import Shape
from inference_svc.errors import AdapterUnusable, CorruptImage
from inference_svc.model.checkpoint.base_hashes import HashesByName
from inference_svc.model.checkpoint.headers import TowerModule
from inference_svc.model.description import EMBED_TOKENS, LM_HEAD, SCORE
from inference_svc.results.classifier_rule import MAX_LABELS
from kernels.lora.plan import LoraContents

HEAD_PARTS: Mapping[str, str] = {
    SCORE: "out",
    f"{SCORE}.bias": "bias",
    f"{SCORE}_dense": "dense",
    f"{SCORE}_dense.bias": "dense_bias",
}
"""The targets of a classifier's head of an adapter's own, and the part that each is."""
IMAGE_FORMATS = (1, 2)
"""Image formats that this service reads."""
FLOAT8_FORMATS = (FLOAT8_FORMAT,)
"""The same of a server whose adapters are float8: a store that does not know these must refuse its
layout, and not pass over their type."""

EMBEDDING, HEAD = "embed", "head"
"""Groups."""


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """All targets of a model; the store identifies a layout by a layout_id.

    `targets` are the modules that LoRA may change, in order of use, after which come the ones that
    pictures pass: the columns of the table of resident adapters. `vectors`, norms and biases of the
    base, have none, nor have `unused`, of towers that are not served. Images of format 1 know of
    `targets` of texts only, but for experts, and count these.
    """

    base_model: str
    config_sha256: str
    dtype: torch.dtype
    image_formats: tuple[int, ...]
    targets: tuple[Target, ...]
    vectors: tuple[Target, ...] = ()
    unused: tuple[Target, ...] = ()
    adapter_dtype: DataType | None = None
    """The type of A and B, if it is not the model's."""
    summed_groups: frozenset[str] = frozenset()
    """Groups whose outputs are terms of sums over ranks, which have parts of the inputs."""
    weights: tuple[int, ...] = field(init=False)
    """Indices into `all_targets` of targets for which adapters may replace the base's weight: the
    embedding, the head, linear layers that pictures pass, norms; in the order in which the table of
    resident adapters counts them."""
    biases: Mapping[int, int] = field(init=False)
    """The target that adds each bias of the base, by the index of the bias into `all_targets`."""
    head_parts: Mapping[int, str] = field(init=False)
    """The targets of a classifier's head of the adapter's own, if adapters may have one, by their
    index into `all_targets`: each a part of `ClassifierHead`."""
    order_of_use: tuple[int, ...] = field(init=False)
    """Indices into `all_targets` as a store is told of them, and as images from format 2 on count
    them: embedding, layers, head."""

    @property
    def data_type(self) -> DataType:
        """The dtype, as the contract names it."""
        return next(each for each in DataType if getattr(torch, each.torch_name) is self.dtype)

    @property
    def lora_data_type(self) -> DataType:
        """The type of A and B, as the contract names it."""
        return self.adapter_dtype or self.data_type

    @property
    def lora_dtype(self) -> torch.dtype:
        """The type of A and B."""
        found: torch.dtype = getattr(torch, self.lora_data_type.torch_name)
        return found

    @property
    def all_targets(self) -> tuple[Target, ...]:
        """Targets, then vectors, then unused modules."""
        return self.targets + self.vectors + self.unused

    def __post_init__(self) -> None:
        found = self.all_targets

        def place(index: int) -> float:
            target = found[index]
            if target.is_of_pictures:
                return -2
            if target.layer is None:
                return math.inf if target.group == HEAD or target.space == SAMPLED else -1
            return target.layer

        order = sorted(range(len(found)), key=place)
        object.__setattr__(self, "order_of_use", tuple(order))
        columns = {target.name: column for column, target in enumerate(self.targets)}
        vectors = range(len(self.targets), len(self.targets) + len(self.vectors))
        biases = {
            index: columns[module]
            for index in vectors
            if found[index].name not in HEAD_PARTS
            and (module := found[index].name.removesuffix(".bias")) in columns
        }
        parts = {
            index: HEAD_PARTS[target.name]
            for index, target in enumerate(found)
            if target.name in HEAD_PARTS
        }
        tables = (columns[name] for name in (EMBED_TOKENS, LM_HEAD) if name in columns)
        others = (index for index in vectors if index not in biases and index not in parts)
        of_pictures = (i for i, target in enumerate(self.targets) if target.is_of_pictures)
        weights = (*tables, *of_pictures, *others)
        object.__setattr__(self, "biases", biases)
        object.__setattr__(self, "head_parts", parts)
        object.__setattr__(self, "weights", weights)

    @property
    def weight_indices(self) -> dict[str, int]:
        """The place of each of `weights` among these, by its name."""
        return {self.all_targets[each].name: index for index, each in enumerate(self.weights)}

    @property
    def of_format_1(self) -> ModelLayout:
        """The layout in words that stores of before format 2 know."""
        targets = (
            replace(target, other_names=(), space="", tied_to="", base_hashes=(), base_dtype=None)
            for target in self.targets
            if _is_of_format_1(target)
        )
        return replace(self, image_formats=(1,), targets=tuple(targets), vectors=(), unused=())

    def with_base(self, hashes: HashesByName) -> ModelLayout:
        """Returns the layout with the known hashes of the base's own weights."""

        def known(targets: Iterable[Target]) -> Iterator[Target]:
            for target in targets:
                found = hashes.get(target.name)
                hashed = None if found is None else found.dtype
                yield replace(
                    target, base_hashes=() if found is None else found.sha256, base_dtype=hashed
                )

        return replace(self, targets=tuple(known(self.targets)), vectors=tuple(known(self.vectors)))

    def with_towers(self, modules: Iterable[TowerModule]) -> ModelLayout:
        """Returns the layout with the modules of the whole model that are not served."""
        unused = (
            Target(
                name=name,
                layer=None,
                group=name,
                kind=TargetKind.LINEAR if num_in else TargetKind.VECTOR,
                in_features=num_in,
                out_features=num_out,
                other_names=tuple(map(OtherName, others)),
                space=tower,
                held=Held.UNUSED,
            )
            for tower, (name, *others), num_in, num_out in modules
        )
        return replace(self, unused=tuple(unused))

    @property
    def shared_groups(self) -> dict[str, int]:
        """Groups of which ranks share A and B, by inputs and by outputs; and the first of the
        inputs in the group's input here, which is whole but for sums."""
        return {
            target.group: 0 if target.group in self.summed_groups else target.inputs[0]
            for target in self.targets
            if target.in_slice is not None and target.out_slice is not None
        }

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

    @property
    def expert_elements_per_rank(self) -> int:
        """Elements of A and B of all experts that are here, for each rank."""
        return sum(
            each.num_experts * (each.num_in + each.num_out)
            for each in self.targets
            if each.kind is TargetKind.EXPERTS and each.held is Held.HERE
        )

    def largest_image(self, rank: int, lora_targets: Collection[str] = ()) -> Shape:
        """Returns the shape of an image that has every target at this rank; of a server that is
        restricted to some, these."""
        end, cuts = 0, []
        for target in self.targets:
            if target.held is not Held.HERE:
                continue
            if lora_targets and target.module not in lora_targets:
                continue
            cuts.append(end)
            for features in (target.num_in, target.num_out):
                matrix_bytes = align(rank * features * self.lora_dtype.itemsize)
                if target.kind is TargetKind.EXPERTS:
                    end += index_bytes(target.num_experts)
                end += target.num_experts * matrix_bytes
        return Shape(end, tuple(cuts))

    def announced(self, image_format: int) -> tuple[Layout, Sequence[int]]:
        """Returns the layout as a store is told of it, and the index into `all_targets` of each of
        its targets."""
        order = self.order_of_use
        if image_format == 1:
            order = tuple(i for i, each in enumerate(self.targets) if _is_of_format_1(each))
        found = self.all_targets
        return Layout(
            base_model=self.base_model,
            config_sha256=self.config_sha256,
            dtype=self.data_type,
            image_format=image_format,
            targets=tuple(found[index] for index in order),
            adapter_dtype=self.adapter_dtype,
        ), order

    def read_header(self, header: ImageHeader) -> ImageHeader:
        """Returns the header with indices into `all_targets`. Raises CorruptImage unless the image
        keeps the rules of images, and AdapterUnusable for a segment or module that we do not apply.

        The ranks of an A and its B are one as no target that we announce has a part of A's: the
        tables of adapters and the kernels could have two.
        """
        if header.image_format not in self.image_formats:
            raise CorruptImage(f"image format {header.image_format} is not one we read")
        is_float8 = any(segment.dtype is FLOAT8 for segment in header.segments)
        if is_float8 and self.adapter_dtype is not FLOAT8:
            raise AdapterUnusable(
                f"it has values in {FLOAT8.torch_name}, which this server does not apply without "
                "--adapter-dtype fp8",
                subject="adapter",
            )
        layout, order = self.announced(header.image_format)
        try:
            rules.validate(header, layout)
        except InvalidImage as error:
            raise CorruptImage(str(error)) from error
        segments = tuple(Segment(order[each.target], *each[1:]) for each in header.segments)
        _check_replaced(self, segments)
        _check_shared(self, segments)
        return replace(header, segments=segments)

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
            if segment.kind is not SegmentKind.ROW_IDS:
                continue
            ids = np.frombuffer(read(segment.offset, segment.length_bytes), np.int32)
            if not len(ids) or ids[0] < 0 or (np.diff(ids.astype(np.int64)) <= 0).any():
                raise CorruptImage(f"row ids at byte {segment.offset} do not ascend")
            target = self.all_targets[segment.target]
            num_rows = target.num_rows
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
        """Checks the indices of experts that an image, as `read_header` returned it, has. Raises
        CorruptImage."""
        try:
            rules.check_experts(header.segments, self.all_targets, self.lora_data_type, read)
        except InvalidImage as error:
            raise CorruptImage(str(error)) from error

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
            each.kind is SegmentKind.A
            and self.all_targets[each.target].kind is TargetKind.EMBEDDING
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

    def computed_with(self, target: int, kind: SegmentKind) -> str:
        """Returns the group that a segment of this kind is computed with; of weights that are
        replaced their name."""
        if target in self.head_parts:
            return SCORE
        column = self.biases.get(target, target)
        is_replaced = kind in REPLACED_KINDS and column == target
        return self.all_targets[column].name if is_replaced else self.targets[column].group

    def contents(self, header: ImageHeader) -> LoraContents:
        """Returns the table's row of an image, as `read_header` returned it."""
        places = {target: place for place, target in enumerate(self.weights)}
        kinds = {segment.kind for segment in header.segments}
        targets, weights = set[int](), set[int]()
        for segment in header.segments:
            if segment.kind in REPLACED_KINDS and segment.target in places:
                weights.add(places[segment.target])
            elif segment.target not in self.head_parts:
                targets.add(self.biases.get(segment.target, segment.target))
        has_biases = any(segment.target in self.biases for segment in header.segments)
        return LoraContents(
            frozenset(targets),
            frozenset(weights),
            has_vectors=has_biases
            or not kinds.isdisjoint((SegmentKind.BIAS, SegmentKind.MAGNITUDE)),
            has_rows=SegmentKind.ROWS in kinds,
        )

    def form_of(self, segment: Segment) -> tuple[torch.dtype, tuple[int, ...]]:
        """Returns the dtype and the shape of a segment's values."""
        target = self.all_targets[segment.target]
        dtype, shape = rules.form_of(segment, target, self.data_type, self.lora_data_type)
        return getattr(torch, dtype.torch_name), shape


def _is_of_format_1(target: Target) -> bool:
    """Returns whether images of format 1 know of a module that LoRA may change."""
    is_matrix = target.kind is not TargetKind.EXPERTS and bool(target.out_features)
    return is_matrix and not target.is_of_pictures


def _check_replaced(layout: ModelLayout, segments: Iterable[Segment]) -> None:
    """Raises AdapterUnusable for a whole weight of a target that has none to replace, or rows of
    one that pictures pass."""
    known = {*layout.biases, *layout.weights, *layout.head_parts}
    refused = [
        layout.all_targets[segment.target].short_name
        for segment in segments
        if (segment.kind in REPLACED_KINDS and segment.target not in known)
        or (segment.kind in ROW_KINDS and layout.all_targets[segment.target].is_of_pictures)
    ]
    if refused:
        what = refused_kinds((SegmentKind.FULL,), refused)
        raise AdapterUnusable(f"it has {what}", subject="adapter")
    own = {
        layout.head_parts[segment.target]: segment
        for segment in segments
        if segment.target in layout.head_parts
    }
    if any(segment.kind is not SegmentKind.FULL for segment in own.values()):
        raise AdapterUnusable(
            f"it changes {SCORE}, a head of its own: save the head whole, with "
            'modules_to_save=["score"]',
            subject="adapter",
        )
    _check_head({part: tuple(segment.shape) for part, segment in own.items()}, layout)


def _check_head(shapes: Mapping[str, tuple[int, ...]], layout: ModelLayout) -> None:
    """Raises AdapterUnusable for a head that is not whole, whose parts do not fit each other, or
    that has too many labels."""
    if not shapes:
        return
    dense, size = shapes.get("dense"), shapes.get("out", (0, 0))[-1]
    fits = dense is None or (dense[0] == size and shapes.get("dense_bias") == (size,))
    fits &= "bias" not in shapes or shapes["bias"] == shapes.get("out", ())[:1]
    # Heads of decoders for whole inputs have no bias.
    needed = {*layout.head_parts.values()} - {"bias"}
    if not needed <= shapes.keys() or not fits:
        raise AdapterUnusable(
            f"its classification head has {listed(sorted(shapes))}, which is not a whole head of "
            "this model",
            subject="adapter",
        )
    if (num_labels := shapes["out"][0]) > MAX_LABELS:
        raise AdapterUnusable(
            f"its classification head has {num_labels} labels, and this server accepts at most "
            f"{MAX_LABELS}",
            subject="adapter",
        )


def _check_shared(layout: ModelLayout, segments: Iterable[Segment]) -> None:
    """Raises AdapterUnusable for a segment that changes all outputs of a target that ranks
    share."""
    shared = layout.shared_groups
    for segment in segments:
        column = layout.biases.get(segment.target, segment.target)
        target = layout.all_targets[column]
        is_base_bias = column != segment.target and target.group in layout.summed_groups
        if target.group not in shared:
            continue
        if segment.kind is SegmentKind.MAGNITUDE or is_base_bias:
            what = "a bias of its own" if is_base_bias else KIND_WORDS[segment.kind]
            raise AdapterUnusable(
                f"it has {what} for {target.short_name}, which a server with "
                "--fully-sharded-loras does not apply",
                subject="adapter",
            )


def refused_targets(names: Sequence[str], lora_targets: Collection[str]) -> str | None:
    """Returns that an adapter has targets of these names, which are none of --lora-targets; None if
    there are none, or every target is accepted."""
    if not names or not lora_targets:
        return None
    what = "a target {}, which is" if len(names) == 1 else "targets {}, which are"
    accepted = listed(sorted(lora_targets))
    return f"{what.format(listed(names))} not among this server's --lora-targets ({accepted})"


def refused_kinds(kinds: Iterable[SegmentKind | int], targets: Iterable[str] = ()) -> str | None:
    """Returns the kinds among these segments, of these targets, that this service does not apply,
    in words; None if it applies all of them."""
    words = dict.fromkeys(
        KIND_WORDS[kind] if isinstance(kind, SegmentKind) else f"segments of kind {kind}"
        for kind in kinds
        if kind not in LORA_KINDS
    )
    if not words:
        return None
    names = listed(sorted(set(targets)))
    return f"{listed(list(words))}, which this server does not apply" + (names and f": {names}")


def head_modules(layout: ModelLayout) -> frozenset[str]:
    """Returns the last components of the names that adapters give to the last layer of a
    classifier's head of their own; none if they may have no head."""
    found = [layout.all_targets[at] for at, part in layout.head_parts.items() if part == "out"]
    names = [each.name for each in found]
    names += [other.name for each in found for other in each.other_names]
    return frozenset(name.rpartition(".")[2] for name in names)
