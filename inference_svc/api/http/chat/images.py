"""Images of conversations, as requests have them: in base64, or as URLs of allowed hosts."""

from __future__ import annotations

import base64
import re
from typing import NamedTuple

from inference_svc.pictures.fetching.hosts import is_url, parse_url
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
        return to_image(self.place, self.url, f"{path}.{self.field}")


class Content(NamedTuple):
    """A text, and images in it."""

    text: str
    images: tuple[ImageUrl, ...] = ()


def to_image(place: int, url: str, where: str) -> MessageImage:
    """Returns an image that is in its URL, or elsewhere. Raises InvalidArgument, naming the field
    `where`."""
    if is_url(url):
        try:
            return MessageImage(place, b"", where, location=parse_url(url))
        except ValueError as error:
            raise InvalidArgument(f"{where}: {error}", subject=where) from None
    begin = _DATA_URL.match(url)
    if begin is None:
        kind = url.partition(":")[0][:MAX_KIND_CHARS]
        raise InvalidArgument(
            f"{where}: must be data:image/...;base64,..., or an https: URL of a host that the "
            f"server may fetch from, not {kind!a}",
            subject=where,
        )
    return MessageImage(place, decoded(url[begin.end() :], where), where)


def decoded(text: str, where: str) -> bytes:
    """Returns an image's file. Raises InvalidArgument, naming the field `where`."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise InvalidArgument(f"{where}: the image is no base64", subject=where) from None
