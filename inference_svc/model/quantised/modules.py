"""Which weights of a decoder a checkpoint has in few bits, module by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar, cast

from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.description import (
    LM_HEAD,
    Decoder,
    ExpertsProjection,
    Projection,
    layer_path,
)
from inference_svc.model.quantised.scheme import Rows, Scheme, StoredMatrix
from inference_svc.model.quantised.settings import NEXT_STEP
from kernels.quantised import QuantisedRows, WeightFormat

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HeldPlain:
    """The scheme of a checkpoint whose weights are dequantised while they are read."""

    scheme: Scheme

    @property
    def name(self) -> str:
        """See `Scheme`."""
        return self.scheme.name

    @property
    def form(self) -> str:
        """See `Scheme`."""
        return self.scheme.form

    def matrix(
        self, module: str, out_features: int, in_features: int, num_experts: int = 0
    ) -> StoredMatrix | None:
        """See `Scheme`. Raises UnsupportedModel where the sizes do not fit it."""
        found = self.scheme.matrix(module, out_features, in_features, num_experts)
        if found is None:
            return None
        return replace(found, format=None, decode=partial(_dequantised, found.decode))


def _dequantised(
    decode: Callable[[Mapping[str, Tensor]], Rows], tensors: Mapping[str, Tensor]
) -> Tensor:
    rows = decode(tensors)
    return rows.dequantise() if isinstance(rows, QuantisedRows) else rows


@dataclass(frozen=True)
class StoredModules:
    """The modules of a checkpoint with a scheme. `names` maps the names that its tensors have in a
    model of text alone to their own; without any, the scheme alone decides."""

    scheme: Scheme
    wrapper: Wrapper
    names: Mapping[str, str]

    def matrix(
        self, module: str, out_features: int, in_features: int, num_experts: int = 0
    ) -> StoredMatrix | None:
        """Returns the form of a module's weight, None: it is plain. `module` is its path in a model
        of text alone. Raises UnsupportedModel where the sizes do not fit the scheme, or a row has
        too many groups.

        Published files leave modules plain that their config does not list, as routers: what is
        there decides.
        """
        stored = self._stored_paths.get(module, module)
        try:
            found = self.scheme.matrix(stored, out_features, in_features, num_experts)
        except UnsupportedModel:
            if self._has_weight_alone(module):
                return None
            raise
        if found is None or not self._is_there(module, found):
            return None
        form = found.format
        if form is not None and in_features > form.max_inputs:
            raise UnsupportedModel(
                f"{stored}: {in_features} inputs of {form}: at most {form.max_inputs} are "
                f"supported; {NEXT_STEP}"
            )
        return found

    def _is_there(self, module: str, matrix: StoredMatrix) -> bool:
        """Returns whether the checkpoint has a module in this form, or has nothing of it."""
        is_plain = f"{module}.weight" in self.names or module in self.names
        if not is_plain:
            return True
        ends = {end for end in matrix.tensors if tensor_name(module, end) in self.names}
        needed = {end for end, each in matrix.tensors.items() if not each.is_optional}
        return needed <= ends and (not matrix.one_of or not ends.isdisjoint(matrix.one_of))

    def _has_weight_alone(self, module: str) -> bool:
        """Returns whether a module has a weight and no scales: of any size, it is plain."""
        names = {f"{module}.weight", f"{module}.bias"} & self.names.keys()
        return f"{module}.weight" in names and self._num_tensors[module] == len(names)

    def has(self, module: str) -> bool:
        """Returns whether the checkpoint has tensors of a module."""
        return module in self._stored_paths

    @cached_property
    def _num_tensors(self) -> Mapping[str, int]:
        """The number of tensors below each path."""
        return Counter(path for name in self.names for path in _paths_above(name))

    @cached_property
    def _stored_paths(self) -> Mapping[str, str]:
        """The paths of modules as the checkpoint has them."""
        return {
            path: stored[: len(stored) - (len(name) - len(path))]
            for name, stored in self.names.items()
            for path in _paths_above(name)
        }


def _paths_above(name: str) -> Iterator[str]:
    """Yields the paths of the modules that a tensor is in, the innermost first."""
    end = len(name)
    while (end := name.rfind(".", 0, end)) > 0:
        yield name[:end]


def tensor_name(module: str, end: str) -> str:
    """Returns the name of a module's tensor by its end."""
    return module + end if end.startswith("_") else f"{module}.{end}"


def text_names(stored: Collection[str], wrapper: Wrapper) -> dict[str, str]:
    """Returns the names of tensors of the text part, as keys, and their own."""
    found = ((wrapper.text_name(name), name) for name in stored)
    return {name: own for name, own in found if name is not None}


def with_stored_formats(decoder: Decoder, scheme: Scheme, names: Collection[str]) -> Decoder:
    """Returns the decoder with the formats of a checkpoint whose tensors have these names, as they
    are stored; its vision tower is held plain. Raises UnsupportedModel where the sizes of a module
    do not fit the scheme, or the formats of one projection's experts differ."""
    modules = StoredModules(scheme, decoder.wrapper, text_names(names, decoder.wrapper))
    blocks = tuple(
        _with_formats(block, partial(layer_path, layer), modules)
        for layer, block in enumerate(decoder.blocks)
    )
    inputs = decoder.layer_inputs
    if inputs is not None:
        inputs = _with_formats(inputs, str, modules)
    head = decoder.head
    if not head.is_tied or modules.has(LM_HEAD):
        matrix = modules.matrix(LM_HEAD, decoder.vocab_size, decoder.hidden_size)
        head = replace(head, format=None if matrix is None else matrix.format)
    pictures = decoder.pictures
    if pictures is not None:
        tower = replace(pictures.tower, quantisation=HeldPlain(scheme))
        decoder = replace(decoder, pictures=replace(pictures, tower=tower))
    return replace(decoder, blocks=blocks, layer_inputs=inputs, head=head, quantisation=scheme)


def _with_formats(part: T, path_of: Callable[[str], str], modules: StoredModules) -> T:
    def formatted(projection: Projection | ExpertsProjection) -> Projection | ExpertsProjection:
        if isinstance(projection, ExpertsProjection):
            return replace(projection, format=_format_of_experts(projection, path_of, modules))
        formats = tuple(
            _format_of(path_of, (member.module, *member.others), modules, *sizes)
            for member in projection.stored
            for sizes in [(member.out_features, projection.in_features)]
        )
        return replace(projection, formats=formats) if any(formats) else projection

    return with_projections(part, formatted)


def _format_of(
    path_of: Callable[[str], str],
    names: Collection[str],
    modules: StoredModules,
    out_features: int,
    in_features: int,
) -> WeightFormat | None:
    """Returns the format of the weight of a module with one of these names."""
    paths = [path_of(name) for name in names]
    path = next(filter(modules.has, paths), paths[0])
    matrix = modules.matrix(path, out_features, in_features)
    return None if matrix is None else matrix.format


def _format_of_experts(
    projection: ExpertsProjection, path_of: Callable[[str], str], modules: StoredModules
) -> WeightFormat | None:
    whole = path_of(projection.parameter)
    in_features = projection.in_features
    is_whole = modules.matrix(whole, projection.out_features, in_features, projection.num_experts)
    if is_whole is not None:
        return is_whole.format
    if whole in modules.names:
        return None
    formats = set(_formats_apart(projection, path_of, modules))
    if len(formats) > 1:
        raise UnsupportedModel(
            f"the experts of {whole} have weights of {len(formats)} formats: all must have one"
        )
    return formats.pop()


def _formats_apart(
    projection: ExpertsProjection, path_of: Callable[[str], str], modules: StoredModules
) -> Iterator[WeightFormat | None]:
    """Yields the format of each expert's weights where the checkpoint has these one by one."""
    for member in projection.members:
        names = [each.rpartition(".") for each in (member.module, *member.others)]
        for expert in range(projection.num_experts):
            apart = [f"{before}.{expert}.{last}" for before, _, last in names]
            sizes = member.out_features, projection.in_features
            yield _format_of(path_of, apart, modules, *sizes)


def with_projections(
    part: T,
    change: Callable[[Projection | ExpertsProjection], Projection | ExpertsProjection],
) -> T:
    """Returns a part of a description with each of its projections changed."""
    assert is_dataclass(part)
    changed: dict[str, Any] = {}
    for each in fields(part):
        value = getattr(part, each.name)
        if isinstance(value, Projection | ExpertsProjection):
            changed[each.name] = change(value)
        elif is_dataclass(value) and not isinstance(value, type):
            changed[each.name] = with_projections(value, change)
        elif isinstance(value, tuple) and any(isinstance(one, Projection) for one in value):
            changed[each.name] = tuple(
                change(one) if isinstance(one, Projection) else one for one in value
            )
    new: Any = replace(part, **changed)  # type: ignore[type-var]
    return part if new == part else cast(T, new)
