"""The store's contract as the soak calls it: no retries, and a lost connection by its own name."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc
from tests.soak.expected_images import Content, layout_message
from tests.soak.model import Labels, NameState, Version

CALL_S = 120.0
CHUNK_BYTES = 64 << 10


class Lost(Exception):
    """The store went away during the call: it may have happened, or not."""


class Refused(Exception):
    """The store answered with an error."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise Lost(error.details()) from error
        raise Refused(error.code().name, error.details() or "") from error


@dataclass(frozen=True, slots=True)
class Event:
    revision: int
    kind: str
    name: str
    version: int
    digest: str


def to_event(event: pb.AdapterEvent) -> Event:
    kind = pb.EventKind.Name(event.kind).removeprefix("EVENT_KIND_")
    return Event(event.revision, kind, event.name, event.version, event.digest)


class Calls:
    """One caller's connection to one process of the store. All raise Lost and Refused."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = pb_grpc.AdapterStoreServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def register(self, name: str, content: Content, labels: Labels, **fields: str) -> pb.Adapter:
        request = pb.RegisterAdapterRequest(
            name=name, source_uri=f"file://{content.folder}", labels=dict(labels), **fields
        )
        with translated():
            return self._stub.RegisterAdapter(request, timeout=CALL_S)

    def upload(
        self, name: str, content: Content, labels: Labels, break_off: bool = False, **fields: str
    ) -> pb.Adapter:
        """With `break_off` the caller goes away before the end of the last file."""
        started = threading.Event()

        def requests() -> Iterator[pb.UploadAdapterRequest]:
            yield pb.UploadAdapterRequest(
                meta=pb.UploadMeta(name=name, labels=dict(labels), **fields)
            )
            chunks = list(_chunks(content))
            for chunk in chunks[:-1] if break_off else chunks:
                yield pb.UploadAdapterRequest(chunk=chunk)
            if break_off:
                started.wait()
                call.cancel()

        with translated():
            call = self._stub.UploadAdapter.future(requests(), timeout=CALL_S)
            started.set()
            try:
                return call.result()
            except grpc.FutureCancelledError as error:
                raise Refused("CANCELLED", "broken off") from error

    def delete(self, name: str, version: int) -> int:
        with translated():
            request = pb.DeleteAdapterRequest(name=name, version=version)
            return self._stub.DeleteAdapter(request, timeout=CALL_S).revision

    def get(self, ref: str) -> pb.Adapter | None:
        try:
            with translated():
                return self._stub.GetAdapter(pb.GetAdapterRequest(ref=ref), timeout=CALL_S).adapter
        except Refused as refused:
            if refused.code == "NOT_FOUND":
                return None
            raise

    def rollback(self, name: str, version: int) -> pb.RollbackAdapterResponse:
        with translated():
            request = pb.RollbackAdapterRequest(name=name, version=version)
            return self._stub.RollbackAdapter(request, timeout=CALL_S)

    def name_state(self, name: str, last: int) -> NameState:
        """A name as the store has it now; versions are known to have come to `last`."""
        live = {}
        token = ""
        while True:
            page = self._versions(name, token)
            if page is None:
                return NameState(0, last)
            for found in page.adapters:
                if not found.HasField("delete_time"):
                    assert (found.name, found.digest != "") == (name, True), found
                    live[found.version] = _version(found)
            token = page.next_page_token
            if not token:
                break
        current = self.get(name)
        assert (0 if current is None else current.version) == page.current_version
        if current is not None:
            assert live[current.version] == _version(current), f"{name}: {current}"
        return NameState(page.current_version, max([last, *live]), live)

    def _versions(self, name: str, token: str) -> pb.ListVersionsResponse | None:
        """None: the store knows no such name."""
        request = pb.ListVersionsRequest(name=name, page_size=5, page_token=token)
        try:
            with translated():
                return self._stub.ListVersions(request, timeout=CALL_S)
        except Refused as refused:
            if refused.code != "NOT_FOUND":
                raise
        assert self.get(name) is None
        return None

    def names(self) -> list[str]:
        """Every name of the catalog, page by page."""
        found: list[str] = []
        token = ""
        while True:
            with translated():
                request = pb.ListAdaptersRequest(page_size=7, page_token=token)
                page = self._stub.ListAdapters(request, timeout=CALL_S)
            found += [adapter.name for adapter in page.adapters]
            token = page.next_page_token
            if not token:
                return found

    def register_layout(self) -> str:
        with translated():
            request = pb.RegisterLayoutRequest(layout=layout_message())
            return self._stub.RegisterLayout(request, timeout=CALL_S).layout_id

    def pull(self, digest: str, layout_id: str) -> tuple[pb.ImageHeader, bytes]:
        """The whole image; its hashes are checked as an inference service checks them."""
        request = pb.PullAdapterRequest(digest=digest, layout_id=layout_id)
        data = bytearray()
        hashes = []
        start = 0
        trailer = None
        with translated():
            stream = self._stub.PullAdapter(request, timeout=CALL_S)
            header = next(stream).header
            for response in stream:
                assert trailer is None
                match response.WhichOneof("part"):
                    case "chunk":
                        assert response.chunk.offset == len(data)
                        data += response.chunk.data
                    case "layer_end":
                        hashes.append(hashlib.sha256(data[start:]).digest())
                        assert hashes[-1] == response.layer_end.sha256
                        start = len(data)
                    case _:
                        trailer = response.trailer.sha256
        assert trailer == hashlib.sha256(b"".join(hashes)).digest()
        assert len(data) == header.total_bytes
        return header, bytes(data)

    def events(self) -> tuple[list[Event], int]:
        """The whole history, and the revision that it ends with."""
        newest = self.status().revision
        found: list[Event] = []
        with translated():
            stream = self._stub.WatchAdapters(pb.WatchAdaptersRequest(), timeout=CALL_S)
            for response in stream:
                if response.event.kind != pb.EVENT_KIND_BOOKMARK:
                    found.append(to_event(response.event))
                if response.event.revision >= newest:
                    stream.cancel()
                    return found, newest
        raise AssertionError("the watch ended by itself")

    def status(self) -> pb.GetStoreStatusResponse:
        with translated():
            return self._stub.GetStoreStatus(pb.GetStoreStatusRequest(), timeout=CALL_S)


def _version(adapter: pb.Adapter) -> Version:
    return Version(adapter.digest, tuple(sorted(adapter.labels.items())))


def _chunks(content: Content) -> Iterator[pb.FileChunk]:
    for file_name, data in content.files.items():
        for offset in range(0, len(data), CHUNK_BYTES):
            part = data[offset : offset + CHUNK_BYTES]
            yield pb.FileChunk(file_name=file_name, offset=offset, data=part)
