"""Receives an adapter's files from the store: checks every byte, and makes the folder as a whole,
or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from contract.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from loadout import types
from loadout._rpc.convert import from_store
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.errors import DataLoss, InvalidArgument

FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""All files that an export has."""


class Export:
    """Writes the messages of ExportAdapter into files beside `folder`, which appears when all are
    complete. `admit` is called with the bytes of all files before the first arrives. Blocking;
    close it in the end.

    Raises InvalidArgument if the folder exists.
    """

    def __init__(self, folder: Path, admit: Callable[[int], object] | None = None) -> None:
        if os.path.lexists(folder):
            raise InvalidArgument(f"{folder} exists: nothing is overwritten", subject="folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._admit = admit
        self._made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        self._adapter: types.Adapter | None = None
        self._sizes: dict[str, int] = {}
        self._received: dict[str, int] = {}
        self._hashes: dict[str, hashlib._Hash] = {}
        self._open: dict[str, BinaryIO] = {}
        self._is_complete = False

    def add(self, message: pb.ExportAdapterResponse) -> None:
        """Writes one message. Raises DataLoss for one that does not fit the earlier ones, and
        as `admit`."""
        part = message.WhichOneof("part")
        if part == "header" and self._adapter is None:
            self._begin(message.header)
        elif part == "chunk" and not self._is_complete:
            self._write(message.chunk)
        elif part == "trailer" and not self._is_complete:
            self._check(message.trailer)
        else:
            raise DataLoss(f"the store sent {part or 'nothing'} out of order")

    def finish(self) -> types.Adapter:
        """Makes the folder; returns the adapter. Raises DataLoss if the files are not complete."""
        if self._adapter is None or not self._is_complete:
            raise DataLoss("the store ended the export before its end")
        os.chmod(self._made, 0o755)  # tempfile's are for their owner alone
        self._made.rename(self._folder)
        return self._adapter

    def close(self) -> None:
        """Removes whatever did not become the folder. Idempotent."""
        while self._open:
            self._open.popitem()[1].close()
        shutil.rmtree(self._made, ignore_errors=True)

    def _begin(self, header: pb.ExportHeader) -> None:
        names = [file.name for file in header.files]
        if sorted(names) != sorted(FILES):
            raise DataLoss(f"the store sends files {', '.join(names[:8])}, not {', '.join(FILES)}")
        if self._admit is not None:
            self._admit(sum(file.size_bytes for file in header.files))
        self._adapter = from_store.adapter(header.adapter)
        for file in header.files:
            self._sizes[file.name] = file.size_bytes
            self._received[file.name] = 0
            self._hashes[file.name] = hashlib.sha256()
            self._open[file.name] = (self._made / file.name).open("xb")

    def _write(self, chunk: pb.FileChunk) -> None:
        name, start = chunk.file_name, self._received.get(chunk.file_name)
        end = (start or 0) + len(chunk.data)
        if start is None or chunk.offset != start or end > self._sizes[name]:
            raise DataLoss(f"{name[:64]}: the store sent a chunk that does not follow the last one")
        self._open[name].write(chunk.data)
        self._hashes[name].update(chunk.data)
        self._received[name] = end

    def _check(self, trailer: pb.ExportTrailer) -> None:
        sent = {file.name: file.sha256 for file in trailer.files}
        found = {name: each.hexdigest() for name, each in self._hashes.items()}
        if self._received != self._sizes or not found or sent != found:
            raise DataLoss("the files that arrived are not those that the store has sent")
        for file in self._open.values():
            file.close()
        self._is_complete = True
