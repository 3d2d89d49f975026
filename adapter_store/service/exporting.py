"""Exports: an adapter's source as the files of a plain LoRA, for other engines."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from adapter_store.catalog.names import Names
from adapter_store.checkpoint.conversion.plain import FileBytes, PlainLora
from adapter_store.core import AdapterRecord, Principal, SourceFile
from adapter_store.errors import CorruptData
from adapter_store.images.pull import CHUNK_BYTES, SHARE_WAIT_SECONDS, paced, rate_of
from adapter_store.images.stored_source import StoredSources
from adapter_store.service.calls import Calls
from adapter_store.sources.upload import FileChunk
from servicekit.refs import AdapterRef


@dataclass(frozen=True, slots=True)
class ExportHeader:
    """Opens an export. The hashes of `files` are "" as yet."""

    record: AdapterRecord
    revision: int
    files: tuple[SourceFile, ...]


@dataclass(frozen=True, slots=True)
class ExportTrailer:
    """Ends an export, with the files' hashes."""

    files: tuple[SourceFile, ...]


ExportMessage: TypeAlias = ExportHeader | FileChunk | ExportTrailer


class Exporting:
    """Streams plain LoRAs. The memory that one is made in takes its account's share of the memory
    for pulls; its work runs on the threads of registrations, which read and hash files, too."""

    def __init__(self, calls: Calls, names: Names, sources: StoredSources) -> None:
        self._calls = calls
        self._names = names
        self._sources = sources

    async def stream(self, caller: Principal, ref: AdapterRef) -> AsyncGenerator[ExportMessage]:
        """Streams the files of an adapter's plain LoRA. Copy a chunk before requesting the next.

        Raises NotFound, IncompatibleAdapter for an adapter that no plain LoRA computes, CorruptData
        if the stored source is damaged, ShareExceeded if the account's pulls keep its share of the
        memory, and ReaderStalled if files that take more than that are read too slowly.
        """
        record, revision = await self._calls.read(caller, self._names.get, ref, caller.tenants)
        plain = await self._calls.fetch(caller, self._open, caller, record, ref)
        memory = self._calls.places.pulled_bytes
        num_bytes = min(plain.work_bytes, memory.capacity)
        files = tuple(SourceFile(name, size, "") for name, size in plain.sizes.items())
        hashes = {file.name: hashlib.sha256() for file in files}
        offsets = dict.fromkeys(plain.sizes, 0)
        with await memory.wait(caller.account, num_bytes, SHARE_WAIT_SECONDS) as held:
            rate = rate_of(held, sum(plain.sizes.values()))
            yield ExportHeader(record, revision, files)
            pieces = plain.pieces()
            try:
                while piece := await self._calls.fetch(caller, _next, pieces):
                    await asyncio.to_thread(hashes[piece.file].update, piece.data)
                    for chunk in paced(_chunks(piece, offsets[piece.file]), rate):
                        yield chunk
                    offsets[piece.file] += len(piece.data)
            except CorruptData as error:
                raise self._sources.damaged(record.digest, str(error)) from error
        yield ExportTrailer(
            tuple(replace(file, sha256=hashes[file.name].hexdigest()) for file in files)
        )

    def _open(self, caller: Principal, record: AdapterRecord, ref: AdapterRef) -> PlainLora:
        checkpoint = self._sources.open(record.digest, lambda: self._names.get(ref, caller.tenants))
        return PlainLora(checkpoint, record.base_model)


def _next(pieces: Iterator[FileBytes]) -> FileBytes | None:
    return next(pieces, None)


def _chunks(piece: FileBytes, offset: int) -> Iterator[FileChunk]:
    for start in range(0, len(piece.data), CHUNK_BYTES):
        yield FileChunk(piece.file, offset + start, piece.data[start : start + CHUNK_BYTES])
