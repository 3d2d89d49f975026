"""The whole front over a real channel: everything but the engine is what runs in production."""

import asyncio
import gc
import json
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from inference_svc import errors
from inference_svc.config import Config, Machine, ModelFacts, resolve
from inference_svc.server import SERVICE, InferenceServer
from inference_svc.servicer import ServerFacts
from inference_svc.status import CODES, QUIET_SECONDS
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as store_pb_grpc
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc

LAYOUT = "sha256:" + "1" * 64
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
MAX_MODEL_LEN = 64


def digest_of(name: str) -> str:
    return "sha256:" + name.encode().hex().rjust(64, "0")


class NameStore(store_pb_grpc.AdapterStoreServiceServicer):
    """Every name is registered, at version 1, with a digest made of it; "gone" is not."""

    async def GetAdapter(self, request: Any, context: Any) -> Any:  # noqa: N802
        name = request.ref.partition("@")[0].removeprefix("default/")
        if name == "gone":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no adapter default/gone")
        adapter = store_pb.Adapter(
            name=f"default/{name}",
            version=1,
            digest=digest_of(name),
            rank=99 if name == "wide" else 8,
            base_model="other" if name == "foreign" else "base",
        )
        return store_pb.GetAdapterResponse(adapter=adapter, revision=3)

    async def GetStoreStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        return store_pb.GetStoreStatusResponse(revision=3)

    async def RegisterLayout(self, request: Any, context: Any) -> Any:  # noqa: N802
        return store_pb.RegisterLayoutResponse(layout_id=LAYOUT, image_format=1)

    async def WatchAdapters(self, request: Any, context: Any) -> Any:  # noqa: N802
        while True:
            event = store_pb.AdapterEvent(revision=3, kind=store_pb.EVENT_KIND_BOOKMARK)
            yield store_pb.WatchAdaptersResponse(event=event)
            await asyncio.sleep(0.2)


class Running:
    """A server on a free port, its engine, and a client's stub."""

    def __init__(self, server: InferenceServer, engine: Any, channel: Any) -> None:
        self.server, self.engine = server, engine
        self.stub = pb_grpc.InferenceServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        self.stop = asyncio.Event()

    async def generate(self, text: str = "abc", timeout: float | None = None, **fields: Any) -> Any:
        request = pb.GenerateRequest(text=text, **fields)
        return [response async for response in self.stub.Generate(request, timeout=timeout)]

    async def health_of(self, service: str = "") -> int:
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)

    def scrape(self) -> str:
        with urllib.request.urlopen(f"http://{self.server.metrics_address}/metrics") as response:
            return str(response.read().decode())


@pytest.fixture
def serve(engine: Any, tokenizers: Any, tmp_path: Path) -> Callable[..., Any]:
    """Runs a coroutine function beside a server; `store` gives it a real store's address."""
    (tmp_path / "config.json").write_text("{}")

    def run(
        body: Callable[[Running], Awaitable[Any]],
        *,
        kind: str = "chars",
        grace_seconds: float = 5.0,
        store: bool = False,
    ) -> Any:
        async def main() -> Any:
            store_server = grpc.aio.server()
            store_pb_grpc.add_AdapterStoreServiceServicer_to_server(NameStore(), store_server)
            port = store_server.add_insecure_port("127.0.0.1:0")
            await store_server.start()
            config = resolve(
                Config(
                    model=tmp_path,
                    base_model="base",
                    store=f"127.0.0.1:{port}" if store else "",
                    listen="127.0.0.1:0",
                    metrics_listen="127.0.0.1:0",
                    ready_file=tmp_path / "ready.json",
                    max_model_len=MAX_MODEL_LEN,
                    grace_seconds=grace_seconds,
                ),
                Machine(has_cuda=False),
                ModelFacts("float32", MAX_MODEL_LEN, 1024),
            )
            server = InferenceServer(config)
            facts = ServerFacts(
                base_model="base",
                architecture="FakeForCausalLM",
                dtype=config.dtype,
                device=config.device,
                vocab_size=tokenizers[kind].vocab_size,
                max_model_len=config.max_model_len,
                max_loras=4,
                max_lora_rank=16,
                max_sequences=8,
                max_batch_tokens=64,
                max_queue=16,
                versions={"loadout": "0"},
            )
            try:
                await server.start(engine, tokenizers[kind], facts)
                async with (
                    asyncio.timeout(20),
                    grpc.aio.insecure_channel(server.address) as channel,
                ):
                    return await body(Running(server, engine, channel))
            finally:
                await server.close()
                await store_server.stop(0)

        return asyncio.run(main())

    return run


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def error_of(awaitable: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value


def subjects(error: grpc.aio.AioRpcError) -> Sequence[str]:
    """The fields named in BadRequest details."""
    status = rpc_status.from_call(error)
    assert status is not None
    bad_request = error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Unpack(bad_request):
            return [violation.field for violation in bad_request.field_violations]
    return []


# --- generating ---------------------------------------------------------------------------------


def test_streams_text_and_ends_with_usage(serve) -> None:
    text = "the quick 😀 fox, 日本語"

    async def body(running: Running) -> None:
        responses = await running.generate(text, request_id="mine")
        assert "".join(r.text for r in responses) == text
        assert {r.request_id for r in responses} == {"mine"}
        assert [r.finish_reason for r in responses[:-1]] == [0] * (len(responses) - 1)
        assert responses[-1].finish_reason == pb.FINISH_REASON_STOP
        assert responses[-1].usage.cached_prompt_tokens == 2
        assert responses[-1].timings.adapter_wait_seconds == 0.125
        assert not responses[-1].HasField("adapter")
        (request,) = running.engine.submitted
        assert (request.digest, request.cache_seed) == ("", "default//")
        assert request.deadline_s is None

    serve(body, kind="byte_level")


def test_text_tokens_and_chat_are_prompts(serve, tokenizers) -> None:
    tokenizer = tokenizers["chars"]

    async def body(running: Running) -> None:
        ids = tokenizer.encode("fox")
        requests = [
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids)),
            pb.GenerateRequest(
                chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
            ),
        ]
        texts = []
        for request in requests:
            texts.append("".join([r.text async for r in running.stub.Generate(request)]))
        assert texts[0] == "fox"
        assert running.engine.submitted[1].prompt_token_ids == tuple(
            tokenizer.encode("<s>user: hi</s><s>assistant:")
        )

    serve(body)


def test_stop_strings_and_logprobs(serve) -> None:
    async def body(running: Running) -> None:
        params = pb.SamplingParams(stop=["k b", "zzz"], logprobs=2, max_tokens=40)
        responses = await running.generate("the quick brown fox", sampling=params)
        assert "".join(r.text for r in responses) == "the quic"
        assert responses[-1].finish_reason == pb.FINISH_REASON_STOP
        num_tokens = sum(len(r.token_ids) for r in responses)
        assert sum(len(r.logprobs) for r in responses) == num_tokens
        assert responses[-1].usage.completion_tokens == num_tokens == len("the quick b")
        assert [len(entry.top) for entry in responses[0].logprobs][:1] == [2]

    serve(body)


def test_an_adapter_is_resolved_and_named_in_every_response(serve) -> None:
    async def body(running: Running) -> None:
        responses = await running.generate(adapter="upper", cache_salt="s", priority=3)
        assert {r.adapter.name for r in responses} == {"default/upper@1"}
        (request,) = running.engine.submitted
        assert request.digest == digest_of("upper")
        assert (request.cache_seed, request.priority) == ("default/default/s", 3)
        await until(lambda: running.engine.layout_ids == [LAYOUT])
        info = await running.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.layout_id == LAYOUT

    serve(body, store=True)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": ""}, "prompt"),
        ({"text": "x" * MAX_MODEL_LEN}, "prompt"),
        ({"text": "x" * 5000}, "prompt"),
        ({"sampling": pb.SamplingParams(top_p=2)}, "sampling.top_p"),
        ({"adapter": "No/Such/Name"}, "adapter"),
    ],
)
def test_bad_arguments_name_the_field(serve, fields: dict[str, Any], field: str) -> None:
    async def body(running: Running) -> None:
        error = await error_of(running.generate(**fields))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert subjects(error) == [field]
        assert not running.engine.submitted

    serve(body)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("gone", grpc.StatusCode.NOT_FOUND, "no adapter default/gone"),
        ("wide", grpc.StatusCode.FAILED_PRECONDITION, "rank 99, above this server's"),
        ("foreign", grpc.StatusCode.FAILED_PRECONDITION, "base model 'other'"),
    ],
)
def test_adapters_that_cannot_be_served(serve, name: str, code: Any, message: str) -> None:
    async def body(running: Running) -> None:
        for call in (
            running.generate(adapter=name),
            running.stub.LoadAdapter(pb.LoadAdapterRequest(ref=name)),
        ):
            error = await error_of(call)
            assert error.code() is code
            assert message in error.details()

    serve(body, store=True)


@pytest.mark.parametrize(
    "kind", [k for k in CODES if k is not errors.InferenceError], ids=lambda kind: kind.__name__
)
def test_every_error_of_the_engine_reaches_the_caller(serve, kind: Any) -> None:
    async def body(running: Running) -> None:
        running.engine.errors[digest_of("upper")] = kind("as the engine says", subject="adapter")
        error = await error_of(running.generate(adapter="upper"))
        assert error.code() is CODES[kind]
        is_secret = CODES[kind] is grpc.StatusCode.INTERNAL
        assert error.details() == ("internal error" if is_secret else "as the engine says")
        assert f'code="{CODES[kind].name}",method="Generate"' in await asyncio.to_thread(
            running.scrape
        )

    serve(body, store=True)


def test_a_running_request_id_is_refused(serve) -> None:
    async def body(running: Running) -> None:
        running.engine.hold.set()
        first = asyncio.create_task(running.generate(request_id="same"))
        await until(lambda: running.engine.num_running == 1)
        error = await error_of(running.generate(request_id="same"))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        running.engine.hold.clear()
        assert "".join(r.text for r in await first) == "abc"

    serve(body)


# --- leaving ------------------------------------------------------------------------------------


def test_cancel_and_deadline_reach_the_engine(serve) -> None:
    async def body(running: Running) -> None:
        running.engine.hold.set()
        call = running.stub.Generate(pb.GenerateRequest(text="abc"))
        await until(lambda: running.engine.num_running == 1)
        call.cancel()
        await until(lambda: running.engine.num_running == 0)
        error = await error_of(running.generate(timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        request = running.engine.submitted[-1]
        assert request.deadline_s is not None
        assert 0 < request.deadline_s - request.arrival_s < 0.3
        await until(lambda: running.engine.num_running == 0)
        assert len(running.engine.cancelled) == 2

    serve(body)


def test_a_caller_that_vanishes_frees_its_request(serve) -> None:
    async def body(running: Running) -> None:
        async with grpc.aio.insecure_channel(running.server.address) as channel:
            params = pb.SamplingParams(ignore_eos=True, max_tokens=50)
            call = pb_grpc.InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(text="abc", sampling=params)
            )
            await call.read()
            running.engine.hold.set()
            assert running.engine.num_running == 1
        await until(lambda: running.engine.num_running == 0)

    async def slowly(running: Running) -> None:
        running.engine.turn_s = 0.01
        await body(running)

    serve(slowly)


def test_drain_finishes_what_runs_and_refuses_what_comes(serve) -> None:
    async def body(running: Running) -> None:
        running.engine.hold.set()
        first = asyncio.create_task(running.generate())
        await until(lambda: running.engine.num_running == 1)
        ended = asyncio.create_task(running.server.run(running.stop))
        await asyncio.sleep(0.02)
        assert await running.health_of() == SERVING
        running.stop.set()
        await asyncio.sleep(0.02)
        assert await running.health_of() == NOT_SERVING
        assert await running.health_of(SERVICE) == NOT_SERVING
        error = await error_of(running.generate(request_id="late"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in error.details()
        running.engine.hold.clear()
        assert "".join(r.text for r in await first) == "abc"
        assert await ended == 0

    serve(body)


def test_drain_waits_for_what_operators_have_asked_for(serve) -> None:
    async def body(running: Running) -> None:
        running.engine.hold.set()
        loading = running.stub.LoadAdapter(pb.LoadAdapterRequest(ref="upper"))
        await until(lambda: running.engine.num_loading == 1)
        running.stop.set()
        ended = asyncio.create_task(running.server.run(running.stop))
        # Longer than a quiet server, and one without requests, would go on.
        done, _ = await asyncio.wait([ended], timeout=3 * QUIET_SECONDS)
        assert not done
        running.engine.hold.clear()
        assert (await loading).adapter.digest == digest_of("upper")
        assert await ended == 0

    serve(body, store=True)


def test_when_the_grace_is_over_the_rest_ends_with_a_status(serve) -> None:
    async def body(running: Running) -> None:
        running.engine.hold.set()
        first = asyncio.create_task(running.generate())
        await until(lambda: running.engine.num_running == 1)
        running.stop.set()
        assert await running.server.run(running.stop) == 0
        error = await error_of(first)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: running.engine.num_running == 0)

    serve(body, grace_seconds=0.1)


def test_a_failed_engine_answers_all_and_ends_the_process_with_1(serve) -> None:
    async def body(running: Running) -> None:
        running.engine.hold.set()
        calls = [asyncio.create_task(running.generate(request_id=f"r{i}")) for i in range(3)]
        await until(lambda: running.engine.num_running == 3)
        ended = asyncio.create_task(running.server.run(running.stop))
        await asyncio.sleep(0)
        running.engine.fail.set()
        for call in calls:
            error = await error_of(call)
            assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")
        assert await ended == 1
        assert await running.health_of() == NOT_SERVING
        error = await error_of(running.generate())
        assert error.code() is grpc.StatusCode.INTERNAL

    serve(body)


# --- operators ----------------------------------------------------------------------------------


def test_load_pin_list_and_unload(serve) -> None:
    async def body(running: Running) -> None:
        stub, digest = running.stub, digest_of("upper")
        # The first connection to the store forgets the names known before it.
        while "store_connected 1.0" not in await asyncio.to_thread(running.scrape):
            await asyncio.sleep(0.01)
        loaded = await stub.LoadAdapter(pb.LoadAdapterRequest(ref="upper", pin=True))
        assert (loaded.adapter.digest, loaded.adapter.pinned) == (digest, True)
        assert list(loaded.adapter.names) == ["default/upper"]
        listed = await stub.ListResidentAdapters(pb.ListResidentAdaptersRequest())
        assert [a.digest for a in listed.adapters] == [digest]
        assert (await stub.PinAdapter(pb.PinAdapterRequest(ref="upper"))).adapter.digest == digest
        await stub.UnpinAdapter(pb.UnpinAdapterRequest(ref=digest))
        freed = await stub.UnloadAdapter(pb.UnloadAdapterRequest(ref=digest))
        assert freed.freed_bytes == 640
        error = await error_of(stub.UnloadAdapter(pb.UnloadAdapterRequest(ref="upper")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        error = await error_of(stub.LoadAdapter(pb.LoadAdapterRequest()))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert subjects(error) == ["ref"]

    serve(body, store=True)


def test_server_info(serve) -> None:
    async def body(running: Running) -> None:
        info = await running.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.base_model, info.architecture, info.dtype, info.device) == (
            "base",
            "FakeForCausalLM",
            "float32",
            "cpu",
        )
        assert info.layout_id == ""
        assert (info.limits.max_model_len, info.limits.max_queue) == (MAX_MODEL_LEN, 16)
        assert info.limits.memory_bytes == 1000
        memory = {use.name: (use.used_bytes, use.capacity_bytes) for use in info.memory}
        assert memory == {"weights": (5, 5), "kv_pages": (10, 40), "arena": (1, 2)}
        assert info.versions["loadout"] == "0"

    serve(body)


def test_ready_file_health_reflection_and_metrics(serve, tmp_path: Path) -> None:
    async def body(running: Running) -> None:
        server = running.server
        ready = json.loads((tmp_path / "ready.json").read_text())
        assert ready == {"grpc": server.address, "metrics": server.metrics_address}
        assert [await running.health_of(s) for s in ("", SERVICE)] == [SERVING, SERVING]
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in running.reflection.ServerReflectionInfo(iter([request])):
            names = {service.name for service in answer.list_services_response.service}
        assert SERVICE in names
        await running.generate(adapter="upper")
        await running.stub.LoadAdapter(pb.LoadAdapterRequest(ref="upper"))
        text = await asyncio.to_thread(running.scrape)
        assert 'vllm:lora_adapter_loaded{adapter_name="upper",level="gpu",' in text
        assert "loadout_inference_generated_tokens_total 4.0" in text
        assert 'loadout_inference_requests_total{finish_reason="stop"} 1.0' in text

    serve(body, store=True)


def test_an_address_in_use_is_said_before_anything_is_loaded(serve, tmp_path: Path) -> None:
    async def body(running: Running) -> None:
        config = Config(model=tmp_path, listen=running.server.address, metrics_listen="127.0.0.1:0")
        with pytest.raises(OSError, match="cannot listen on"):
            InferenceServer(config)
        gc.collect()  # what gRPC made of it ends on this loop

    serve(body)
