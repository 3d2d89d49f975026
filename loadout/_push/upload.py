"""A push as the messages of UploadAdapter: one meta, the config, the weights as they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from contract.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from loadout._push.adapter import dump_config
from loadout._push.tensors import Read, Tensor, in_order, pieces, read
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.upload import chunk_message

CHUNK_BYTES = 1 << 20
METADATA = {"format": "pt"}


class PushUpload:
    """One upload, which may be sent again: every `messages()` starts from the beginning.

    gRPC reports a request stream that raised as a lost stream; `failure` has the cause.
    """

    def __init__(
        self,
        meta: store_pb.UploadMeta,
        tensors: Sequence[Tensor],
        config: Mapping[str, Any],
        read: Read = read,
    ) -> None:
        self._meta = store_pb.UploadAdapterRequest(meta=meta)
        self._tensors = in_order(tensors)
        self._config = dump_config(config)
        self._read = read
        self.repeatable = not meta.if_current_digest
        self.failure: Exception | None = None

    def messages(self) -> Iterator[store_pb.UploadAdapterRequest]:
        self.failure = None
        yield self._meta
        yield chunk_message(CONFIG_FILE, 0, self._config)
        offset = 0
        try:
            for data in pieces(self._tensors, METADATA, CHUNK_BYTES, self._read):
                yield chunk_message(WEIGHTS_FILE, offset, data)
                offset += len(data)
        except Exception as error:
            self.failure = error
            raise
