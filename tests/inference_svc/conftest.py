"""Tiny tokenizers of the kinds that models bring, and an engine without a model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from inference_svc.auto_settings import Machine, ModelFacts, resolve
from inference_svc.config import InferenceSettings
from inference_svc.server import InferenceServer
from inference_svc.text.tokenizer import Tokenizer
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as store_pb_grpc
from tests.support import forks
from tests.support.inference.fake_engine import FakeEngine, facts_of
from tests.support.inference.serving import MAX_MODEL_LEN, NameStore, Running
from tests.support.models.tokenizers import CHAT_TEMPLATE, KINDS, save_tokenizer


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """One of each kind; "byte_level" and "chars" have a chat template."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        kind: Tokenizer(
            save_tokenizer(
                build(), root / kind, CHAT_TEMPLATE if kind in ("byte_level", "chars") else ""
            )
        )
        for kind, build in KINDS.items()
    }


@pytest.fixture
def forked_ranks() -> Iterator[None]:
    """Engines, in processes of their own or in this one, and other ranks are forks."""
    with forks.forked_engines(), forks.forked_ranks():
        yield


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.stop()


@pytest.fixture
def serve(engine: Any, tokenizers: Any, tmp_path: Path) -> Callable[..., Any]:
    """Runs a coroutine function with a server; `store` gives it a fake store, `http` an HTTP
    address, `text` another tokenizer than one of the `kind`, `facts` other facts about the
    model, `settings` any other settings."""
    (tmp_path / "config.json").write_text("{}")

    def run(
        body: Callable[[Running], Awaitable[Any]],
        *,
        kind: str = "chars",
        grace_seconds: float = 5.0,
        store: bool = False,
        http: bool = False,
        text: Any = None,
        facts: Mapping[str, Any] | None = None,
        max_model_len: int = MAX_MODEL_LEN,
        **settings: Any,
    ) -> Any:
        async def main() -> Any:
            store_server = grpc.aio.server()
            store_pb_grpc.add_AdapterStoreServiceServicer_to_server(NameStore(), store_server)
            port = store_server.add_insecure_port("127.0.0.1:0")
            await store_server.start()
            config = resolve(
                InferenceSettings(
                    model=tmp_path,
                    base_model="base",
                    store=f"127.0.0.1:{port}" if store else "",
                    listen="127.0.0.1:0",
                    metrics_listen="127.0.0.1:0",
                    http="127.0.0.1:0" if http else "",
                    ready_file=tmp_path / "ready.json",
                    max_model_len=max_model_len,
                    grace_seconds=grace_seconds,
                    **settings,
                ),
                Machine(has_cuda=False),
                ModelFacts("float32", max_model_len, 1024, 16),
            )
            server = InferenceServer(config)
            model = text or tokenizers[kind]
            known = dataclasses.replace(facts_of(config, model), **(facts or {}))
            try:
                await server.start(engine, model, known)
                async with (
                    asyncio.timeout(60),
                    grpc.aio.insecure_channel(server.address) as channel,
                ):
                    return await body(Running(server, engine, channel))
            finally:
                await server.close()
                await store_server.stop(0)

        return asyncio.run(main())

    return run
