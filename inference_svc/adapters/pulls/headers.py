"""Reads headers of images. Adapters that were trained alike have the same segments."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from contract.images.header import ImageHeader, Segment
from inference_svc.adapters.layout import ModelLayout

MAX_KNOWN = 16
"""Different segments that are remembered."""
MAX_SEGMENTS = 4096
"""Images with more are read each time: to remember them would take megabytes."""


class HeaderReader:
    """Reads headers of a layout's images: see `ModelLayout.read_header`. Whether segments keep the
    rules depends on nothing but them, so the same ones are checked once. Thread-safe."""

    def __init__(self, layout: ModelLayout) -> None:
        self._layout = layout
        self._known = lru_cache(MAX_KNOWN)(self._read_segments)

    def read(self, header: ImageHeader) -> ImageHeader:
        """Returns the header with indices into the layout's targets. Raises CorruptImage and
        AdapterUnusable."""
        read = self._known if len(header.segments) <= MAX_SEGMENTS else self._read_segments
        segments = read(header.image_format, header.total_bytes, header.segments)
        return replace(header, segments=segments)

    def _read_segments(
        self, image_format: int, total_bytes: int, segments: tuple[Segment, ...]
    ) -> tuple[Segment, ...]:
        header = ImageHeader("", "", "", image_format, total_bytes, segments)
        return self._layout.read_header(header).segments
