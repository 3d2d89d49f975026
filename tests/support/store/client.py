"""A client of the store, which shows the contract as a caller sees it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from contract.images.header import trailer_sha256
from contract.images.layouts import Layout
from contract.protobuf import read_header
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc
from tests.support.store.messages import layout_message


@dataclass
class Pulled:
    """What a pull gave, its hashes checked as a client checks them."""

    header: pb.ImageHeader
    data: bytes = b""
    part_ends: list[int] = field(default_factory=list)
    is_whole: bool = False


class Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds a token to every call."""

    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details._replace(metadata=self._metadata), request)

    intercept_unary_stream = intercept_unary_unary
    intercept_stream_unary = intercept_unary_unary
    intercept_stream_stream = intercept_unary_unary


class Client:
    """The contract as a caller sees it. `credentials`: of the channel; None: no TLS."""

    def __init__(
        self, address: str, token: str = "", credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        self.address = address
        if credentials is None:
            self.channel = grpc.insecure_channel(address)
        else:
            self.channel = grpc.secure_channel(address, credentials)
        if token:
            self.channel = grpc.intercept_channel(self.channel, Bearer(token))
        self.stub = pb_grpc.AdapterStoreServiceStub(self.channel)

    def register(self, name: str, folder, **fields) -> pb.RegisterAdapterResponse:
        return self.stub.RegisterAdapter(
            pb.RegisterAdapterRequest(name=name, source_uri=f"file://{folder}", **fields)
        )

    def upload(self, name: str, files: dict[str, bytes], chunk_bytes: int = 1000, **fields):
        def requests() -> Iterator[pb.UploadAdapterRequest]:
            yield pb.UploadAdapterRequest(meta=pb.UploadMeta(name=name, **fields))
            for file_name, data in files.items():
                for offset in range(0, len(data), chunk_bytes):
                    part = data[offset : offset + chunk_bytes]
                    chunk = pb.FileChunk(file_name=file_name, offset=offset, data=part)
                    yield pb.UploadAdapterRequest(chunk=chunk)

        return self.stub.UploadAdapter(requests())

    def register_layout(self, layout: Layout) -> str:
        return self.announce(layout).layout_id

    def announce(self, layout: Layout, **fields) -> pb.RegisterLayoutResponse:
        """Registers a layout with an announcement of these fields."""
        request = pb.RegisterLayoutRequest(
            layout=layout_message(layout), announcement=pb.Announcement(**fields)
        )
        return self.stub.RegisterLayout(request)

    def get(self, ref: str) -> pb.Adapter:
        return self.stub.GetAdapter(pb.GetAdapterRequest(ref=ref)).adapter

    def pull(self, digest: str, layout_id: str, offset: int = 0, image_id: str = "") -> Pulled:
        """Pulls to the end; the part that the stream starts within is not hashed."""
        stream = self.stub.PullAdapter(
            pb.PullAdapterRequest(
                digest=digest, layout_id=layout_id, offset=offset, image_id=image_id
            )
        )
        pulled = Pulled(next(stream).header)
        position = part_start = pulled.header.offset
        hashes = []
        for response in stream:
            kind = response.WhichOneof("part")
            if kind == "chunk":
                assert response.chunk.offset == position
                pulled.data += response.chunk.data
                position += len(response.chunk.data)
            elif kind == "layer_end":
                end = response.layer_end
                part = pulled.data[part_start - pulled.header.offset :]
                assert end.end_offset == position
                if pulled.part_ends or pulled.header.offset == 0:
                    assert hashlib.sha256(part).digest() == end.sha256
                hashes.append(end.sha256)
                pulled.part_ends.append(position)
                part_start = position
            else:
                if pulled.header.offset == 0:
                    whole = trailer_sha256(hashes, read_header(pulled.header).segments)
                    assert response.trailer.sha256 == whole
                assert position == pulled.header.total_bytes
                pulled.is_whole = True
        return pulled

    def close(self) -> None:
        self.channel.close()


def details(error: grpc.RpcError) -> dict[str, object]:
    found = {}
    for packed in rpc_status.from_call(error).details:
        kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])
        detail = kind()
        assert packed.Unpack(detail)
        found[kind.DESCRIPTOR.name] = detail
    return found


def refusal_of(call: Callable[[], object]) -> str:
    """Returns "CODE: details" of a call that is refused; "" if it is answered."""
    try:
        call()
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    return ""
