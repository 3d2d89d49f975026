"""Images of conversations, as requests have them: in base64, and never as addresses."""

from __future__ import annotations

import base64
import re
from typing import NamedTuple

from inference_svc.text.chat import MessageImage
from servicekit.errors import InvalidArgument

MAX_KIND_CHARS = 64
"""How much of an address an error quotes."""
DETAILS = ("auto", "low", "high", "original")
"""OpenAI's sizes of an image, without effect: the model has one size."""
_DATA_URL = re.compile(r"data:image/[\w.+-]{1,64};base64,", re.IGNORECASE | re.ASCII)


class ImageUrl(NamedTuple):
    """An image before the character `place` of a text, in the `field` of a message."""

    place: int
    field: str
    url: str

    def to_image(self, path: str) -> MessageImage:
        """Raises InvalidArgument, naming the field after `path`."""
        where = f"{path}.{self.field}"
        begin = _DATA_URL.match(self.url)
        if begin is None:
            kind = self.url.partition(":")[0][:MAX_KIND_CHARS]
            raise InvalidArgument(
                f"{where}: must be data:image/...;base64,..., not {kind!a}: the server fetches "
                "nothing, so send the image itself",
                subject=where,
            )
        return MessageImage(self.place, decoded(self.url[begin.end() :], where), where)


class Content(NamedTuple):
    """A text, and images in it."""

    text: str
    images: tuple[ImageUrl, ...] = ()


def decoded(text: str, where: str) -> bytes:
    """Returns an image's file. Raises InvalidArgument, naming the field `where`."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise InvalidArgument(f"{where}: the image is no base64", subject=where) from None
