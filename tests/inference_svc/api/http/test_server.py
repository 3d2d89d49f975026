"""The HTTP server: probes, tokens, disconnects, drain."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from inference_svc.api.http.app import CURRENT_SECONDS, SharedExposition
from inference_svc.api.http.request import MAX_BODY_BYTES
from inference_svc.api.http.serving.server import HttpServer
from inference_svc.api.load_report import LOAD_HEADER
from inference_svc.config import InferenceSettings
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.auth.principal import tenant_account
from servicekit.rpc.tls import CertificateFiles
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.inference.connections import connected
from tests.support.inference.front import Front
from tests.support.inference.serving import NOT_SERVING, digest_of
from tests.support.wait import until_async

LONG: dict[str, Any] = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}


def test_ready_file_health_and_metrics(serve_http, tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        server = front.running.server
        assert json.loads((tmp_path / "ready.json").read_text()) == {
            "grpc": server.address,
            "metrics": server.metrics_address,
            "http": server.http_address,
        }
        assert (await front.raw.get("/health")).status_code == 200
        await front.complete()
        for path in ("/v1/models/nobody", "/v1/else"):
            assert (await front.raw.get(path)).status_code == 404
        answer = await front.raw.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        for line in (
            'http_requests_total{route="/v1/completions",status="200"} 1.0',
            'http_requests_total{route="/v1/models/{model:path}",status="404"} 1.0',
            'http_requests_total{route="other",status="404"} 1.0',
            'http_requests_total{route="/health",status="200"} 1.0',
            "generated_tokens_total 4.0",
            "vllm:num_requests_running 0.0",
        ):
            assert line in answer.text

    serve_http(body)


def test_every_response_has_the_load(serve_http) -> None:
    async def body(front: Front) -> None:
        idle = "TEXT application_utilization=0.0000,named_metrics.num_requests=0,"
        paths = ("/health", "/v1/models", "/v1/models/nobody", "/v1/else", "/metrics")
        answers = [await front.raw.get(path) for path in paths]
        assert [answer.status_code for answer in answers] == [200, 200, 404, 404, 200]
        for answer in answers:
            assert answer.headers.get_list(LOAD_HEADER) == [answer.headers[LOAD_HEADER]]
            assert answer.headers[LOAD_HEADER].startswith(idle)
        front.engine.hold.set()
        waiting = asyncio.create_task(front.complete())
        await until_async(lambda: front.engine.num_running == 1)
        busy = await front.raw.get("/health")
        assert "named_metrics.num_requests=1," in busy.headers[LOAD_HEADER]
        front.engine.hold.clear()
        await waiting
        call = front.running.stub.GetServerInfo(pb.GetServerInfoRequest())
        load = dict(await call.trailing_metadata())[LOAD_HEADER]
        assert load == (await front.raw.get("/health")).headers[LOAD_HEADER]

    serve_http(body)


def test_http_is_off_by_default(serve) -> None:
    async def body(running: Any) -> None:
        assert running.server.http_address == ""

    serve(body)


def test_request_ids_are_the_callers(serve_http) -> None:
    """They need not be unique: meshes send one along with every call that a request causes, and
    with several choices (vllm#16863)."""

    async def body(front: Front) -> None:
        answer = await front.complete(extra_headers={"x-request-id": "abc-1"})
        assert (answer.id, answer._request_id) == ("cmpl-abc-1", "abc-1")
        front.engine.hold.set()
        same = {"extra_headers": {"x-request-id": "same"}}
        running = [asyncio.create_task(front.complete(n=n, **same)) for n in (1, 1, 2, 2)]
        await until_async(lambda: front.engine.num_running == 6)
        front.engine.hold.clear()
        for answer in await asyncio.gather(*running):
            assert (answer.id, answer._request_id) == ("cmpl-same", "same")
            assert {choice.text for choice in answer.choices} == {"abc"}
        assert (await front.complete())._request_id not in (None, "", "same")

    serve_http(body)


# --- tokens -------------------------------------------------------------------------------------

TOKENS = (
    token_lines("caller", ["caller"]),
    token_lines("operator", ["operator"]),
    token_lines("root", ["caller", "operator"], ["*"]),
)


def test_roles_decide_the_routes_of_a_token(serve_http, tmp_path: Path) -> None:
    policy = write_policy(tmp_path, *TOKENS)

    async def body(front: Front) -> None:
        for name, generates, lists, scrapes in (
            ("unknown", 401, 401, 401),
            ("caller", 200, 200, 403),
            ("operator", 403, 200, 403),
            ("root", 200, 200, 200),
        ):
            headers = {"authorization": f"Bearer {token_of(name)}"}
            body_ = {"model": "base", "prompt": "abc"}
            answer = await front.post("/v1/completions", body_, headers=headers)
            assert answer.status_code == generates
            assert (await front.raw.get("/v1/models", headers=headers)).status_code == lists
            assert (await front.raw.get("/metrics", headers=headers)).status_code == scrapes
            counted = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
            path, key = "/v1/messages/count_tokens", {"x-api-key": token_of(name)}
            assert (await front.post(path, counted, headers=key)).status_code == generates
            assert (await front.raw.get("/v1/models", headers=key)).status_code == 401
        assert (await front.raw.get("/health")).status_code == 200
        (request, _) = front.engine.submitted
        assert (request.tenant, request.cache_seed) == ("team-a", "team-a//")
        with pytest.raises(openai.AuthenticationError) as caught:
            await front.chat()
        assert caught.value.code == "invalid_api_key"
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        async with front.connect(token_of("caller")) as client:
            assert (await client.completions.create(model="base", prompt="abc")).choices

    serve_http(body, policy_file=policy)


def test_open_metrics_are_the_gateways(serve_http, tmp_path: Path) -> None:
    policy = write_policy(tmp_path, *TOKENS)

    async def body(front: Front) -> None:
        answer = await front.raw.get("/metrics")
        assert answer.status_code == 200
        names = {line.split()[2] for line in answer.text.splitlines() if line.startswith("# HELP")}
        assert {"vllm:lora_requests_info", "vllm:num_requests_waiting"} <= names
        assert {name.partition(":")[0] for name in names} == {"vllm"}
        for name, scrapes in (("unknown", 401), ("caller", 403), ("root", 200)):
            headers = {"authorization": f"Bearer {token_of(name)}"}
            answer = await front.raw.get("/metrics", headers=headers)
            assert answer.status_code == scrapes
        assert "loadout_inference_requests_running" in answer.text
        assert (await front.raw.get("/v1/models")).status_code == 401

    serve_http(body, policy_file=policy, http_open_metrics=True)


def test_unauthenticated_bodies_are_not_read(serve_http, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"

    async def large() -> Any:
        for _ in range(50):
            yield b" " * 65536

    async def body(front: Front) -> None:
        headers = {"content-type": "application/json"}
        for path in ("/v1/completions", "/v1/load_lora_adapter"):
            answer = await front.raw.post(path, content=large(), headers=headers)
            assert answer.status_code == 401
            assert answer.headers["connection"] == "close"
        (line,) = [json.loads(line) for line in audit.read_text().splitlines()]
        assert (line["what"], line["reason"], line["who"]) == ("LoadAdapter", "UNAUTHENTICATED", "")
        assert line["peer"].startswith("http:127.0.0.1:")

    policy = write_policy(tmp_path, *TOKENS)
    serve_http(body, policy_file=policy, audit_file=audit)


def test_bodies_of_callers_that_may_not_load_are_not_read(serve_http, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    head = (
        "POST /v1/{}_lora_adapter HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {token_of('caller')}\r\ncontent-length: 1000\r\n\r\n"
    )

    async def body(front: Front) -> None:
        for action in ("load", "unload"):
            async with connected(front) as client:
                await client.send(head.format(action).encode() + b"{")
                assert b" 403 " in await client.read()
        lines = [json.loads(line) for line in audit.read_text().splitlines()]
        assert [(line["what"], line["who"], line["reason"]) for line in lines] == [
            ("LoadAdapter", "caller", "PERMISSION_DENIED"),
            ("UnloadAdapter", "caller", "PERMISSION_DENIED"),
        ]

    policy = write_policy(tmp_path, *TOKENS)
    serve_http(body, policy_file=policy, audit_file=audit)


def test_one_thread_renders_open_metrics() -> None:
    renders = threading.Semaphore(0)
    num_rendered = 0

    def expose() -> tuple[bytes, str]:
        nonlocal num_rendered
        assert renders.acquire(timeout=60)
        num_rendered += 1
        return f"number {num_rendered}".encode(), "text/plain"

    async def body() -> None:
        shared = SharedExposition(expose)
        asking = [asyncio.create_task(shared.get()) for _ in range(20)]
        await asyncio.sleep(2 * CURRENT_SECONDS)
        asking += [asyncio.create_task(shared.get()) for _ in range(20)]
        await asyncio.sleep(0)
        asking.pop().cancel()
        renders.release()
        assert set(await asyncio.gather(*asking)) == {(b"number 1", "text/plain")}
        renders.release()
        assert await shared.get() == (b"number 2", "text/plain"), "it was too old"

    asyncio.run(body())


# --- operators ----------------------------------------------------------------------------------


def test_load_and_unload(serve_http, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"

    async def body(front: Front) -> None:
        answer = await front.post("/v1/load_lora_adapter", {"lora_name": "upper", "pin": True})
        assert (answer.status_code, "added" in answer.text) == (200, True)
        assert front.engine.resident[digest_of("upper")].pinned
        again = {"lora_name": "upper", "lora_int_id": 1}
        assert (await front.post("/v1/unload_lora_adapter", again)).status_code == 200
        assert not front.engine.resident
        named = await front.post("/v1/load_lora_adapter", {"lora_name": "upper", "lora_path": "/x"})
        assert named.text.endswith(
            " Its base model is base: the only one. Keys of its config that are not known, and "
            "allowed by the operator: note, other. Warning: q_proj: too large."
        )
        assert (await front.post("/v1/unload_lora_adapter", again)).status_code == 200
        answer = await front.post("/v1/unload_lora_adapter", again)
        assert answer.status_code == 404
        for body_, param in (
            ({"lora_name": "gone"}, "lora_name"),
            ({"lora_name": "A B"}, "lora_name"),
            ({}, "lora_name"),
            ({"lora_name": "a", "lora_path": ""}, "lora_path"),
            ({"lora_name": "a@2", "lora_path": "/x"}, "lora_name"),
        ):
            answer = await front.post("/v1/load_lora_adapter", body_)
            assert answer.json()["error"]["param"] == param
        # UKGovernmentBEIS/inspect_ai#3995: the answer shows how names are written
        for name in ("org/adapter@v1", "a:b", "org/a:b@2"):
            for path in ({}, {"lora_path": "/x"}):
                answer = await front.post("/v1/load_lora_adapter", {"lora_name": name, **path})
                message = answer.json()["error"]["message"]
                assert (answer.status_code, message[:11]) == (400, "lora_name: ")
                assert "write [tenant/]name" in message
        lines = [json.loads(line) for line in audit.read_text().splitlines()]
        assert [(line["what"], line["result"]) for line in lines[:5]] == [
            *(("LoadAdapter", "ok"), ("UnloadAdapter", "ok")) * 2,
            ("UnloadAdapter", "refused"),
        ]

    serve_http(body, store=True, audit_file=audit)


# --- disconnects --------------------------------------------------------------------------------


def text_of(chunk: Any) -> str:
    (choice,) = chunk.choices
    return str(choice.text if hasattr(choice, "text") else choice.delta.content or "")


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_closed_stream_cancels_its_requests(serve_http, route: str) -> None:
    """Text arrives while the requests still run."""

    async def body(front: Front) -> None:
        front.engine.step_s = 0.1  # four seconds in all, which a busy machine does not take
        for n in (1, 3):
            fields = {**LONG, "max_tokens": 40}
            stream = await getattr(front, route)(stream=True, n=n, **fields)
            while not text_of(await anext(stream)):
                pass
            front.engine.hold.set()
            assert front.engine.num_running == n
            await stream.close()
            await until_async(lambda: front.engine.num_running == 0)
            front.engine.hold.clear()
        assert len(front.engine.cancelled) == 4

    serve_http(body)


def test_disconnect_before_the_response_cancels_its_requests(serve_http) -> None:
    async def body(front: Front) -> None:
        front.engine.hold.set()
        for stream in (False, True):
            waiting = asyncio.create_task(front.complete(stream=stream, n=2, **LONG))
            await until_async(lambda: front.engine.num_running == 2)
            waiting.cancel()
            await until_async(lambda: front.engine.num_running == 0)
        await front.until_metric('http_requests_total{route="/v1/completions",status="499"} 2.0')

    serve_http(body)


# --- drain --------------------------------------------------------------------------------------


def test_drain_finishes_running_requests_and_refuses_new_ones(serve_http) -> None:
    async def body(front: Front) -> None:
        async def drains() -> bool:
            return (await front.raw.get("/health")).status_code == 503

        front.engine.hold.set()
        first = asyncio.create_task(front.complete())
        await until_async(lambda: front.engine.num_running == 1)
        front.running.stop.set()
        ended = asyncio.create_task(front.running.server.run(front.running.stop))
        await until_async(drains)
        assert await front.running.health_of() == NOT_SERVING
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            await front.complete()
        assert (caught.value.status_code, caught.value.code) == (503, "draining")
        assert caught.value.response.headers["retry-after"] == "1"
        front.engine.hold.clear()
        assert (await first).choices[0].text == "abc"
        await ended

    serve_http(body)


def test_drain_waits_for_operators_calls(serve_http) -> None:
    async def body(front: Front) -> None:
        front.engine.hold.set()
        loading = asyncio.create_task(front.post("/v1/load_lora_adapter", {"lora_name": "upper"}))
        await until_async(lambda: front.engine.num_loading == 1)
        front.running.stop.set()
        ended = asyncio.create_task(front.running.server.run(front.running.stop))
        done, _ = await asyncio.wait([ended], timeout=1.5)
        assert not done
        front.engine.hold.clear()
        assert (await loading).status_code == 200
        await ended

    serve_http(body, store=True)


def test_streams_end_with_an_error_after_the_grace(serve_http) -> None:
    async def body(front: Front) -> None:
        front.engine.step_s = 0.01
        stream = await front.complete(stream=True, **LONG)
        await anext(stream)
        front.engine.hold.set()
        front.running.stop.set()
        await front.running.server.run(front.running.stop)
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass

    serve_http(body, grace_seconds=0.1)


def test_close_stops_listening(serve_http) -> None:
    async def body(front: Front) -> None:
        await front.complete()
        await front.running.server.close()
        with pytest.raises(httpx2.ConnectError):
            await front.raw.get("/health")

    serve_http(body)


def test_address_in_use_is_an_error(serve_http, tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        address = front.running.server.http_address
        files = CertificateFiles(InferenceSettings(model=tmp_path))
        with pytest.raises(OSError, match=f"cannot listen on {address}"):
            HttpServer(address, files)

    serve_http(body)


def test_large_bodies_are_a_debt(serve_http, tmp_path: Path) -> None:
    """Who owes much waits with large ones, and nobody else does."""
    policy = write_policy(tmp_path, *TOKENS)
    large = {"model": "base", "prompt": [1.5] * 100_000}

    async def body(front: Front) -> None:
        work = front.running.server._places.request_work
        work.wait_s = 0.01
        processors, work.processors = work.processors, 1e-6  # on a busy machine debts decay, too
        account = tenant_account("team-a")

        async def post(name: str, content: dict[str, Any]) -> httpx2.Response:
            headers = {"authorization": f"Bearer {token_of(name)}"}
            return await front.post("/v1/completions", content, headers=headers)

        assert (await post("caller", large)).status_code == 400
        assert (debt_s := work.debt_s(account)) > 0.002
        too_large = {"model": "base", "prompt": "x" * MAX_BODY_BYTES}
        assert (await post("caller", too_large)).status_code == 413
        assert work.debt_s(account) > debt_s + 0.015, "what is discarded is read too"
        work.processors = processors
        work.charge(account, 100.0)
        refused = await post("caller", large)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 9
        assert (await post("caller", {"model": "base", "prompt": "abc"})).status_code == 200
        assert (await post("root", large)).status_code == 400

    serve_http(body, policy_file=policy)
