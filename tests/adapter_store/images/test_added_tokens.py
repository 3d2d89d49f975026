"""Adapters that add tokens: servers take the number from the first answer that names them."""

from __future__ import annotations

import asyncio

import torch

from adapter_store.core import ANYONE
from adapter_store.images.builder import ImageBuilder
from adapter_store.images.precompile import Precompiler
from servicekit.refs import AdapterName, AdapterRef
from tests.support.store.adapters import HIDDEN, VOCAB, random_tensors
from tests.support.store.images import register

Q = "model.layers.0.self_attn.q_proj"
NAME = AdapterRef(AdapterName("default", "a"))


def test_they_are_counted_before_an_image_is_compiled(
    start, make_adapter, make_layout, monkeypatch
):
    """By one plan for all who ask; not again once it is known, nor of adapters without rows."""
    planned: list[str] = []
    check = ImageBuilder.check
    monkeypatch.setattr(Precompiler, "_queue", lambda *_, **__: None)
    monkeypatch.setattr(
        ImageBuilder, "check", lambda self, key: (planned.append(key.digest), check(self, key))
    )
    head = torch.ones(VOCAB + 2, HIDDEN)
    tensors = {**random_tensors({Q: 4}), "base_model.model.lm_head.weight": head}
    adding = make_adapter(tensors=tensors, modules_to_save=["lm_head"], target_modules=["q_proj"])

    async def main() -> None:
        async with start() as store:
            await store.use_cases.layouts.register(make_layout(), [1, 2])
            await register(store, adding)
            await register(store, make_adapter(folder="plain"), "plain")
            get = store.use_cases.reading.get
            found = await asyncio.gather(*[get(ANYONE, NAME) for _ in range(3)])
            assert [record.added_tokens for record, _ in found] == [2] * 3
            record, _ = await get(ANYONE, NAME)
            await get(ANYONE, AdapterRef(AdapterName("default", "plain")))
            assert planned == [record.digest]

    asyncio.run(main())


def test_who_cannot_be_planned_is_named_all_the_same(start, make_adapter, make_layout, monkeypatch):
    """The verdict says why."""
    monkeypatch.setattr(Precompiler, "_queue", lambda *_, **__: None)
    tensors = {**random_tensors({Q: 4}), "base_model.model.lm_head.weight": torch.ones(3, 5)}
    wrong = make_adapter(tensors=tensors, modules_to_save=["lm_head"], target_modules=["q_proj"])

    async def main() -> None:
        async with start() as store:
            await store.use_cases.layouts.register(make_layout(), [1, 2])
            await register(store, wrong)
            record, _ = await store.use_cases.reading.get(ANYONE, NAME)
            assert (record.added_tokens, record.unplanned_layout) == (0, "")
            assert "lm_head" in record.verdicts[0].reason

    asyncio.run(main())
