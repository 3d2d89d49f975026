"""Registers adapters, makes their images part by part, and reads pulls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from adapter_store.build import Store
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.core import ANYONE, ImageKey
from adapter_store.images.compile import compile_image
from adapter_store.images.pull import Pulls
from adapter_store.registration.registrar import Registration
from contract.images.header import ImageChunk
from servicekit.refs import AdapterName
from servicekit.shares import Shares
from tests.support.wait import until_async


async def register(store: Store, folder, name: str = "a", **asked):
    registration = Registration(AdapterName("default", name), **asked)
    change = await store.use_cases.registering.register(ANYONE, registration, f"file://{folder}")
    return (await change.wait())[0]


SECONDS = 60


class Steps:
    """Holds compiling up before every part but the first, until `go` is called for it."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.reached = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)
        self.failure: Exception | None = None

    def go(self, parts: int = 100) -> None:
        self._allowed.release(parts)

    def before_part(self, index: int) -> None:
        if index:
            self.reached.release()
            assert self._allowed.acquire(timeout=SECONDS)
            if self.failure is not None:
                raise self.failure


def expected_bytes(folder: Path, layout) -> bytes:
    return bytes(compile_image(open_checkpoint(folder), layout).buffer.numpy().data)


async def read(stream) -> tuple[bytes, list[object]]:
    data, others = b"", []
    async for message in stream:
        if isinstance(message, ImageChunk):
            data += bytes(message.data)
        else:
            others.append(message)
    return data, others


def scenario(
    start: Callable,
    make_adapter,
    make_layout,
    test,
    held_bytes: Shares | None = None,
    **settings,
) -> None:
    """test(store, pulls, key, folder) in a store that knows one adapter of several parts, not
    compiled yet."""

    async def main() -> None:
        folder = make_adapter(("embed_tokens", "q_proj", "down_proj"))
        pulls_only = {"disk_cache_bytes": 1 << 20, "compile_ahead": False}
        async with start(**pulls_only, **settings) as store:
            digest = (await register(store, folder)).digest
            layout_id, *_ = await store.use_cases.layouts.register(make_layout(), [1])
            pulls = Pulls(
                *(store.images, store.metrics, store.use_cases.layout_usage.record),
                held_bytes or Shares("pulled_bytes", 1 << 30),
            )
            async with asyncio.timeout(SECONDS):
                await test(store, pulls, ImageKey(digest, layout_id), folder)
            # Bytes may have been read before their file is complete.
            await until_async(lambda: not store.images.num_in_progress)
            store.images.check_integrity()

    asyncio.run(main())
