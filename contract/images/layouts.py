"""Layouts: the targets of a base model, which decide an image's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from contract.images.dtypes import DataType
from contract.images.targets import Target


class InvalidLayout(ValueError):
    """A layout that breaks a rule in `field`, such as "layout.targets[3].in_features"."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Layout:
    """The targets of one base model as one inference service computes them, in order of use."""

    base_model: str
    config_sha256: str
    dtype: DataType
    image_format: int
    targets: tuple[Target, ...]
    adapter_dtype: DataType | None = None
    """The type of A and B in images, if it is not `dtype`: float8, from format 3 on."""

    @property
    def lora_dtype(self) -> DataType:
        """The type of A and B in images."""
        return self.adapter_dtype or self.dtype


def runs(layout: Layout) -> Iterator[tuple[int, int]]:
    """Yields target ranges [start, end) of one layer each, in order of use: the embedding (no
    layer, before the first), every layer, the head (no layer, after the last)."""
    start = 0
    for index in range(1, len(layout.targets) + 1):
        if (
            index == len(layout.targets)
            or layout.targets[index].layer != layout.targets[start].layer
        ):
            yield start, index
            start = index
