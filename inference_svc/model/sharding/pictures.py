"""Which ranks have the vision tower, and which take in its embeddings."""

from __future__ import annotations

from inference_svc.model.description import Decoder


def has_tower(decoder: Decoder) -> bool:
    """Returns whether the vision tower is here: the first rank of all has it whole, if the model
    reads pictures."""
    return decoder.pictures is not None and decoder.is_first_rank and decoder.has_embedding


def takes_pictures(decoder: Decoder) -> bool:
    """Returns whether layers here take in embeddings of pictures: with the embedding, or from
    taps."""
    if decoder.pictures is None:
        return False
    return decoder.has_embedding or decoder.layers.start < len(decoder.pictures.tower.taps)


def reaches_stages(decoder: Decoder) -> bool:
    """Returns whether layers of another stage than the first do."""
    return any(map(takes_pictures, decoder.every_stage[1:]))
