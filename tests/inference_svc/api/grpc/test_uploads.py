"""Uploads arrive in pieces that are not all small, and not too slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from inference_svc.api.access import Access
from inference_svc.api.grpc import servicer
from inference_svc.api.grpc.servicer import InferenceServicer, call_rules
from inference_svc.api.grpc.uploads import (
    MAX_CHUNK_BYTES,
    MAX_EXTRA_CHUNKS,
    MIN_CHUNK_BYTES,
    from_upload,
)
from inference_svc.api.pictures import ImageUploads, PictureReader
from inference_svc.core import ANYONE
from inference_svc.pictures.placeholders import PictureRule
from inference_svc.pictures.processor import read_processor
from inference_svc.pictures.sizes import TileForm
from inference_svc.pictures.uploads import Uploads
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc
from servicekit.auth.authenticator import Authenticator
from servicekit.auth.policy import Policy, PolicyFile
from servicekit.errors import InvalidArgument
from servicekit.pace import Pace
from servicekit.shares import Shares
from tests.servicekit.rpc.served import call_places, serving
from tests.support.pictures.models import PATCH, TILE, save_processor


def pieces(*sizes: int) -> int:
    """Returns how many pieces of an upload arrive."""

    async def requests() -> AsyncIterator[pb.UploadImageRequest]:
        yield pb.UploadImageRequest(upload=pb.ImageUpload(size_bytes=sum(sizes)))
        for size in sizes:
            yield pb.UploadImageRequest(chunk=bytes(size))

    async def main() -> int:
        _, _, found = await from_upload(requests())
        return len([each async for each in found])

    return asyncio.run(main())


def test_an_upload_of_many_small_chunks_is_refused() -> None:
    few = [1] * MAX_EXTRA_CHUNKS
    assert pieces(*few) == MAX_EXTRA_CHUNKS
    assert pieces(*[MIN_CHUNK_BYTES] * 4 * MAX_EXTRA_CHUNKS, *few) == 5 * MAX_EXTRA_CHUNKS
    assert pieces(MAX_CHUNK_BYTES, *few, 1)
    with pytest.raises(InvalidArgument, match="too many small chunks: send 512 bytes") as refused:
        pieces(*few, 1)
    assert refused.value.subject == "chunk"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[PictureReader]:
    save_processor("SmolVLM", tmp_path)
    form = TileForm(TILE, PATCH, merge=2)
    rule = PictureRule(read_processor(tmp_path, form), 80, form, 2)
    made = PictureReader(rule, "model", Shares("pixels", 1 << 20, 0.5), Uploads("uploads", 1 << 20))
    yield made
    made.close()


@pytest.mark.processes
@pytest.mark.parametrize("pace", [Pace(1, 0.5), Pace(1 << 40, 0.5)], ids=["silent", "slow"])
def test_a_slow_upload_ends(
    reader: PictureReader, pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its room is free then. The callers' own time does not count."""
    monkeypatch.setattr(servicer, "PACE", pace)
    no_audit: Any = None
    policies = PolicyFile(None, lambda data: Policy(), Policy(anyone=ANYONE))
    service: Any = SimpleNamespace(
        access=Access(Authenticator(policies), no_audit),
        uploads=ImageUploads(reader, reader.work),
    )
    has_ended = asyncio.Event()
    used: list[int] = []

    async def slow() -> AsyncIterator[pb.UploadImageRequest]:
        yield pb.UploadImageRequest(upload=pb.ImageUpload(size_bytes=1000))
        while not has_ended.is_set():
            used.append(reader.uploads.use().used)
            if pace.bytes_per_second > 1:
                yield pb.UploadImageRequest(chunk=b"a")
            await asyncio.sleep(0.01)

    async def main() -> grpc.aio.AioRpcError:
        def add(server: grpc.aio.Server) -> None:
            debug: Any = None
            pb_grpc.add_InferenceServiceServicer_to_server(
                InferenceServicer(service, debug), server
            )

        rules = call_rules(lambda: "", 100)
        async with (
            serving(rules, call_places(), {}, add=add) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await pb_grpc.InferenceServiceStub(channel).UploadImage(slow(), timeout=60)
            has_ended.set()
        return refused.value

    error = asyncio.run(main())
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the upload has sent nothing for 0.5 seconds" in str(error.details())
    assert f"less than {pace.bytes_per_second} bytes per second" in str(error.details())
    assert max(used) > 1000
    assert reader.uploads.use().used == 0
