"""Which tensors of a checkpoint a decoder has, and where each goes.

Projections that read the same input are one parameter: q, k and v in `qkv`, gate and up in
`gate_up`. Nothing is read or allocated here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from inference_svc.model.checkpoint.parts import Part, part_of, part_of_linear, whole_outputs
from inference_svc.model.description import (
    EMBED_TOKENS,
    LM_HEAD,
    SCORE,
    Cut,
    Decoder,
    ExpertsProjection,
    Member,
    Norm,
    Projection,
    WeightPart,
    layer_path,
)
from inference_svc.model.operations import (
    Numbers,
    Scalar,
    Table,
    Weight,
    WeightSpec,
    key_of,
    norm_key,
)
from inference_svc.model.quantised.scheme import Rows
from inference_svc.model.walk import weights_of
from kernels.experts import padded_rows
from kernels.quantised import WeightFormat


class Sink(Protocol):
    """The receiver of a parameter's values: a tensor, or a projection in a backend's form."""

    def put_rows(self, start: int, rows: Rows) -> None:
        """Takes rows [N, in] as the rows from `start` on: plain ones of any float dtype, or of the
        format of this part of the weight."""

    def put_bias(self, start: int, values: Tensor) -> None:
        """Takes values [N], of any float dtype, as the bias's from `start` on."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint: its shape, and the writer that puts it into the projection that
    it is a part of, given the number of the first row; None: it is the whole of a parameter that is
    no projection. With `num_experts` it has the parts of so many, of which the `experts` are put
    one by one, given the place of each. A matrix, or each of these, is [in, out] if it
    `is_transposed`.

    `module` is the module whose weight [out, in] it is, or "", and `format` the format that it is
    held in. The checkpoint may have other tensors of the module in its place, as its `Scheme` says.
    Of a tensor with a `part` only that is read. Nothing is read of one that `is_elsewhere`, which
    another rank adds: this rank has zeros; and nothing of one that `is_unused`, of another rank's
    experts.
    """

    shape: tuple[int, ...]
    put: Callable[[Sink, Any, int], None] | None = None
    experts: Cut | None = None
    module: str = ""
    format: WeightFormat | None = None
    is_transposed: bool = False
    part: Part | None = None
    is_elsewhere: bool = False
    is_unused: bool = False

    @property
    def num_experts(self) -> int:
        """The experts in the tensor; 0: it is no tensor of experts."""
        return 0 if self.experts is None else self.experts.whole

    @property
    def read_part(self) -> Part | None:
        """The part of the tensor that is read, if it is plain: whole rows where these are quantised
        with scales of all inputs, before columns are chosen."""
        part = self.part
        if part is None or self.format is None or self.format.group_size:
            return part
        return part.of_all_columns

    @property
    def places(self) -> Iterator[tuple[int, int]]:
        """Yields the place of each expert that is put, and its number in the tensor."""
        assert self.experts is not None
        return enumerate(range(*self.experts.range))

    @property
    def sizes(self) -> tuple[int, int]:
        """The outputs and inputs of a module's weight, of one expert."""
        first, second = self.shape[-2:]
        return (second, first) if self.is_transposed else (first, second)


OLD_WEIGHT, OLD_BIAS = "gamma", "beta"
"""The names that the first checkpoints of BERT have for a norm's weight and bias."""
Form: TypeAlias = Mapping[str, Piece]
"""One way in which a checkpoint may have a parameter: its tensors by name."""


class Role(enum.Enum):
    """The kind of a parameter: a table of rows, a projection, a norm's weight, a number of a layer,
    or numbers in fp32."""

    TABLE = "table"
    PROJECTION = "projection"
    NORM = "norm"
    SCALAR = "scalar"
    NUMBERS = "numbers"


@dataclass(frozen=True)
class Parameter:
    """A part of the decoder, and the tensors of the checkpoint that it is made of, in the `forms`
    that these may have: made when they are asked for, as experts have thousands.

    `key` is such as "layers.0.qkv", of a norm its module's path; `members` maps the modules that
    adapters know to the ranges of outputs that are here. `in_size` is 0 for one dimension. `parts`
    are a projection's rows by format.
    """

    key: str
    role: Role
    num_rows: int
    make_forms: Callable[[], Iterable[Form]] = field(repr=False, compare=False)
    members: Mapping[str, tuple[Cut, ...]] = field(default_factory=dict)
    in_size: int = 0
    has_bias: bool = False
    layer: int | None = None
    norm: Norm | None = None
    parts: tuple[WeightPart, ...] = ()

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        return tuple(self.make_forms())

    def num_bytes(self, dtype: torch.dtype) -> int:
        """In memory, where a scalar is a number."""
        if self.role is Role.SCALAR:
            return 0
        is_wide = self.role is Role.NUMBERS or (self.norm is not None and self.norm.is_wide)
        item_bytes = (torch.float32 if is_wide else dtype).itemsize
        if self.parts:
            bias_bytes = self.num_rows * item_bytes if self.has_bias else 0
            return bias_bytes + sum(_part_bytes(each, self.in_size, dtype) for each in self.parts)
        return self.num_rows * ((self.in_size or 1) + self.has_bias) * item_bytes

    def form(self, shapes: Mapping[str, Sequence[int]]) -> Form:
        """Returns the form that a checkpoint with tensors of these shapes has, by their names, and
        of several forms with these the one whose shapes it has; the first where it has none."""
        found = [form for form in self.forms if any(name in shapes for name in form)]
        fits = (form for form in found if _has_shapes(form, shapes))
        return next(fits, next(iter(found), self.forms[0]))


def _has_shapes(form: Form, shapes: Mapping[str, Sequence[int]]) -> bool:
    return all(tuple(shapes.get(name, ())) == piece.shape for name, piece in form.items())


def _part_bytes(part: WeightPart, in_size: int, dtype: torch.dtype) -> int:
    if part.format is None:
        return part.num_rows * in_size * dtype.itemsize
    return part.format.num_bytes(part.num_rows, in_size)


@lru_cache(maxsize=4)
def parameters(decoder: Decoder) -> tuple[Parameter, ...]:
    """Returns all parameters of a decoder, in order of use."""
    weights = weights_of(decoder)
    return tuple(_parameter(each) for each in weights if has_values(each.spec))


def weight_formats(decoder: Decoder) -> tuple[WeightFormat, ...]:
    """Returns the formats of a decoder's weights in few bits, in order of use."""
    formats = (part.format for each in parameters(decoder) for part in each.parts)
    return tuple(dict.fromkeys(form for form in formats if form is not None))


def role_of(spec: WeightSpec) -> Role:
    """Returns the kind of a weight's parameter."""
    return _ROLES[type(spec)]


_ROLES: Mapping[type, Role] = {
    Table: Role.TABLE,
    Projection: Role.PROJECTION,
    ExpertsProjection: Role.PROJECTION,
    Norm: Role.NORM,
    Scalar: Role.SCALAR,
    Numbers: Role.NUMBERS,
}


def has_values(spec: WeightSpec) -> bool:
    """Returns whether the checkpoint has a weight: some norms have none."""
    return not isinstance(spec, Norm) or bool(spec.module)


def _parameter(weight: Weight) -> Parameter:
    spec, layer = weight
    if isinstance(spec, Projection):
        return _projection_parameter(spec, layer)
    if isinstance(spec, ExpertsProjection):
        return _stacked_parameter(spec, layer)
    if isinstance(spec, Norm):
        return _norm_parameter(spec, layer)
    if isinstance(spec, Table):
        num_rows = spec.num_rows if spec.cut is None else spec.cut.whole
        cuts = () if spec.cut is None else (spec.cut,)
        shape: tuple[int, ...] = (num_rows, spec.size)
        if spec.parts:
            shape = (spec.parts, num_rows // spec.parts, spec.size)
        form: Form = {f"{spec.module}.weight": Piece(shape, part=part_of(cuts))}
        members = {spec.module: cuts or (_all(num_rows),)}
        return Parameter(spec.key, Role.TABLE, spec.num_rows, lambda: [form], members, spec.size)
    if isinstance(spec, Scalar):
        size, piece = 1, Piece((1,))
    else:
        size = spec.size
        piece = Piece(spec.whole_shape, part=part_of(spec.cuts))
    forms: list[Form] = [{spec.name: piece}]
    if isinstance(spec, Numbers) and spec.is_norms_bias:
        forms.append({f"{spec.name.removesuffix('bias')}{OLD_BIAS}": piece})
    return Parameter(spec.name, role_of(spec), size, lambda: forms, layer=layer)


def _all(size: int) -> Cut:
    return Cut(0, size, size)


def weights_bytes(decoder: Decoder, dtype: torch.dtype) -> int:
    """Returns the bytes that `load_weights` will take with plain projections, without
    allocating."""
    return sum(each.num_bytes(dtype) for each in parameters(decoder))


class Vector(NamedTuple):
    """A norm's weight or a bias of a projection, by the name that adapters have it under, its
    tensor's in the checkpoint, and the range of its numbers that is here."""

    name: str
    tensor: str
    layer: int | None
    outputs: Cut


def vectors(decoder: Decoder) -> Iterator[Vector]:
    """Yields the model's vectors in order of use."""
    for parameter in parameters(decoder):
        for name, outputs in parameter.members.items():
            if parameter.role is Role.NORM:
                yield Vector(name, f"{name}.weight", parameter.layer, *outputs)
                if parameter.norm is not None and parameter.norm.has_bias:
                    yield Vector(f"{name}.bias", f"{name}.bias", parameter.layer, *outputs)
            elif parameter.has_bias:
                yield Vector(f"{name}.bias", f"{name}.bias", parameter.layer, *outputs)


def unused(decoder: Decoder) -> tuple[str, ...]:
    """Returns the prefixes of tensors' names that the checkpoint may have and that nothing reads,
    or another stage."""
    blocks = enumerate(decoder.blocks)
    paths = [layer_path(layer, module) for layer, block in blocks for module in block.unused]
    behind = range(decoder.num_layers, decoder.num_layers + decoder.num_unused_layers)
    paths += [f"model.layers.{layer}" for layer in behind]
    own = decoder.layers
    paths += [f"model.layers.{layer}" for layer in range(decoder.num_layers) if layer not in own]
    paths += () if decoder.has_embedding else (EMBED_TOKENS,)
    paths += (SCORE,) if decoder.labels else ()
    last = () if decoder.final_norm is None else (decoder.final_norm.module,)
    paths += () if decoder.has_head else (*last, LM_HEAD)
    others = () if decoder.encoder is None else decoder.encoder.unused
    return (*(f"{path}." for path in paths), *others)


def _norm_parameter(norm: Norm, layer: int | None) -> Parameter:
    path = norm.path(layer)
    tensor = norm.tensor if layer is None or not norm.tensor else layer_path(layer, norm.tensor)
    cut = norm.cut or _all(norm.size)
    part = None if norm.cut is None else part_of([cut])
    form = {tensor or f"{path}.weight": Piece((cut.whole,), part=part)}
    members = {} if tensor else {path: (cut,)}
    forms: list[Form] = [form]
    if norm.has_bias:
        forms.append({f"{path}.{OLD_WEIGHT}": Piece((norm.size,))})
    key = norm_key(norm, layer)
    return Parameter(key, Role.NORM, norm.size, lambda: forms, members, layer=layer, norm=norm)


def _projection_parameter(projection: Projection, layer: int | None) -> Parameter:
    path_of = _paths_of(layer)
    return Parameter(
        key_of(projection.name, layer),
        Role.PROJECTION,
        projection.num_rows,
        partial(_linear_forms, projection, path_of),
        {path_of(member.module): member.outputs for member in projection.members},
        projection.in_features,
        projection.has_bias,
        layer,
        parts=projection.parts,
    )


def _paths_of(layer: int | None) -> Callable[[str], str]:
    """Returns the function that makes the path of a module."""
    return str if layer is None else partial(layer_path, layer)


def _linear_forms(projection: Projection, path_of: Callable[[str], str]) -> Iterator[Form]:
    """Yields the tensors by the names of one release of transformers after the other; published
    files have the names of earlier ones."""
    names = [(member.module, *member.others) for member in projection.stored]
    formats = projection.formats or (None,) * len(projection.stored)
    apart = [(member,) for member in projection.members]
    members = [projection.members] if projection.is_stored_fused else apart
    stored = list(zip(members, formats, strict=True))
    for index in reversed(range(max(map(len, names)))):
        paths = [path_of(each[min(index, len(each) - 1)]) for each in names]
        yield _rows_form(paths, stored, projection)


def _rows_form(
    paths: Sequence[str],
    stored: Sequence[tuple[Sequence[Member], WeightFormat | None]],
    projection: Projection,
) -> Form:
    """Returns the tensors of linear layers, each of these members and with this format, whose rows
    lie below each other."""
    form: dict[str, Piece] = {}
    start = 0
    for path, (members, held) in zip(paths, stored, strict=True):
        form |= _linear_pieces(path, members, projection, start, held)
        start += sum(member.out_features for member in members)
    return form


def _linear_pieces(
    path: str,
    members: Sequence[Member],
    projection: Projection | ExpertsProjection,
    start: int,
    held: WeightFormat | None,
) -> Form:
    """Returns the tensors of one linear layer of a projection, which computes these members and
    whose rows begin at `start`."""
    size, part = whole_outputs(members), part_of_linear(members, projection.in_cut)
    shape = size, _whole_inputs(projection)
    piece = Piece(shape, partial(_put_rows, start), module=path, format=held, part=part)
    if isinstance(projection, Projection) and projection.is_transposed:
        assert part is None
        piece = replace(piece, shape=shape[::-1], module="", is_transposed=True)
    form = {f"{path}.weight": piece}
    if projection.has_bias:
        put = partial(_put_bias, start)
        form[f"{path}.bias"] = _bias_piece(projection, (size,), put, part)
    return form


def _whole_inputs(projection: Projection | ExpertsProjection) -> int:
    return projection.in_features if projection.in_cut is None else projection.in_cut.whole


def _bias_piece(
    projection: Projection | ExpertsProjection,
    shape: tuple[int, ...],
    put: Callable[[Sink, Any, int], None],
    part: Part | None,
    experts: Cut | None = None,
) -> Piece:
    """Returns a bias's tensor: of a projection whose inputs are cut it is the first rank's."""
    is_elsewhere = projection.in_cut is not None and projection.in_cut.start > 0
    own = None if part is None else part.of_all_columns
    return Piece(shape, put, experts, part=own, is_elsewhere=is_elsewhere)


def _put_rows(start: int, sink: Sink, rows: Rows, first: int) -> None:
    sink.put_rows(start + first, rows)


def _put_bias(start: int, sink: Sink, values: Tensor, first: int) -> None:
    sink.put_bias(start + first, values)


def _stacked_parameter(projection: ExpertsProjection, layer: int | None) -> Parameter:
    """Returns the parameter of a projection of all experts, which lie below each other in it, each
    on as many rows as products want."""
    return Parameter(
        key_of(projection.name, layer),
        Role.PROJECTION,
        projection.num_rows,
        partial(_experts_forms, projection, _paths_of(layer)),
        in_size=projection.in_features,
        has_bias=projection.has_bias,
        layer=layer,
        parts=projection.parts,
    )


def _experts_forms(projection: ExpertsProjection, path_of: Callable[[str], str]) -> Iterator[Form]:
    """Yields the tensors of experts one by one, by each of their names, and of all in one."""
    step = padded_rows(projection.out_features)
    num_names = 1 + min(len(each.others) for each in projection.members)
    for index in reversed(range(0 if projection.is_interleaved else num_names)):
        yield _apart_form(projection, step, index, path_of)
    if projection.may_be_transposed:
        yield _stacked_form(replace(projection, is_transposed=True), step, path_of)
    yield _stacked_form(projection, step, path_of)


def _apart_form(
    projection: ExpertsProjection, step: int, name: int, path_of: Callable[[str], str]
) -> Form:
    """Returns the tensors of a checkpoint that has each expert's by itself, by the members' names
    of this index."""
    form: dict[str, Piece] = {}
    first, end, count = projection.experts
    for expert in range(count):
        start = (expert - first) * step
        for member in projection.members:
            module = (member.module, *member.others)[name]
            before, _, last = module.rpartition(".")
            path = path_of(f"{before}.{expert}.{last}")
            pieces = _linear_pieces(path, (member,), projection, start, projection.format)
            if not first <= expert < end:
                pieces = {each: replace(piece, is_unused=True) for each, piece in pieces.items()}
            form |= pieces
            start += member.out_features
    return form


def _stacked_form(projection: ExpertsProjection, step: int, path_of: Callable[[str], str]) -> Form:
    """Returns the tensors of a checkpoint that has all experts in one."""
    experts, members = projection.experts, projection.members
    num_out, num_in = whole_outputs(members), _whole_inputs(projection)
    shape: tuple[int, ...] = (num_in, num_out) if projection.is_transposed else (num_out, num_in)
    put = partial(_put_expert, step, projection)
    module, is_transposed = path_of(projection.parameter), projection.is_transposed
    takes_turns = projection.is_interleaved
    part = part_of_linear(members, projection.in_cut, take_turns=takes_turns)
    held = projection.format
    shape = experts.whole, *shape
    form = {module: Piece(shape, put, experts, module, held, is_transposed, part)}
    if projection.has_bias:
        put = partial(_put_expert_bias, step, projection)
        name = path_of(f"{projection.parameter}_bias")
        form[name] = _bias_piece(projection, (experts.whole, num_out), put, part, experts)
    return form


def _put_expert(
    step: int, projection: ExpertsProjection, sink: Sink, rows: Rows, expert: int
) -> None:
    turns = _turns(projection, len(rows))
    sink.put_rows(expert * step, rows if turns is None else rows[turns])


def _put_expert_bias(
    step: int, projection: ExpertsProjection, sink: Sink, values: Tensor, expert: int
) -> None:
    turns = _turns(projection, len(values))
    sink.put_bias(expert * step, values if turns is None else values[turns])


def _turns(projection: ExpertsProjection, num_rows: int) -> Tensor | None:
    """Returns the rows member by member where members take turns; None where they do not."""
    if not projection.is_interleaved:
        return None
    return torch.arange(num_rows).view(-1, len(projection.members)).t().flatten()
