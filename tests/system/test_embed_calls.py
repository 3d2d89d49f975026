"""Embeddings over gRPC and HTTP, of real services: vectors, identities, usage, and refusals."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import httpx2
import numpy as np
import openai
import pytest

from inference_svc.results.embedding_rule import Pooling
from loadout import Client
from loadout.aio import AsyncClient
from loadout.errors import FailedPrecondition, InvalidArgument, LoadoutError, NotFound
from loadout.prometheus import scrape
from tests.support.models.parity import prompts
from tests.support.models.zoo import Zoo
from tests.support.wait import until
from tests.system.embedded import SIZE, expected, option
from tests.system.services import Services

ADAPTER = "r16"
QUEUE = 12
MEAN = option(Pooling.MEAN)
LAST = option(Pooling.LAST)


class Serving(NamedTuple):
    services: Services
    http: httpx2.Client
    digest: str

    @property
    def client(self) -> Client:
        return self.services.client

    @property
    def zoo(self) -> Zoo:
        return self.services.zoo

    def post(self, **fields: Any) -> Any:
        answer = self.http.post("/v1/embeddings", json={"model": ADAPTER, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, **fields: Any) -> tuple[str, str]:
        """Returns the field and the message of the error."""
        answer = self.http.post("/v1/embeddings", json={"model": ADAPTER, **fields})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        return error["param"], error["message"]


@pytest.fixture(scope="module")
def serving(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    flags = ("--http", "127.0.0.1:0", "--max-batch-tokens", "40", "--max-sequences", "8")
    flags += ("--max-queue", str(QUEUE))
    folder = tmp_path_factory.mktemp("embed")
    with ExitStack() as stack:
        services = stack.enter_context(Services(zoos("llama"), folder, inference_flags=flags))
        made = services.client.register(ADAPTER, str(services.zoo.adapter_dirs[ADAPTER]))
        url = f"http://{services.http_address}"
        http = stack.enter_context(httpx2.Client(base_url=url, timeout=60))
        yield Serving(services, http, made.adapter.digest)
        services.check_exit_codes()


@pytest.mark.parametrize("adapter", ["", ADAPTER])
def test_over_grpc(serving: Serving, adapter: str) -> None:
    """Inputs of many lengths; each vector names its version, and counts its own tokens."""
    asked = [each[:200] for each in prompts(9, seed=4)]
    found = serving.client.embed(asked, adapter=adapter)
    assert [each.index for each in found] == list(range(9))
    for each, ids in zip(found, asked, strict=True):
        np.testing.assert_allclose(
            np.asarray(each.vector), expected(serving.zoo, adapter, ids, LAST), atol=1e-4
        )
        assert each.usage is not None
        assert each.usage.prompt_tokens == len(ids)
        assert each.usage.completion_tokens == 0
        assert each.timings is not None
        digest = None if each.adapter is None else each.adapter.digest
        assert digest == (serving.digest if adapter else None)


def test_choices_of_a_request(serving: Serving) -> None:
    ids = prompts(2, seed=4)[1]
    for pooling in ("last", "mean", "first"):
        for normalize in (True, False):
            [found] = serving.client.embed(
                ids, adapter=ADAPTER, pooling=pooling, normalize=normalize, dimensions=12
            )
            each = option(Pooling(pooling), is_normalised=normalize, dimensions=12)
            wanted = expected(serving.zoo, ADAPTER, ids, each)
            np.testing.assert_allclose(np.asarray(found.vector), wanted, atol=1e-4)


def test_a_sum_of_adapters(serving: Serving) -> None:
    ids = prompts(1, seed=4)[0]
    [found] = serving.client.embed(ids, adapters=[(ADAPTER, 1.0)])
    assert found.adapter is None
    assert [each.digest for each in found.adapters] == [serving.digest]
    wanted = expected(serving.zoo, ADAPTER, ids, LAST)
    np.testing.assert_allclose(np.asarray(found.vector), wanted, atol=1e-4)


def test_clients_of_asyncio_embed_while_others_generate(serving: Serving) -> None:
    async def run() -> None:
        address = serving.services.inference_address
        async with AsyncClient(inference=address) as client:
            plain = {"adapter": ADAPTER, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            ids = prompts(1)[0]
            few = ["one", "two words", "three words more"]
            texts = few * 20
            generated, vectors, others = await asyncio.gather(
                client.complete(ids, **plain),
                client.embed(texts, adapter=ADAPTER, pooling="mean"),
                client.embed(texts, pooling="mean"),
            )
            tokens = list(generated.token_ids)
            assert tokens == serving.zoo.greedy(ADAPTER, ids, 40, guess=tokens)
            asked = [list(await client.tokenize(text)) for text in few]
            for adapter, found in ((ADAPTER, vectors), ("", others)):
                wanted = [expected(serving.zoo, adapter, each, MEAN) for each in asked] * 20
                got = [each.vector for each in found]
                np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), atol=1e-4)

    asyncio.run(run())


def test_over_http(serving: Serving) -> None:
    """Texts and token ids, one or several, as numbers and in base64."""
    client, ids = serving.client, prompts(4, seed=4)
    tokens = [list(client.tokenize(text)) for text in ("a b", "a b c")]
    for asked, wanted in (
        ("a b", tokens[:1]),
        (["a b", "a b c"], tokens),
        (ids[0], ids[:1]),
        (ids, ids),
    ):
        answer = serving.post(input=asked)
        assert answer["object"] == "list"
        assert answer["model"] == f"{ADAPTER}@1"
        assert answer["system_fingerprint"] == serving.digest
        num_tokens = sum(map(len, wanted))
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens
        packed = serving.post(input=asked, encoding_format="base64")
        assert len(answer["data"]) == len(packed["data"]) == len(wanted)
        for index, (each, other, one) in enumerate(
            zip(answer["data"], packed["data"], wanted, strict=True)
        ):
            assert (each["object"], each["index"]) == ("embedding", index)
            vector = expected(serving.zoo, ADAPTER, one, LAST)
            np.testing.assert_allclose(each["embedding"], vector, atol=1e-4)
            raw = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
            np.testing.assert_allclose(raw, np.array(each["embedding"], np.float32), atol=1e-6)
    base = serving.post(model="llama", input=ids[0], dimensions=8, pooling="mean", normalize=False)
    assert base["system_fingerprint"] is None
    each = option(Pooling.MEAN, is_normalised=False, dimensions=8)
    vector = expected(serving.zoo, "", ids[0], each)
    np.testing.assert_allclose(base["data"][0]["embedding"], vector, atol=1e-4)


def test_openais_client(serving: Serving) -> None:
    """Asks for base64 by default, and sends token ids as they are."""
    address = f"http://{serving.services.http_address}/v1"
    ids = prompts(2, seed=4)[1]
    with openai.OpenAI(base_url=address, api_key="any") as client:
        for inputs in (["a b", "a b c"], ids, [ids]):
            answer = client.embeddings.create(model=ADAPTER, input=inputs, dimensions=16)
            texts = inputs if inputs[0] == "a b" else None
            asked = [list(serving.client.tokenize(each)) for each in texts] if texts else [ids]
            assert answer.usage.total_tokens == sum(map(len, asked))
            for each, tokens in zip(answer.data, asked, strict=True):
                vector = expected(serving.zoo, ADAPTER, tokens, option(Pooling.LAST, dimensions=16))
                np.testing.assert_allclose(each.embedding, vector, atol=1e-4)


def test_one_call_does_not_fill_the_queue(serving: Serving) -> None:
    """Its inputs start as others end."""
    found = serving.client.embed([[3 + index % 100] for index in range(320)])
    assert len(found) == 320
    same = expected(serving.zoo, "", [5], LAST)
    for index in (2, 102, 302):
        np.testing.assert_allclose(np.asarray(found[index].vector), same, atol=1e-4)


def test_bad_input_is_refused_by_name_over_grpc(serving: Serving) -> None:
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "inputs"),
        ("", {}, "inputs[0]"),
        (["a", ""], {}, "inputs[1]"),
        ([[5], []], {}, "inputs[1]"),
        (["a", ("a", "b")], {}, "inputs[1]"),
        ([[5], [5] * 257], {}, "inputs[1]"),
        ([[5], [10**6]], {}, "inputs[1]"),
        ([[5]] * 2049, {}, "inputs"),
        ([[5] * 200] * 1501, {}, "inputs"),
        ("a", {"dimensions": SIZE + 1}, "dimensions"),
        ("a", {"dimensions": 1 << 30}, "dimensions"),
        ("a", {"prompt_name": "query"}, "prompt_name"),
        ("a", {"prompt_name": "q" * 65}, "prompt_name"),
        ("a", {"pooling": "max"}, "pooling"),
        ("a", {"adapters": [ADAPTER], "adapter": ADAPTER}, "adapters"),
        ("a", {"request_id": "i" * 257}, "request_id"),
        ("a", {"cache_salt": "i" * 257}, "cache_salt"),
    ]
    for inputs, fields, subject in refused:
        with pytest.raises(InvalidArgument) as caught:
            serving.client.embed(inputs, **fields)
        assert caught.value.subject == subject, caught.value
        assert subject in str(caught.value)
    with pytest.raises(NotFound):
        serving.client.embed("a", adapter="absent")


def test_the_whole_context_can_be_embedded(serving: Serving) -> None:
    """No token of it is kept for an answer."""
    ids = (prompts(5)[4] * 2)[:256]
    [found] = serving.client.embed(ids)
    wanted = expected(serving.zoo, "", ids, LAST)
    np.testing.assert_allclose(np.asarray(found.vector), wanted, atol=1e-4)
    with pytest.raises(LoadoutError):
        serving.client.complete(ids, max_tokens=1)


def test_bad_input_is_refused_by_name_over_http(serving: Serving) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "input"),
        ({"input": ""}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": [[5], []]}, "input[1]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", [5]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [5] * 257}, "input[0]"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "adapters": [{"ref": ADAPTER}]}, "model"),
        ({"input": "a", "nonsense": 1}, "nonsense"),
    ]
    for fields, param in refused:
        found, message = serving.refused(**fields)
        assert found == param, message
        assert param.partition("[")[0] in message


def test_requests_are_counted_and_logged_by_kind(serving: Serving) -> None:
    def count(reason: str) -> float:
        name = "loadout_inference_pooled_requests_total"
        labels = {"kind": "embed", "finish_reason": reason}
        return scrape(serving.services.inference_metrics).one(name, **labels)

    metrics = scrape(serving.services.inference_metrics)
    generated = metrics.sum("loadout_inference_requests_total")
    before = count("stop")
    serving.client.embed(["a", "b", "c"], request_id="counted")
    assert count("stop") == before + 3
    metrics = scrape(serving.services.inference_metrics)
    assert metrics.sum("loadout_inference_requests_total") == generated
    lines = serving.services.inference.log_path.read_text().splitlines()
    logged = [line for line in lines if "request_id=counted-" in line]
    assert ["kind=embed" in line for line in logged] == [True] * 3


def test_inputs_that_an_operator_ends_are_interrupted(serving: Serving) -> None:
    """A vector that is not there cannot be returned."""
    client = serving.client
    client.pause()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.embed, ["a", "b"], timeout_s=60.0)
        name = "loadout_inference_requests_waiting"
        until(lambda: scrape(serving.services.inference_metrics).one(name) == 2)
        client.pause("abort")
        with pytest.raises(FailedPrecondition) as caught:
            waiting.result()
    assert caught.value.reason == "INTERRUPTED"
    client.resume()
    assert len(client.embed(["a", "b"])) == 2


def test_no_page_is_held_afterwards(serving: Serving) -> None:
    serving.client.embed(["a b c"] * 30)
    used = scrape(serving.services.inference_metrics).one("loadout_inference_kv_pages_used")
    assert used == 0
