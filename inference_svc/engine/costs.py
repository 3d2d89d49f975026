"""The costs of a model's tokens and pictures, which policy shares out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.picture_targets import changes_pictures
from inference_svc.adapters.residency import Residency
from inference_svc.backends.pictures import PictureRows
from inference_svc.core import AdapterKey, EngineConfig
from inference_svc.engine.policy.pictures.memory import PictureMemory, TowerCosts
from inference_svc.engine.policy.prices import (
    LISTED_OPERATIONS,
    SORT_OPERATIONS,
    WALK_OPERATIONS,
    Prices,
)
from inference_svc.model.description import BothWays, Decoder, ExpertsProjection
from inference_svc.model.walk import layer_projections

MAX_KNOWN_IMAGES = 1 << 14
"""Images of adapters of which it is remembered whether they change pictures."""


def check_pictures(config: EngineConfig, decoder: Decoder) -> None:
    """Raises ValueError for settings with which no pictures are read, or too little memory for the
    largest one."""
    found = decoder.pictures
    if found is None:
        return
    num_tokens = min(found.max_tokens, config.max_model_len)
    if found.are_mutual:
        _check_room(config, num_tokens)
    needed = num_tokens * found.row_size * getattr(torch, config.dtype).itemsize
    if needed > config.prompt_image_bytes:
        raise ValueError(
            f"--prompt-image-memory must be at least {2 * needed} bytes: half of it keeps the "
            "embeddings of the largest image"
        )


def _check_room(config: EngineConfig, num_tokens: int) -> None:
    """Raises ValueError if not every step has room for the tokens of a picture, which see each
    other, beside the generated tokens."""
    needed = config.max_sequences + num_tokens
    if config.max_batch_tokens < needed or config.max_prefill_chunk < num_tokens:
        raise ValueError(
            f"--max-batch-tokens must be at least {needed}: a step computes all {num_tokens} "
            f"tokens of an image, beside {config.max_sequences} sequences (--max-sequences); or "
            "set --max-prompt-images 0"
        )


def make_pictures(
    config: EngineConfig,
    decoder: Decoder,
    layout: ModelLayout,
    residency: Residency,
    rows: PictureRows | None,
) -> PictureMemory | None:
    """Returns None for a model that reads no pictures. The backend's `rows` say which units
    works count."""
    found = decoder.pictures
    if found is None:
        return None
    assert rows is not None, "the backend reads pictures"
    tower, dtype = found.tower, getattr(torch, config.dtype)
    # A step takes the time of a rank of each stage, and a tower the first rank's.
    of_token = sum(_num_weights(decoder.of_all_stages))
    of_layer = sum(_num_weights(tower)) / tower.num_layers
    assert tower.connector is not None
    connectors = (tower.connector, *(tap.connector for tap in tower.taps))
    of_connectors = [
        sum(each.in_features * each.out_features for each in connector.layers)
        / found.tiles.merge**2
        for connector in connectors
    ]
    widths = [each.mixer.size for each in tower.blocks if isinstance(each.mixer, BothWays)]
    costs = TowerCosts(
        units=rows.units,
        tokens_per_patch=(of_layer + max(of_connectors)) / of_token,
        # A product of a query with a key, and of a weight with a value.
        tokens_per_pair=2 * max(widths) / of_token,
        row_bytes=found.row_size * dtype.itemsize,
    )

    known: dict[str, bool] = {}

    def changes(key: AdapterKey) -> bool:
        found = False
        for header in residency.headers(key).values():
            # Each waiting sequence asks in each step, and an image has hundreds of segments.
            if header.image_id not in known:
                if len(known) == MAX_KNOWN_IMAGES:
                    known.clear()
                known[header.image_id] = changes_pictures(layout, header)
            found |= known[header.image_id]
        return found

    sizes = config.prompt_image_bytes, costs, config.max_batch_tokens
    return PictureMemory(*sizes, changes, are_mutual=found.are_mutual)


def prices_of(decoder: Decoder) -> Prices:
    """Returns the prices of choosing and scoring tokens of this model."""
    of_token = 2 * sum(_num_weights(decoder.of_all_stages))
    return Prices(
        logits=decoder.vocab_size * 2 * decoder.hidden_size / of_token,
        logprobs=decoder.vocab_size * WALK_OPERATIONS / of_token,
        sort=decoder.vocab_size * SORT_OPERATIONS / of_token,
        listed=LISTED_OPERATIONS / of_token,
    )


def _num_weights(decoder: Decoder) -> Iterator[int]:
    """Yields the weights of each projection of the layers that a token passes."""
    shape = decoder.expert_layers
    for projection in layer_projections(decoder):
        num_times = 1
        if isinstance(projection, ExpertsProjection):
            assert shape is not None
            num_times = shape.num_chosen
        yield num_times * projection.in_features * projection.out_features
