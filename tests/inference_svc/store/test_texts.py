"""Adapters' texts are made once, and kept within bounds; failures are forgotten."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inference_svc.errors import AdapterUnusable, StoreUnavailable
from inference_svc.store import texts as texts_module
from inference_svc.store.directory import Binding
from inference_svc.store.texts import AdapterTexts
from inference_svc.text.adapter_tokenizer import BaseTokenizer
from inference_svc.text.tokenizer import Tokenizer
from tests.support import tokenizer_files as files


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
        self.texts = AdapterTexts(base, self.store)

    async def get(self, tokenizer: str = "", template: str = "", tenant: str = "default") -> object:
        binding = Binding(f"{tenant}/a@1", tenant, "sha256:0", 4, 0.0, 0, tokenizer, template)
        return await self.texts.get(binding, self.threads)

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
