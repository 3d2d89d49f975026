"""A transfer may be slow for so long, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from servicekit.errors import DeadlineExceeded
from servicekit.pace import MinimumRate, Pace, at_pace


def test_a_transfer_lives_by_its_bytes_alone() -> None:
    rate = MinimumRate(Pace(bytes_per_second=1000, stall_seconds=10))
    for _ in range(100):
        rate.waited(9)
        assert not rate.is_too_slow
        rate.received(9000)
    assert rate.remaining_s == 10
    for _ in range(9):
        rate.waited(1)
        rate.received(0)  # an empty message is no progress
    assert rate.remaining_s == pytest.approx(1)
    rate.waited(1)
    assert rate.is_too_slow
    rate.received(1_000_000)
    assert rate.remaining_s == 10  # no more than that, however much came at once


async def messages(*delays_s: float) -> AsyncIterator[bytes]:
    for delay_s in delays_s:
        await asyncio.sleep(delay_s)
        yield b"abc"


def received(pace: Pace, *delays_s: float, reader_s: float = 0.0) -> int:
    """Returns how many messages arrive at a reader that takes its time."""

    async def main() -> int:
        count = 0
        async for _ in at_pace(messages(*delays_s), pace, len, too_slow):
            await asyncio.sleep(reader_s)
            count += 1
        return count

    return asyncio.run(main())


def too_slow(pace: Pace) -> DeadlineExceeded:
    return DeadlineExceeded(f"less than {pace.bytes_per_second}", subject="request")


def test_a_slow_peer_is_left() -> None:
    assert received(Pace(1, 3600.0), 0, 0, 0.01) == 3
    for pace in (Pace(1 << 40, 0.02), Pace(1, 0.02)):  # too few bytes, and silence
        with pytest.raises(DeadlineExceeded, match=f"less than {pace.bytes_per_second}"):
            received(pace, 0, 0.005, 0.005, 0.005, 0.005, 0.005, 3600.0)


def test_a_slow_reader_is_not_the_peers_fault() -> None:
    assert received(Pace(1, 3.0), 0, 0, reader_s=0.02) == 2
    assert received(Pace(1 << 40, 0.5), 0, 0, 0, reader_s=0.3) == 3
