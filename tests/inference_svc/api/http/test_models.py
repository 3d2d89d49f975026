"""/v1/models while the store is unreachable, and /info; both are tested in `system`, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import openai
import pytest

from inference_svc.api.http.models import MAX_PAGE_SIZE
from inference_svc.api.http.serving import connections
from inference_svc.results.classifier_rule import ClassifierRule
from inference_svc.results.embedding_rule import EmbeddingRule, Pooling
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from tests.support.inference.connections import connected
from tests.support.inference.front import Front
from tests.support.inference.serving import MAX_MODEL_LEN, NameStore, digest_of
from tests.support.wait import until_async


def test_resident_adapters_are_listed_without_the_store(
    serve_http, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering, watching = NameStore.GetAdapter, NameStore.WatchAdapters
    is_down, is_watched = False, False

    async def get(store: Any, request: Any, context: Any) -> Any:
        return await (unavailable if is_down else answering)(store, request, context)

    async def unavailable(store: Any, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "no store")

    async def watch(store: Any, request: Any, context: Any) -> Any:
        nonlocal is_watched
        is_watched = True
        async for event in watching(store, request, context):
            yield event

    monkeypatch.setattr(NameStore, "GetAdapter", get)
    monkeypatch.setattr(NameStore, "WatchAdapters", watch)
    monkeypatch.setattr(NameStore, "ListAdapters", unavailable)

    async def body(front: Front) -> None:
        nonlocal is_down
        await until_async(lambda: is_watched)  # the first connection clears the cache
        for name in ("upper", "lower", "fixed@1"):
            loaded = await front.post("/v1/load_lora_adapter", {"lora_name": name})
            assert loaded.status_code == 200
        await front.complete(model="other")  # cached, and not resident
        await front.complete(model="upper@1")
        is_down = True
        answer = (await front.raw.get("/v1/models")).json()
        assert (answer["has_more"], answer["incomplete"]) == (False, True)
        base, *adapters = answer["data"]
        assert base["id"] == "base"
        assert [(card["id"], card["root"]) for card in adapters] == [
            ("fixed@1", digest_of("fixed")),
            ("lower", digest_of("lower")),
            ("upper", digest_of("upper")),
        ]
        assert len((await front.raw.get("/v1/models?limit=1")).json()["data"]) == 2
        with pytest.raises(openai.InternalServerError) as caught:
            await front.client.models.list(extra_query={"page_token": "x"})
        assert caught.value.code == "store_unavailable"

    serve_http(body, store=True)


def test_pages_are_bounded_and_must_be_read(serve_http, monkeypatch: pytest.MonkeyPatch) -> None:
    async def list_all(store: Any, request: Any, context: Any) -> Any:
        adapters = [
            store_pb.Adapter(
                name=f"default/{index:0100}",
                version=1,
                digest=digest_of(str(index)),
                rank=8,
                base_model="base",
            )
            for index in range(request.page_size)
        ]
        return store_pb.ListAdaptersResponse(adapters=adapters)

    monkeypatch.setattr(NameStore, "ListAdapters", list_all)
    monkeypatch.setattr(connections, "SEND_BUFFER_BYTES", 4096)

    async def body(front: Front) -> None:
        assert (await front.raw.get("/v1/models?limit=1001")).status_code == 400
        answer = await front.raw.get("/v1/models")
        assert len(answer.json()["data"]) == 1 + MAX_PAGE_SIZE
        monkeypatch.setattr(connections, "WRITE_SECONDS", 0.2)
        async with connected(front, receive_bytes=4096) as client:
            await client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await client.read(1), "it is answered"
            await until_async(lambda: len(front.connections.all_open) == 1)  # the other client's

    serve_http(body, store=True)


def test_a_name_of_base_and_adapter_tells_the_name_to_write(serve_http) -> None:
    """gpustack#5449, sglang#11570, kubeai#304: `model: "base:adapter"`."""

    async def body(front: Front) -> None:
        for name in ("base:upper", "base:default/upper@1", "base:gone"):
            adapter = name.partition(":")[2]
            request = {"model": name, "prompt": "x", "max_tokens": 1}
            answers = [
                await front.post("/v1/completions", request),
                await front.raw.get(f"/v1/models/{name}"),
            ]
            for answer in answers:
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (404, "model_not_found")
                assert error["param"] == "model"
                assert f"{name!r} is no model: write {adapter!r}" in error["message"]
        assert (await front.complete(model="upper")).model == "upper@1"
        answer = await front.post("/v1/completions", {"model": "other:upper", "prompt": "x"})
        assert answer.status_code == 400  # no model of this server, and no name of an adapter

    serve_http(body, store=True)


EMBEDDING = EmbeddingRule(size=8, max_tokens=5)
LABELS = ("sad", "happy")
BY_LABEL = {"id2label": {"0": "sad", "1": "happy"}, "label2id": {"sad": 0, "happy": 1}}
ONE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


@pytest.mark.parametrize(
    ("facts", "model_type", "most"),
    [
        ({"embedding": replace(EMBEDDING, pooling=Pooling.FIRST)}, "cls", 5),
        ({"embedding": replace(EMBEDDING, pooling=Pooling.MEAN)}, "mean", 5),
        ({"embedding": EMBEDDING}, "last_token", 5),
        ({"embedding": replace(EMBEDDING, max_tokens=0)}, "last_token", MAX_MODEL_LEN),
        ({"embedding": replace(EMBEDDING, refusal="no")}, None, MAX_MODEL_LEN),
        (
            {"embedding": EMBEDDING, "classifier": ClassifierRule(LABELS)},
            {"classifier": BY_LABEL},
            MAX_MODEL_LEN,
        ),
        ({"classifier": ClassifierRule(("LABEL_0",))}, {"reranker": ONE}, MAX_MODEL_LEN),
    ],
    ids=["first", "mean", "last", "context", "refused", "labels", "one-label"],
)
def test_info_has_the_words_of_text_embeddings_inference(
    serve_http, facts: dict[str, Any], model_type: Any, most: int
) -> None:
    """Inputs to classify may have as many tokens as the context has."""

    async def body(front: Front) -> None:
        found = (await front.raw.get("/info")).json()
        wanted = model_type
        if isinstance(model_type, str):
            wanted = {"embedding": {"pooling": model_type}}
        assert (found["model_type"], found["max_input_length"]) == (wanted, most)

    serve_http(body, facts=facts)
