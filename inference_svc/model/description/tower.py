"""Vision towers and their connectors, which make the embeddings of a picture's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from inference_svc.model.description.feed_forward import Activation
from inference_svc.model.description.modules import Norm, Projection
from inference_svc.pictures.sizes import TileForm
from kernels.pictures.reference import Merging


@dataclass(frozen=True, slots=True)
class Patches:
    """The inputs of a tower: tiles of this `form`, in patches, which the convolution `module` makes
    tokens of, or, if there is one, the linear `layer`: it reads a patch pixel by pixel, row by row.
    The tensor `class_token`, if there is one, is a token before the patches of each tile.
    `has_fractions`: the positions of patches follow from fractions of a side.
    """

    module: str
    form: TileForm
    has_bias: bool
    class_token: str = ""
    has_fractions: bool = False
    layer: Projection | None = None


@dataclass(frozen=True, slots=True)
class Standard:
    """factor * (scale * x - bias), in fp32: `bias` and `factor` are tensors of numbers for each
    element; "": scale * x."""

    scale: float
    bias: str = ""
    factor: str = ""


@dataclass(frozen=True, slots=True)
class Connector:
    """Makes embeddings of a tower's outputs: the patches of a cell become one row; then come the
    `standard` and the `norm`, if there are any, and the `layers`, with the activation before the
    last."""

    layers: tuple[Projection, ...]
    activation: Activation | None = None
    merging: Merging = Merging.SIDE_BY_SIDE
    norm: Norm | None = None
    standard: Standard | None = None


@dataclass(frozen=True, slots=True)
class Tap:
    """Further embeddings of a picture's tokens, which a `connector` makes of what the `layer`
    leaves: the `norm` is of whole cells. A text part adds those of the first tap to what its first
    layer leaves, and so on."""

    layer: int
    norm: Norm
    connector: Connector
