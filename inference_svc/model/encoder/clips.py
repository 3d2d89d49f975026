"""Linear layers whose inputs and outputs are clipped, and the values that several of them make."""

from __future__ import annotations

from dataclasses import dataclass, replace

from inference_svc.model.description import Projection
from inference_svc.model.operations import (
    Listing,
    Numbers,
    Op,
    Project,
    Value,
    WeightSpec,
    numbers_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class Clip(Op):
    """Clips to bounds."""

    least: Numbers
    most: Numbers

    @property
    def _specs(self) -> tuple[WeightSpec | None, ...]:
        return self.least, self.most


@dataclass(frozen=True, slots=True, eq=False)
class Join(Op):
    """Puts the columns of `inputs` side by side."""


def list_product(
    walk: Listing,
    x: Value,
    out: Value,
    layer: int,
    projection: Projection,
    *,
    reader_adds: bool = False,
) -> None:
    """Lists the product of a layer's projection: member by member if it is clipped."""
    if not projection.is_clipped:
        walk.ops.append(Project((x,), out, layer, projection, reader_adds))
        return
    made: list[Value] = []
    for member in projection.members:
        inputs = walk.value("clipped", x.width)
        _list_clip(walk, x, inputs, layer, member.module, "input")
        name = f"{out.name} of {member.module}" if len(projection.members) > 1 else out.name
        own = walk.value(name, member.out_features)
        single = replace(projection, name=member.module, members=(member,), is_clipped=False)
        walk.ops.append(Project((inputs,), own, layer, single))
        _list_clip(walk, own, own, layer, member.module, "output")
        made.append(own)
    if len(made) > 1:
        walk.ops.append(Join(tuple(made), out, layer))


def _list_clip(walk: Listing, x: Value, out: Value, layer: int, module: str, side: str) -> None:
    """The bounds lie beside the linear layer, which is a part of a module."""
    path = module.rpartition(".")[0]
    least, most = (numbers_of(f"{path}.{side}_{end}", 1, layer) for end in ("min", "max"))
    assert least is not None
    assert most is not None
    walk.ops.append(Clip((x,), out, layer, least, most))
