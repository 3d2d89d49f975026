"""Adapters' texts are made once, and kept within bounds; failures are forgotten."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from contract.tokenizer_extract import AddedToken
from inference_svc.errors import AdapterUnusable, StoreUnavailable
from inference_svc.store import texts as texts_module
from inference_svc.store.adapter_resolver import Binding
from inference_svc.store.texts import AdapterTexts
from inference_svc.text.adapter_tokenizer import MAX_NEW_BYTES, BaseTokenizer
from inference_svc.text.tokenizer import Tokenizer
from servicekit.errors import ShareExceeded
from servicekit.work_budget import MAX_DEBT_SECONDS, WorkBudget
from tests.support.machine.peak_memory import heap_mib
from tests.support.models import tokenizer_files as files


class Store:
    """Texts by digest; a lookup waits until `gate` is set, and fails while it `is_down`."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.fetched: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_down = False

    async def get_text(self, digest: str) -> bytes:
        self.fetched[digest] += 1
        await self.gate.wait()
        if self.is_down:
            raise StoreUnavailable("down")
        return self.contents.get(digest, f"{{{{ messages }}}} {digest}".encode())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseTokenizer:
    folder: Path = files.save(files.byte_level(), tmp_path_factory.mktemp("base"), "template")
    return BaseTokenizer(Tokenizer(folder), folder)


class House:
    def __init__(self, base: BaseTokenizer, threads: ThreadPoolExecutor) -> None:
        self.base, self.threads, self.store = base, threads, Store()
        self.work = WorkBudget("texts", share=0.5, wait_s=0.0)
        self.texts = AdapterTexts(base, self.store, self.work)

    async def get(
        self, tokenizer: str = "", template: str = "", tenant: str = "default", account: str = ""
    ) -> object:
        binding = Binding(f"{tenant}/a@1", tenant, "sha256:0", 4, 0.0, 0, tokenizer, template)
        return await self.texts.get(binding, account or tenant, self.threads)

    def add_tokenizer(self, *tokens: str) -> str:
        """Returns the digest of a tokenizer with further tokens."""
        assert self.base.extract is not None
        ids = itertools.count(self.base.text.backend.get_vocab_size())
        new = [AddedToken(next(ids), token) for token in tokens]
        known = self.base.extract.added_tokens
        extract = replace(self.base.extract, added_tokens=(*known, *new))
        self.store.contents[extract.digest] = extract.to_bytes()
        return extract.digest

    def sample(self, key: str, *labels: str) -> float:
        (found,) = [
            each for each in self.texts.samples() if (each.key, each.labels) == (key, labels)
        ]
        return found.value


Scenario = Callable[[House, pytest.MonkeyPatch], Awaitable[None]]


def on_a_loop(scenario: Scenario) -> Callable[[BaseTokenizer, pytest.MonkeyPatch], None]:
    """Returns the test that runs a scenario on an event loop of its own."""

    async def run(base: BaseTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        with ThreadPoolExecutor(1) as threads:
            house = House(base, threads)
            try:
                await scenario(house, monkeypatch)
            finally:
                house.texts.close()

    def test(base: BaseTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        asyncio.run(run(base, monkeypatch))

    return test


@on_a_loop
async def test_a_copy_of_the_models_is_not_fetched(house: House, patch: pytest.MonkeyPatch) -> None:
    assert await house.get() is house.base.text
    assert await house.get(house.base.digest) is house.base.text
    assert not house.store.fetched


@on_a_loop
async def test_one_fetch_for_all_that_wait(house: House, patch: pytest.MonkeyPatch) -> None:
    house.store.gate.clear()
    waiting = [asyncio.create_task(house.get(template="t")) for _ in range(20)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    house.store.gate.set()
    first, *others = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert len({id(each) for each in others}) == 1
    assert house.store.fetched == {"t": 1}
    assert house.sample("text_loads", "made") == 1


@on_a_loop
async def test_that_the_store_does_not_answer_is_forgotten(
    house: House, patch: pytest.MonkeyPatch
) -> None:
    house.store.is_down = True
    with pytest.raises(StoreUnavailable):
        await house.get(template="t")
    house.store.is_down = False
    assert await house.get(template="t") is not house.base.text
    house.store.is_down = True
    assert await house.get(template="t") is not house.base.text  # from memory
    assert (house.sample("text_loads", "failed"), house.sample("text_loads", "made")) == (1, 1)


@on_a_loop
async def test_what_is_refused_is_remembered(house: House, patch: pytest.MonkeyPatch) -> None:
    house.store.contents["x"] = b'{"format": 99}'
    for _ in range(3):
        with pytest.raises(
            AdapterUnusable, match=r"adapter default/a@1: .* register the adapter again"
        ):
            await house.get("x")
    assert house.store.fetched == {"x": 1}
    assert house.sample("text_loads", "refused") == 1


@on_a_loop
async def test_what_is_kept_is_bounded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_module, "MAX_ENTRIES", 3)
    for name in "abcabd":
        await house.get(template=name)
    assert house.sample("text_cache_entries") == 3
    assert house.store.fetched == Counter("abcd")
    await house.get(template="c")
    assert house.store.fetched["c"] == 2, "the least recently used goes first"
    monkeypatch.setattr(texts_module, "MAX_BYTES", 2 * texts_module.ENTRY_BYTES + 1000)
    house.store.contents["large"] = b"x" * 1000
    await house.get(template="large")
    assert house.sample("text_cache_entries") <= 1
    assert house.sample("text_cache_used_bytes") <= 2 * texts_module.ENTRY_BYTES + 1000


@on_a_loop
async def test_a_tenant_with_many_drops_its_own(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts_module, "MAX_ENTRIES", 3)
    await house.get(template="x", tenant="few")
    for name in "abcdef":
        await house.get(template=name, tenant="many")
    await house.get(template="x", tenant="few")
    assert house.store.fetched == Counter("xabcdef")
    assert house.sample("text_cache_entries") == 3


@pytest.mark.slow
@on_a_loop
async def test_tokens_count_as_they_are(house: House, patch: pytest.MonkeyPatch) -> None:
    """Single characters take most for their bytes: 61 for each."""
    characters = [chr(0x20000 + index) for index in range(MAX_NEW_BYTES // 4 - 100)]
    warm = house.add_tokenizer(*reversed(characters))
    await house.get(warm)
    before_mib, counted = heap_mib(), house.sample("text_cache_used_bytes")
    num_turns = 3
    for turn in range(num_turns):
        shift = 997 * turn
        digest = house.add_tokenizer(*characters[shift:], *characters[:shift])
        await house.get(digest, account=f"caller-{turn}")
    grown_mib = heap_mib() - before_mib
    assert house.sample("text_loads", "made") == 1 + num_turns
    counted = house.sample("text_cache_used_bytes") - counted
    assert num_turns < grown_mib <= counted / 2**20


@on_a_loop
async def test_tokens_that_are_too_long_together(house: House, patch: pytest.MonkeyPatch) -> None:
    longest = [f"{index:03}" + "x" * 509 for index in range(MAX_NEW_BYTES // 512 + 1)]
    digest = house.add_tokenizer(*longest)
    match = r"193 tokens .* 98816 bytes of text, more than 98304"
    with pytest.raises(AdapterUnusable, match=match) as caught:
        await house.get(digest)
    assert caught.value.subject == "tokenizer.json"


@on_a_loop
async def test_who_makes_many_waits(house: House, patch: pytest.MonkeyPatch) -> None:
    """Neither for what is made, nor for others' debts."""
    charged: list[str] = []
    with patch.context() as watched:
        watched.setattr(house.work, "charge", lambda account, work_s: charged.append(account))
        made = await house.get(house.add_tokenizer("<one>"), account="busy")
    assert charged == ["busy"]
    house.work.charge("busy", MAX_DEBT_SECONDS)
    new = house.add_tokenizer("<two>")
    with pytest.raises(ShareExceeded, match="busy has taken more"):
        await house.get(new, account="busy")
    assert await house.get(house.add_tokenizer("<one>"), account="busy") is made
    assert await house.get(new, account="other")
    assert await house.get(new, account="busy")


@on_a_loop
async def test_one_at_a_time_for_an_account(house: House, patch: pytest.MonkeyPatch) -> None:
    """A burst finds no debt: nothing of it is made yet."""
    digests = [house.add_tokenizer(f"<{number}>") for number in range(20)]
    calls = (house.get(digest, account="busy") for digest in digests)
    found = await asyncio.gather(*calls, return_exceptions=True)
    refused = [each for each in found if isinstance(each, ShareExceeded)]
    assert len(refused) == 19
    assert house.sample("text_loads", "made") == 1


@on_a_loop
async def test_a_caller_that_leaves_ends_no_turn(house: House, patch: pytest.MonkeyPatch) -> None:
    """Its text is made, and charged, before the account's next one begins."""
    house.store.gate.clear()
    first = asyncio.create_task(house.get(house.add_tokenizer("<one>"), account="busy"))
    while not house.store.fetched:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    with pytest.raises(ShareExceeded):
        await house.get(house.add_tokenizer("<two>"), account="busy")
    assert house.store.fetched.total() == 1
    house.store.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert house.sample("text_loads", "made") == 1
