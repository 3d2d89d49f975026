"""An account causes only so much work per second, and who causes little notices nothing."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from servicekit import request_cost
from servicekit.errors import ShareExceeded
from servicekit.request_cost import LARGE_BYTES, WORK_BYTES_PER_SECOND, RequestCost
from servicekit.shares import Shares
from tests.support.wait import until_async

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_cost, "LINGER_SECONDS", 0.2)


def work(seconds: float) -> str:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass
    return "done"


def fail(seconds: float) -> None:
    work(seconds)
    raise ValueError("refused")


def test_a_large_request_keeps_its_place_for_a_while_after_its_release() -> None:
    async def main() -> None:
        shares = Shares("bytes", 8 * MIB, share=0.5)
        place = shares.reserve("a", 2 * MIB)
        with place, RequestCost(place):
            pass
        place.release()  # a second one changes nothing
        assert shares.used == 2 * MIB
        await until_async(lambda: shares.used == 0)
        shares.check_integrity()

    asyncio.run(main())


def test_a_small_request_does_not() -> None:
    shares = Shares("bytes", 8 * MIB, share=0.5)
    place = shares.reserve("a", LARGE_BYTES)
    with place, RequestCost(place) as cost:
        cost.run(work, 0.0)
    assert shares.used == 0


def test_nothing_is_kept_where_callers_are_not_told_apart() -> None:
    shares = Shares("bytes", 8 * MIB)
    place = shares.reserve("", 2 * MIB)
    with place, RequestCost(place):
        pass
    assert shares.used == 0


def test_work_in_whatever_thread_counts_as_bytes() -> None:
    async def main() -> None:
        shares = Shares("bytes", 1 << 40, share=0.5)
        place = shares.reserve("a", 1)
        with ThreadPoolExecutor(1) as pool, place, RequestCost(place) as cost:
            with pytest.raises(ValueError, match="refused"):
                cost.run(fail, 0.02)
            working = cost.measured(pool).submit(work, 0.03)
            assert await asyncio.wrap_future(working) == "done"
        assert shares.used >= 0.05 * WORK_BYTES_PER_SECOND
        await until_async(lambda: shares.used == 0)

    asyncio.run(main())


def test_work_takes_no_more_than_the_accounts_share() -> None:
    async def main() -> None:
        shares = Shares("bytes", 4 * LARGE_BYTES, share=0.5)
        place = shares.reserve("a", LARGE_BYTES + 1)
        with place, RequestCost(place) as cost:
            cost.run(work, 0.02)
        assert shares.used == LARGE_BYTES + 1
        with pytest.raises(ShareExceeded):
            shares.reserve("a", LARGE_BYTES)
        shares.reserve("b", LARGE_BYTES).release()

    asyncio.run(main())
