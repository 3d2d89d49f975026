"""The keys and values of a decoder's layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from inference_svc.model.description import Decoder, KVPlace
from kernels.attention import FP8, KVCache, can_tile, page_bytes


@dataclass(frozen=True, slots=True)
class KVCaches:
    """A cache for each shape that keys and values have, and each layer's place in one. All have the
    same pages: a page's number stands for the same positions of a sequence in every layer, also of
    other stages, which may have all layers with keys and values."""

    caches: tuple[KVCache, ...]
    places: Mapping[int, KVPlace]
    num_pages: int
    page_size: int

    @classmethod
    def allocate(
        cls,
        decoder: Decoder,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        stored: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        prefers_tiles: bool = False,
    ) -> KVCaches:
        """`stored` is as in `KVCache.allocate`. `prefers_tiles`: caches are tiled whose shape can
        be."""
        num_layers = _layers_by_shape(decoder)
        caches = (
            KVCache.allocate(
                **shape._asdict(),
                num_layers=num_layers[index],
                num_pages=num_pages,
                page_size=page_size,
                dtype=dtype,
                stored=stored,
                device=device,
                is_tiled=prefers_tiles and can_tile(page_size, shape.head_dim, dtype),
            )
            for index, shape in enumerate(decoder.kv_shapes)
        )
        return cls(tuple(caches), decoder.kv_places, num_pages, page_size)

    def of(self, layer: int) -> tuple[KVCache, int]:
        """Returns the cache that a layer of the decoder reads, and which of its layers."""
        place = self.places[layer]
        return self.caches[place.shape], place.layer

    @property
    def num_bytes(self) -> int:
        return sum(cache.num_bytes for cache in self.caches)


def stored_dtype(kv_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which keys and values are held: of the setting `kv_dtype`, "auto" or
    "fp8", for a model that computes in `dtype`."""
    return FP8 if kv_dtype == "fp8" else dtype


def kv_page_bytes(decoder: Decoder, page_size: int, stored: torch.dtype) -> int:
    """Returns the size of a page of all layers, of keys and values held as `stored`."""
    num_layers = _layers_by_shape(decoder)
    return sum(
        page_bytes(
            **shape._asdict(), num_layers=num_layers[index], page_size=page_size, stored=stored
        )
        for index, shape in enumerate(decoder.kv_shapes)
    )


def _layers_by_shape(decoder: Decoder) -> Counter[int]:
    return Counter(place.shape for place in set(decoder.kv_places.values()))
