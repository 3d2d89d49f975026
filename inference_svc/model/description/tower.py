"""Vision towers and their connectors, which make the embeddings of a picture's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from inference_svc.model.description.feed_forward import Activation
from inference_svc.model.description.modules import Projection


@dataclass(frozen=True, slots=True)
class Patches:
    """The inputs of a tower: square tiles of `tile_size` pixels, in patches of `patch_size`, which
    the convolution `module` makes tokens of. The tensor `class_token`, if there is one, is a token
    before the patches of each tile. The connector reads all tokens of a tile but the first
    `num_dropped`. `has_fractions`: the positions of patches follow from fractions of a side.
    """

    module: str
    tile_size: int
    patch_size: int
    has_bias: bool
    class_token: str = ""
    num_dropped: int = 0
    has_fractions: bool = False

    @property
    def num_patches(self) -> int:
        """The patches of a tile."""
        return (self.tile_size // self.patch_size) ** 2

    @property
    def num_tokens(self) -> int:
        """The tokens of a tile in the tower."""
        return self.num_patches + bool(self.class_token)

    @property
    def num_outputs(self) -> int:
        """The tokens of a tile that the connector reads."""
        return self.num_tokens - self.num_dropped


@dataclass(frozen=True, slots=True)
class Connector:
    """Makes embeddings of a tower's outputs: `merge` x `merge` neighbouring patches become one row;
    then come the `layers`, with the activation between them."""

    layers: tuple[Projection, ...]
    activation: Activation | None = None
    merge: int = 1
