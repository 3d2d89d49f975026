"""A dense layer of sentence-transformers, which stands behind the pooling of a model's vectors.

<folder>/config.json        in_features, out_features, bias, activation_function, and the names of
                            input and output, which must be the vector's
<folder>/model.safetensors  linear.weight [out, in], linear.bias [out]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.files import CONFIG, read_json
from inference_svc.results.embedding_rule import DenseActivation, DenseLayer

WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"
MAX_WEIGHTS = 1 << 24
"""Numbers in the weights of all layers of a model. Each input is multiplied with them between the
API's other work: as many take about 10 ms. A layer of 2,048 x 8,192 has no more."""
_WEIGHT, _BIAS = "linear.weight", "linear.bias"
_ACTIVATION = "activation_function"
_VECTOR = "sentence_embedding"
"""The name of the pooled vector among the values that modules hand on."""


def read_dense(model_dir: Path, folder: str, size: int, max_weights: int) -> DenseLayer:
    """Returns the layer in this folder, for vectors of `size` numbers, whose weight has at most
    `max_weights`: MAX_WEIGHTS less the numbers in the layers before it. Raises UnsupportedModel,
    naming the file."""
    config, where = read_json(model_dir / folder / CONFIG), f"{folder}/{CONFIG}"
    _check_form(config, where)
    out = config.get("out_features")
    if config.get("in_features") != size:
        raise UnsupportedModel(f"{where}: in_features = {config.get('in_features')!r}, not {size}")
    if type(out) is not int or out < 1:
        raise UnsupportedModel(f"{where}: out_features = {out!r}: must be an integer from 1")
    if out * size > max_weights:
        raise UnsupportedModel(
            f"{where}: a weight of {out} x {size} numbers: the Dense layers of a model may have "
            f"{MAX_WEIGHTS} in all"
        )
    shapes = {_WEIGHT: (out, size)} | ({_BIAS: (out,)} if config.get("bias", True) else {})
    found = _tensors(model_dir / folder, folder, shapes)
    name = config.get(_ACTIVATION, "torch.nn.modules.activation.Tanh")
    activation = read_named(name, f"{where}: {_ACTIVATION}")
    return DenseLayer(found[_WEIGHT], found.get(_BIAS), activation)


def _check_form(config: Mapping[str, Any], where: str) -> None:
    """Raises UnsupportedModel unless the layer makes its vector of the vector before it, alone."""
    for key in ("module_input_name", "module_output_name"):
        if (name := config.get(key)) not in (None, _VECTOR):
            raise UnsupportedModel(f"{where}: {key} = {name!r}: supported is {_VECTOR!r} alone")
    if (residual := config.get("use_residual")) not in (None, False):
        raise UnsupportedModel(
            f"{where}: use_residual = {residual!r} is not supported: supported is false"
        )


def read_named(name: object, where: str) -> DenseActivation:
    """Returns an activation by the last component of its class's name, as sentence-transformers
    saves it. Raises UnsupportedModel, naming the field."""
    known = {each.value: each for each in DenseActivation}
    found = known.get(str(name).rpartition(".")[2])
    if found is None:
        raise UnsupportedModel(f"{where} = {name!r}: supported are {', '.join(known)} of torch")
    return found


def _tensors(
    path: Path, folder: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, NDArray[np.float32]]:
    if not (path / WEIGHTS).exists():
        if (path / PICKLE).exists():
            raise UnsupportedModel(
                f"{folder}/{PICKLE} is a pickle, which can run code when it is read: save the "
                f"model with sentence-transformers again, which writes {WEIGHTS}"
            )
        raise UnsupportedModel(f"{folder}/{WEIGHTS} does not exist")
    from safetensors import SafetensorError, safe_open  # see `tensors`

    try:
        with safe_open(str(path / WEIGHTS), framework="pt") as file:
            names = set(file.keys())
            for name, shape in shapes.items():
                stored = tuple(file.get_slice(name).get_shape()) if name in names else None
                if stored != shape:
                    raise UnsupportedModel(
                        f"{folder}/{WEIGHTS}: {name} has shape {stored}, not {shape}"
                    )
            return {name: file.get_tensor(name).to(torch.float32).numpy() for name in shapes}
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{folder}/{WEIGHTS} cannot be read: {error}") from error
