"""The targets of vision towers and their connectors, whose outputs take the place of tokens'
embeddings.

Each tower and connector is a space, named by its module, in which adapters change the embeddings of
pictures. A tower's own names are not the whole model's: its first layer is "model.layers.0", as the
text's is. So groups here have a prefix, and targets only the names that the whole has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from contract.images.header import ImageHeader
from contract.images.targets import OtherName, Target, TargetKind
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.projections import targets_of
from inference_svc.model.checkpoint.headers import TowerModule, tower_modules
from inference_svc.model.checkpoint.parameters import parameters, vectors
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.description import Decoder, Projection
from inference_svc.model.walk import weights_of

PREFIX = "pictures."
"""The begin of the groups of a tower and its connector."""
_LAYER = re.compile(r".+\.\d+(?=\.)")


def linear_targets(tower: Decoder) -> Iterator[Target]:
    """Yields the linear layers of a tower and its connector, in order of use. Gemma 3's connector
    has a parameter [in, out] in place of one, whose name no adapter can give: it is left out."""
    for spec, layer in weights_of(tower):
        if isinstance(spec, Projection) and not spec.is_transposed:
            for target in targets_of(spec, layer):
                yield _in_whole(target, tower.wrapper)


def vector_targets(tower: Decoder) -> Iterator[Target]:
    """Yields their biases, and the weights and biases of norms."""
    for vector in vectors(tower):
        yield _vector(vector.name, vector.outputs.whole, tower.wrapper)


def _vector(name: str, size: int, wrapper: Wrapper) -> Target:
    """Returns a vector of a tower by its own name."""
    module, suffix, _ = name.partition(".bias")
    target = Target(module, None, name, TargetKind.VECTOR, in_features=0, out_features=size)
    return _in_whole(target, wrapper, suffix)


def _in_whole(target: Target, wrapper: Wrapper, suffix: str = "") -> Target:
    """Returns a tower's target as the whole model has it, where its layers are no layers of the
    text. The `suffix` follows each of its names."""
    names = (OtherName(target.name), *target.other_names)
    found = [
        replace(each, name=f"{name}{suffix}")
        for each in names
        for name in wrapper.whole_names(each.name)
    ]
    assert found, f"no prefix of the whole model's names fits {target.name}"
    first, *others = found
    return replace(
        target,
        name=first.name,
        layer=None,
        group=f"{PREFIX}{target.group}",
        other_names=tuple(others),
        space=wrapper.tower_of(first.name),
    )


def with_unread(layout: ModelLayout, model_dir: Path, decoder: Decoder) -> ModelLayout:
    """Returns the layout with the linear layers of towers that the model's folder has, and that
    nothing reads: of a whole tower that is not served, or of its layers behind the last one that
    a connector reads. Of these adapters may have norms and biases, too."""
    read = {
        name
        for tower in decoder.towers
        for parameter in parameters(tower)
        for form in parameter.forms
        for name in form
    }

    def is_read(module: TowerModule) -> bool:
        stored = f"{module.names[0]}.weight"
        return any(tower.wrapper.text_name(stored) in read for tower in decoder.towers)

    found = tower_modules(model_dir, decoder.wrapper, with_norms=bool(decoder.towers))
    layout = layout.with_towers(each for each in found if not is_read(each))
    if not decoder.towers:
        return layout
    unused = tuple(replace(each, space=_layer_of(each.name)) for each in layout.unused)
    return replace(layout, unused=(*unused, *map(_bias_of, unused)))


def _layer_of(name: str) -> str:
    """Returns the layer that has a module, or the module: a part of a tower that is served."""
    found = _LAYER.match(name)
    return name if found is None else found[0]


def _bias_of(target: Target) -> Target:
    """Returns the bias of a linear layer, or a norm, that nothing reads."""
    names = tuple(OtherName(f"{each.name}.bias") for each in target.other_names)
    return replace(
        target,
        name=f"{target.name}.bias",
        group=f"{target.name}.bias",
        kind=TargetKind.VECTOR,
        in_features=0,
        other_names=names,
    )


def changes_pictures(layout: ModelLayout, header: ImageHeader) -> bool:
    """Returns whether an image, as `read_header` returned it, changes the embeddings of
    pictures."""
    targets = layout.all_targets
    return any(targets[each.target].is_of_pictures for each in header.segments)
