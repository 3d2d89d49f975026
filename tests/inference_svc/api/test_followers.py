"""Requests that follow a name: when they move, and when they stay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from inference_svc.api import followers
from inference_svc.api.followers import Followers
from inference_svc.api.generate_call import GenerateCall
from inference_svc.core import ANYONE, Request, SamplingParams, VersionPolicy
from inference_svc.errors import AdapterNotFound, StoreUnavailable
from inference_svc.store.adapter_resolver import Binding
from servicekit.errors import ServiceError
from tests.support.wait import until_async

CALL = GenerateCall("r", "live", ("a",), SamplingParams(), version_policy=VersionPolicy.FOLLOW_KEEP)
REQUEST = Request("r", (1,), SamplingParams(), "one", tenant="t")


def version(number: int, **fields: Any) -> Binding:
    return Binding(f"t/live@{number}", "t", f"digest-{number}", 8, **fields)


@dataclass
class Store:
    """Answers one after the other; the last one again and again."""

    answers: list[Binding | ServiceError]
    asked: list[tuple[str, int]] = field(default_factory=list)
    on_moved: Callable[[str, int], None] = lambda name, revision: None
    moves: list[tuple[str, str]] = field(default_factory=list)

    async def resolve(self, principal: Any, ref: str, min_revision: int = 0) -> Binding:
        self.asked.append((ref, min_revision))
        await asyncio.sleep(0)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ServiceError):
            raise answer
        return answer

    def move(self, tenant: str, request_id: str, digest: str, adapter: str) -> None:
        assert (tenant, request_id) == ("t", "r")
        self.moves.append((digest, adapter))


def follow(store: Store, body: Callable[[], Awaitable[None]], call: GenerateCall = CALL) -> None:
    async def run() -> None:
        made: Any = Followers(store, store)  # type: ignore[arg-type]
        with made.follow(ANYONE, call, version(1), REQUEST):
            await body()
        assert not made._followers

    asyncio.run(run())


def test_a_request_moves_with_its_name() -> None:
    store = Store([version(1), version(2), version(3)])

    async def body() -> None:
        await until_async(lambda: len(store.asked) == 1)
        for revision in (7, 9):
            store.on_moved("default/live", revision)
            await until_async(lambda: store.asked[-1][1] == revision)  # noqa: B023
            await asyncio.sleep(0.01)

    follow(store, body)
    assert store.moves == [("digest-2", "t/live@2"), ("digest-3", "t/live@3")]


def test_many_moves_at_once_are_one_lookup() -> None:
    store = Store([version(9)])

    async def body() -> None:
        for revision in range(1, 100):
            store.on_moved("default/live", revision)
        store.on_moved("default/other", 100)
        await until_async(lambda: bool(store.moves))
        await asyncio.sleep(0.01)

    follow(store, body)
    assert store.moves == [("digest-9", "t/live@9")]
    assert store.asked == [("default/live", 99)]


def test_a_store_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event follows once it does: the name has moved before."""
    monkeypatch.setattr(followers, "RETRY_S", 0.001)
    store = Store([StoreUnavailable("it is down"), StoreUnavailable("still"), version(2)])

    async def body() -> None:
        await until_async(lambda: bool(store.moves))

    follow(store, body)
    assert store.moves == [("digest-2", "t/live@2")]


@pytest.mark.parametrize(
    "answer",
    [
        AdapterNotFound("deleted"),
        version(2, added_tokens=1),
        version(2, tokenizer_digest="other"),
        version(2, invocation_tokens=(1, 2)),
        version(1),
    ],
    ids=["deleted", "tokens", "tokenizer", "invocation", "the same"],
)
def test_what_it_cannot_move_to_is_left_alone(answer: Any) -> None:
    store = Store([answer])

    async def body() -> None:
        await until_async(lambda: bool(store.asked))
        await asyncio.sleep(0.01)

    follow(store, body)
    assert store.moves == []


def test_a_pinned_request_asks_nothing() -> None:
    store = Store([version(2)])

    async def body() -> None:
        store.on_moved("default/live", 5)
        await asyncio.sleep(0.01)

    follow(store, body, replace(CALL, version_policy=VersionPolicy.PIN))
    assert store.asked == store.moves == []
