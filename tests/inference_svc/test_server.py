"""The whole front over a real channel: everything but the engine is what runs in production."""

import asyncio
import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from inference_svc import errors
from inference_svc.config import InferenceSettings
from inference_svc.server import SERVICE, InferenceServer
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.rpc.status import code_for
from tests.support.error_kinds import GENERAL, kinds_of
from tests.support.inference.serving import (
    LAYOUT,
    MAX_MODEL_LEN,
    SERVING,
    Running,
    digest_of,
    error_of,
    subjects,
)
from tests.support.wait import until_async


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
        assert (request.key, request.cache_seed) == ("", "default//")
        assert request.deadline_s is None

    serve(body, kind="byte_level")


def test_hosts_of_images_that_nobody_reads_are_a_warning(serve, tmp_path: Path) -> None:
    async def body(running: Running) -> None:
        [warning] = json.loads((tmp_path / "ready.json").read_text())["warnings"]
        assert warning.startswith("--image-hosts has no effect: the model reads no images")

    serve(body, http=True, image_hosts=("images.example.com",))


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
        assert request.key == digest_of("upper")
        assert (request.cache_seed, request.priority) == ("default/default/s", 3)
        await until_async(lambda: running.engine.layout_ids == [LAYOUT])
        info = await running.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.layout_id == LAYOUT

    serve(body, store=True)


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


def test_every_error_of_the_engine_reaches_the_caller(serve) -> None:
    found, wanted = {}, {}

    async def body(running: Running) -> None:
        for kind in (*GENERAL, *kinds_of(errors)):
            error = kind("as the engine says", subject="adapter")
            running.engine.errors[digest_of("upper")] = error
            answer, code = await error_of(running.generate(adapter="upper")), code_for(kind)
            is_secret = code is grpc.StatusCode.INTERNAL
            found[kind.__name__] = (answer.code(), answer.details())
            wanted[kind.__name__] = (code, "internal error" if is_secret else "as the engine says")
        scrape = await asyncio.to_thread(running.scrape)
        for code, number in Counter(code for code, _ in wanted.values()).items():
            assert f'code="{code.name}",method="Generate"}} {number}.0' in scrape

    serve(body, store=True)
    assert found == wanted


def test_a_running_request_id_is_refused(serve) -> None:
    async def body(running: Running) -> None:
        running.engine.hold.set()
        first = asyncio.create_task(running.generate(request_id="same"))
        await until_async(lambda: running.engine.num_running == 1)
        error = await error_of(running.generate(request_id="same"))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        running.engine.hold.clear()
        assert "".join(r.text for r in await first) == "abc"

    serve(body)


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
        config = InferenceSettings(
            model=tmp_path, listen=running.server.address, metrics_listen="127.0.0.1:0"
        )
        with pytest.raises(OSError, match="cannot listen on"):
            InferenceServer(config)
        gc.collect()  # what gRPC made of it ends on this loop

    serve(body)
