"""Uploads arrive at a pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from inference_svc.api.grpc.uploads import in_time
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.errors import DeadlineExceeded
from servicekit.shares import Pace


async def messages(*delays_s: float) -> AsyncIterator[pb.UploadImageRequest]:
    for delay_s in delays_s:
        await asyncio.sleep(delay_s)
        yield pb.UploadImageRequest(chunk=b"abc")


def received(pace: Pace, *delays_s: float) -> int:
    async def main() -> int:
        return len([each async for each in in_time(messages(*delays_s), pace)])

    return asyncio.run(main())


def test_a_slow_upload_ends() -> None:
    assert received(Pace(1, 3600.0), 0, 0, 0.01) == 3
    for pace in (Pace(1 << 40, 0.02), Pace(1, 0.02)):  # too few bytes, and silence
        with pytest.raises(DeadlineExceeded, match="has sent nothing"):
            received(pace, 0, 0.005, 0.005, 0.005, 0.005, 0.005, 3600.0)
