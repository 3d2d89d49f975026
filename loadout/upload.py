"""An adapter folder as the messages of UploadAdapter: one meta, then the files in chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loadout._rpc.calls import build, signature_message
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.errors import InvalidArgument
from loadout.types import Signature

CHUNK_BYTES = 512 * 1024

CONFIG = "adapter_config.json"
WEIGHT_PATTERNS = ("adapter_model*.safetensors*", "adapter_model*.bin*")
"""What PEFT writes, single or sharded with an index; the first pattern that matches wins."""

Progress = Callable[[int, int], None]
"""Called with (sent bytes, total bytes) after each chunk."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The files that make up the adapter in a folder, and their sizes in bytes."""

    path: Path
    sizes: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.sizes)


def is_uri(source: str | os.PathLike[str]) -> bool:
    return isinstance(source, str) and "://" in source


def open_folder(source: str | os.PathLike[str]) -> AdapterFolder:
    """Raises InvalidArgument, naming the path, unless it is a folder as PEFT saves one."""
    path = Path(source)
    if not path.is_dir():
        raise _invalid(path, "is not a directory (a URI has a scheme, such as s3://bucket/prefix)")
    if not (path / CONFIG).is_file():
        raise _invalid(path / CONFIG, "does not exist: is this a PEFT adapter?")
    weights = next(filter(None, (sorted(path.glob(pattern)) for pattern in WEIGHT_PATTERNS)), [])
    if not weights:
        raise _invalid(path, "has no adapter_model.safetensors")
    files = [path / CONFIG, *weights]
    return AdapterFolder(path, tuple((file.name, file.stat().st_size) for file in files))


def _invalid(path: Path, why: str) -> InvalidArgument:
    return InvalidArgument(f"{path} {why}", code="INVALID_ARGUMENT", subject=str(path))


class Upload:
    """One upload, which may be sent again: every `messages()` starts from the beginning.

    gRPC reports a request stream that raised as a lost stream; `failure` has the cause.
    """

    def __init__(
        self,
        folder: AdapterFolder,
        progress: Progress | None,
        *,
        name: str,
        base_model: str,
        expected_digest: str,
        if_current_digest: str,
        pinned: bool,
        labels: Mapping[str, str],
        description: str = "",
        signature: Signature | None = None,
        keep: int = 0,
    ) -> None:
        meta = build(
            store_pb.UploadMeta,
            name=name,
            base_model=base_model,
            expected_digest=expected_digest,
            if_current_digest=if_current_digest,
            pinned=pinned,
            labels=dict(labels),
            description=description,
            signature=signature_message(signature),
            keep=keep,
        )
        self._folder = folder
        self._progress = progress
        self._meta = store_pb.UploadAdapterRequest(meta=meta)
        self.repeatable = not if_current_digest
        self.failure: OSError | None = None

    def messages(self) -> Iterator[store_pb.UploadAdapterRequest]:
        yield self._meta
        sent = 0
        try:
            for file_name, _ in self._folder.sizes:
                for chunk in file_chunks(self._folder.path / file_name):
                    yield store_pb.UploadAdapterRequest(chunk=chunk)
                    sent += len(chunk.data)
                    if self._progress is not None:
                        self._progress(sent, self._folder.total_bytes)
        except OSError as error:
            self.failure = error
            raise


def file_chunks(path: Path) -> Iterator[store_pb.FileChunk]:
    """Yields the file in order; an empty file is one empty chunk, so that it is sent at all."""
    offset = 0
    with path.open("rb") as file:
        while (data := file.read(CHUNK_BYTES)) or offset == 0:
            yield store_pb.FileChunk(file_name=path.name, offset=offset, data=data)
            if not data:
                return
            offset += len(data)
