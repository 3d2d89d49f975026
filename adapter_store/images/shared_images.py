"""What the tier of images that replicas share must do. Without one, every replica compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from adapter_store.catalog.catalog import ImageKey
from adapter_store.images.file import ImageStream
from adapter_store.images.plan import ImagePlan


class Claim(Protocol):
    """The right to compile one image, as long as no other replica may."""

    def release(self) -> None:
        """Lets others in; what was published before is there for them to find."""


class SharedImages(Protocol):
    """The tier of images that all replicas of a store share. Blocking and thread-safe.

    It is a cache: when it does not answer (OSError), images are compiled here.
    """

    def find(self, key: ImageKey, plan: ImagePlan) -> ImageStream | None:
        """Opens the shared image, if there is one. Its reader verifies it, and closes it."""

    def claim(self, key: ImageKey, *, wait: bool) -> Claim | None:
        """The right to compile the image here. None: look again with `find`, another replica
        had it, and may still be at work. With `wait` that is only after a moment's waiting."""

    def publish(self, key: ImageKey, path: Path) -> None:
        """Copies a whole image file there. One that is there already stays."""

    def remove(self, key: ImageKey) -> None:
        """Takes away an image that is damaged; it may be absent."""
