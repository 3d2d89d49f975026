# Generated from loadout/_client/async_images.py by `make client`: change that file.
"""Uploads of images, and calls that name images by their hashes."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from loadout._rpc import calls, threads
from loadout._rpc.caller import Caller
from loadout._rpc.calls import Call, StreamCall
from loadout._rpc.route import IMAGE_NOT_FOUND, Route
from loadout._rpc.stream import Stream
from loadout.errors import NotFound

T = TypeVar("T")


class ImageCalls(Caller):
    """The client's methods that upload images."""

    def upload_image(
        self,
        data: bytes,
        *,
        adapter: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> bytes:
        """Uploads the file of an image, so that requests can name it by its hash.

        Args:
            data: A PNG, JPEG, WebP or GIF file with one frame, at most 32 MiB.
            adapter: Reference of the adapter of these requests, whose replica gets the file.
            cache_salt: Only requests with an equal salt can name the file.
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The SHA-256 hash of the file, for `sha256` of `types.ChatImage`. The server deletes the
            file after an hour without use, or earlier if it needs the room.

        Raises:
            InvalidArgument: The file is too large, or the model reads no images.
            ResourceExhausted: The server has no room for the file.
        """
        call = calls.upload_image(len(data), adapter, cache_salt)
        return self._send_image(call, data, self._channels.route(call), timeout_s)

    def _send_image(
        self, call: Call[bytes], data: bytes, route: Route, timeout_s: float | None
    ) -> bytes:
        response = self._attempt(
            route,
            lambda timeout: route.send(
                threads.iterate(calls.image_messages(call.request, data)), timeout
            ),
            repeatable=True,
            timeout_s=timeout_s,
        )
        return call.convert(response)

    def _send_images(
        self, call: Call[Any] | StreamCall[Any], address: str, timeout_s: float | None
    ) -> Route:
        """Uploads the files of a call to the replica that lacks one of them, all within one
        deadline. Returns the route to this replica."""
        assert call.images is not None
        attempts = self._attempts(timeout_s)
        for data in call.images.files:
            upload = calls.upload_image(len(data), call.adapter, call.images.cache_salt)
            route = self._channels.replica_route(upload, address)
            self._send_image(upload, data, route, attempts.remaining_s)
        return self._channels.replica_route(call, address)

    def _stream(self, call: StreamCall[T], timeout_s: float | None) -> Stream[T]:
        restore = None if call.images is None else partial(self._send_images, call)
        return Stream(self._channels.route(call), call, self._attempts(timeout_s), restore)

    def _call_with_images(self, call: Call[T], timeout_s: float | None) -> T:
        attempts, route = self._attempts(timeout_s), self._channels.route(call)
        try:
            return self._finish(call, route, attempts.remaining_s)
        except NotFound as error:
            if call.images is None or error.reason != IMAGE_NOT_FOUND:
                raise
        route = self._send_images(call, route.address, attempts.remaining_s)
        return self._finish(call, route, attempts.remaining_s)
