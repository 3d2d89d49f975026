"""The targets of projections: each of their modules, and how else adapters call it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from contract.images.targets import TEXT, OtherName, Target, TargetKind
from inference_svc.model.description import (
    Cut,
    ExpertsProjection,
    Member,
    Projection,
    layer_path,
)
from inference_svc.model.operations import key_of


def targets_of(projection: Projection, layer: int | None) -> Iterator[Target]:
    """Yields the targets of a projection: each of its modules; the module that computes them all is
    another name of each."""

    def path(module: str) -> str:
        return module if layer is None else layer_path(layer, module)

    group = key_of(projection.name, layer)
    start, inputs = 0, _inputs(projection)
    for member in projection.members:
        for part in _parts_of(member):
            end = start + part.outputs.whole
            others = [replace(other, name=path(other.name)) for other in part.others]
            if projection.fused:
                others.append(OtherName(path(projection.fused), (start, end)))
            yield Target(
                name=path(part.module),
                layer=layer,
                group=group,
                kind=TargetKind.LINEAR,
                in_features=inputs.whole,
                out_features=part.outputs.whole,
                in_slice=slice_of(inputs),
                out_slice=slice_of(part.outputs),
                other_names=tuple(others),
                space=TEXT,
            )
            start = end


class _LinearPart(NamedTuple):
    """Outputs of one kind of a linear layer, its name, and how else adapters call it."""

    module: str
    outputs: Cut
    others: tuple[OtherName, ...]


def _parts_of(member: Member) -> Iterator[_LinearPart]:
    """Yields the kinds of outputs of a linear layer, each of which is cut by itself. Where there
    are several, the layer's own name is another name of all of them, and each has the layer's last
    component: restrictions to some targets name it."""
    names = (member.module, *member.others)
    if len(member.outputs) == 1:
        yield _LinearPart(member.module, *member.outputs, tuple(map(OtherName, member.others)))
        return
    before, _, last = member.module.rpartition(".")
    start = 0
    for index, cut in enumerate(member.outputs):
        place = start, start + cut.whole
        others = tuple(OtherName(name, place) for name in names)
        yield _LinearPart(f"{before}.part_{index}.{last}", cut, others)
        start += cut.whole


def _inputs(projection: Projection | ExpertsProjection) -> Cut:
    """Returns the range of inputs that this rank has."""
    return projection.in_cut or Cut(0, projection.in_features, projection.in_features)


def slice_of(cut: Cut) -> tuple[int, int] | None:
    """Returns the features that this rank has, as layouts have them; None: all."""
    return None if cut.size == cut.whole else cut.range


def experts_targets_of(projection: ExpertsProjection, layer: int | None) -> Iterator[Target]:
    """Yields the targets of a projection of all experts: each of its modules, which the one
    parameter of all is another name of."""
    assert layer is not None
    parameter, count = layer_path(layer, projection.parameter), len(projection.members)
    start, inputs = 0, _inputs(projection)
    for part, member in enumerate(projection.members):
        [outputs] = member.outputs
        end = start + outputs.whole
        others = [OtherName(layer_path(layer, other)) for other in member.others]
        if projection.is_interleaved:
            others.append(
                OtherName(
                    parameter,
                    block_sizes=(1,) * count,
                    block_part=part,
                    transposed=projection.is_transposed,
                )
            )
        elif count > 1:
            place = start, end
            others.append(OtherName(parameter, place, transposed=projection.is_transposed))
        yield Target(
            name=layer_path(layer, member.module),
            layer=layer,
            group=key_of(projection.name, layer),
            kind=TargetKind.EXPERTS,
            in_features=inputs.whole,
            out_features=outputs.whole,
            experts=projection.experts.whole,
            expert_slice=slice_of(projection.experts),
            in_slice=slice_of(inputs),
            out_slice=slice_of(outputs),
            other_names=tuple(others),
            space=TEXT,
        )
        start = end
