"""The running model's matrices, with which an adapter's have to agree.

vLLM checks neither: it drops layers that the model lacks without a word, and writes a matrix that
is too small into a part of its place.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from contract.adapter_files import WEIGHTS_FILE
from loadout.errors import FailedPrecondition

logger = logging.getLogger(__name__)

OUTSIDE = -1
"""The number of the layer of a module that is in none."""

Place: TypeAlias = tuple[int, str]
"""A module's layer, and its name in the layer; outside of layers the end of its name."""
Shape: TypeAlias = tuple[int, int]
"""The numbers of inputs and outputs."""


class ModelShapes:
    """The layers and matrices of one model.

    Args:
        num_layers: The number of layers.
        shapes: The shapes of the matrices. Several modules may have one place, as in a tower.
    """

    def __init__(self, num_layers: int, shapes: Mapping[Place, Collection[Shape]]) -> None:
        self._num_layers = num_layers
        self._shapes = shapes
        self._names = {name for _, name in shapes}

    def check(self, adapter: str, folder: Path) -> None:
        """Checks the folder of a plain LoRA. Raises FailedPrecondition, which names the layer or
        the module that does not fit. The log has the number of modules that only vLLM knows."""
        shapes = dict(_plain_lora(adapter, folder))
        if not shapes:
            raise FailedPrecondition(f"{adapter} changes no module", subject=WEIGHTS_FILE)
        highest = max(_place_of(module)[0] for module in shapes)
        if highest >= self._num_layers:
            raise FailedPrecondition(
                f"{adapter} changes layer {highest}; this server's model has layers 0 to "
                f"{self._num_layers - 1}",
                subject="layer",
            )
        num_unknown = 0
        for module, (num_in, num_out) in shapes.items():
            place = _place_of(module)
            own = self._shapes.get(place)
            num_unknown += own is None
            if own is None and place[1] in self._names:  # other layers have it
                raise FailedPrecondition(
                    f"{adapter} changes {module}, which this server's model does not have",
                    subject=module,
                )
            if own is not None and (num_in, num_out) not in own:
                needed = " or ".join(f"{each[0]} and {each[1]}" for each in sorted(own))
                raise FailedPrecondition(
                    f"{adapter} has {num_in} inputs and {num_out} outputs for {module}; this "
                    f"server's model has {needed}",
                    subject=module,
                )
        if num_unknown:
            logger.warning(
                "%s: the shapes of %d of %d modules are not checked: transformers' model has none "
                "of these names",
                adapter,
                num_unknown,
                len(shapes),
            )


def read_shapes(config: Any) -> dict[Place, set[Shape]]:
    """Returns the matrices of a model that transformers knows, without its weights; none for
    another model, or if it cannot be made: then the log has a warning."""
    name = (config.architectures or ("",))[0]
    make = getattr(transformers, name, None) if name else None
    if make is None:
        logger.warning("transformers has no %s: adapters' shapes are not checked", name or "model")
        return {}
    try:
        with torch.device("meta"):
            model = make(copy.deepcopy(config))
    except Exception:  # a class of any model's; adapters that fit must be served
        logger.warning("%s: adapters' shapes are not checked", name, exc_info=True)
        return {}
    found: dict[Place, set[Shape]] = defaultdict(set)
    for module_name, module in model.named_modules():
        if shape := _shape_of(module):
            found[_place_of(module_name)].add(shape)
    return dict(found)


def _shape_of(module: nn.Module) -> Shape | None:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return None


def _plain_lora(adapter: str, folder: Path) -> Iterator[tuple[str, Shape]]:
    """Yields the modules of a plain LoRA, with their shapes. Raises FailedPrecondition for other
    tensors than pairs of matrices."""
    with safe_open(folder / WEIGHTS_FILE, framework="np") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    for name, size in sizes.items():
        if len(size) != 2:
            raise FailedPrecondition(
                f"{adapter} has {len(size)} dimensions for {name}; a plain LoRA has matrices",
                subject=name,
            )
        module, found, rest = name.partition(".lora_")
        if found and rest in ("A.weight", "embedding_A"):
            b = f"{module}.lora_{rest.replace('A', 'B')}"
            if b not in sizes:
                raise FailedPrecondition(f"{adapter} has {name}, but not {b}", subject=b)
            yield module.removeprefix("base_model.model."), (size[1], sizes[b][0])


def _place_of(module: str) -> Place:
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return int(part), ".".join(parts[index + 1 :])
    return OUTSIDE, parts[-1]
