"""The whole output of both services under requests good and bad: lines for machines, with what each
request was about, and nothing that is secret."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from loadout import AsyncClient
from loadout.errors import InvalidArgument, LoadoutError, NotFound, Unauthenticated
from tests.support.access.policies import token_of
from tests.support.wait import until, until_async
from tests.system.observed import S3_SECRET, Observed
from tests.system.secretive import HELD, LOOK_SECRET, fail_with

FAR = "s3://adapters/far"
PROMPT = "the zebra that nobody may read"
WRONG_TOKEN = "token-that-nobody-knows"
SECRETS = (PROMPT, "zebra", WRONG_TOKEN, token_of("root"), token_of("server"), S3_SECRET)
SECRETS += HELD
FACTS = {"request_id", "tenant", "adapter", "digest"}
REQUESTS, CALLS = "inference_svc.requests", "servicekit.rpc.interceptor"


def post(system: Observed, body: dict[str, Any], token: str) -> int:
    request = urllib.request.Request(
        f"http://{system.http_address}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {token}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


async def register_from_afar(system: Observed) -> None:
    """The store tries several times to fetch it, then refuses, and says so in its log; we leave
    before the client tries again."""
    addresses = {"inference": system.inference_address, "store": system.store_address}
    async with AsyncClient(**addresses, token=token_of("root")) as client:
        task = asyncio.create_task(client.register("logged/far", FAR))
        await until_async(lambda: FAR in system.store.log_path.read_text())
        task.cancel()
        with suppress(asyncio.CancelledError, LoadoutError):
            await task


def drive(system: Observed) -> None:
    """One of each kind; the last one is called "last"."""
    client, token = system.client, token_of("root")
    for name in ("r1", "r3", "r16"):  # one more than there are slots
        system.register(f"logged/{name}", name)
        client.complete(PROMPT, adapter=f"logged/{name}", request_id=f"of-{name}", max_tokens=2)
    client.get("logged/r3")  # lookups of names that the inference service hears of have no trace
    with pytest.raises(NotFound):
        client.complete(PROMPT, adapter="logged/nobody")
    with pytest.raises(InvalidArgument):
        client.complete(PROMPT * 100, adapter="logged/r3")
    with pytest.raises(InvalidArgument):
        client.complete(PROMPT, temperature=-1.0)
    for chunk in client.generate(PROMPT, max_tokens=200, ignore_eos=True):
        assert chunk
        break
    with system.connect(token=WRONG_TOKEN) as stranger:
        with pytest.raises(Unauthenticated):
            stranger.complete(PROMPT)
        with pytest.raises(Unauthenticated):
            stranger.get("logged/r3")
    asyncio.run(register_from_afar(system))
    for text in LOOK_SECRET.values():
        fail_with(client, text)
    good = {"model": "logged/r3", "prompt": PROMPT, "max_tokens": 2}
    assert post(system, good, token) == 200
    assert post(system, {**good, "prompt": [PROMPT, 1]}, token) == 400
    assert post(system, {**good, PROMPT: True}, token) == 400
    assert post(system, good, WRONG_TOKEN) == 401
    client.complete(PROMPT, request_id="last", max_tokens=2)


@pytest.fixture(scope="module")
def texts(observed: Observed) -> dict[str, str]:
    """What each service has written."""
    drive(observed)
    until(lambda: '"last"' in observed.inference.log_path.read_text())
    return {
        "store": observed.store.log_path.read_text(),
        "inference": observed.inference.log_path.read_text(),
    }


def lines(text: str, logger: str = "") -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        found = json.loads(line)
        if logger in ("", found["logger"]):
            yield found


@pytest.mark.parametrize("service", ["store", "inference"])
def test_every_line_is_an_object(texts: dict[str, str], service: str) -> None:
    found = list(lines(texts[service]))
    assert len(found) > 10
    for line in found:
        assert {"time", "level", "logger", "message"} <= line.keys()


@pytest.mark.parametrize("service", ["store", "inference"])
@pytest.mark.parametrize("secret", SECRETS)
def test_no_secret_is_logged(texts: dict[str, str], service: str, secret: str) -> None:
    assert secret not in texts[service]


@pytest.mark.parametrize("service", ["store", "inference"])
def test_text_around_secrets_stays(texts: dict[str, str], service: str) -> None:
    assert "X-Amz-Signature=***" in texts[service]


def test_request_lines_have_their_fields(texts: dict[str, str]) -> None:
    found = list(lines(texts["inference"], REQUESTS))
    for line in found:
        assert line.keys() >= FACTS | {"status", "trace_id", "span_id"}
    known = {line["request_id"]: line for line in found}
    for name in ("r1", "r3", "r16"):
        line = known[f"of-{name}"]
        assert (line["adapter"], line["tenant"]) == (f"logged/{name}@1", "default")
        assert line["digest"].startswith("sha256:")
    statuses = {line["status"] for line in found}
    assert statuses >= {"OK", "NOT_FOUND", "INVALID_ARGUMENT", "CANCELLED"}


def test_store_call_lines_have_their_fields(texts: dict[str, str]) -> None:
    found = [line for line in lines(texts["store"], CALLS) if "method" in line]
    for line in found:
        assert line.keys() >= FACTS | {"method", "code"}
    by_method = {line["method"]: line for line in found if line["code"] == "OK"}
    for method in ("RegisterAdapter", "GetAdapter"):
        assert by_method[method]["adapter"].startswith("logged/")
    for method in ("RegisterAdapter", "GetAdapter", "PullAdapter"):
        assert by_method[method]["digest"].startswith("sha256:")
        ids = [line.get("trace_id") for line in found if line["method"] == method]
        assert any(trace_id and len(trace_id) == 32 for trace_id in ids), method


def test_lines_of_both_services_name_one_trace(texts: dict[str, str]) -> None:
    [request] = [
        line for line in lines(texts["inference"], REQUESTS) if line["request_id"] == "of-r1"
    ]
    pulls = [line for line in lines(texts["store"], CALLS) if line.get("method") == "PullAdapter"]
    [pull] = [line for line in pulls if line.get("trace_id") == request["trace_id"]]
    assert pull["digest"] == request["digest"]


def test_the_engine_process_logs_json(texts: dict[str, str]) -> None:
    evicted = [line for line in lines(texts["inference"]) if line["message"] == "evicted"]
    assert evicted
    assert all(line["digest"].startswith("sha256:") for line in evicted)
