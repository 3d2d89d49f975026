"""Scripted servers, a client of them, and what it sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from loadout import Client
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as store_grpc
from loadout.inference.v1 import inference_pb2 as inference_pb
from loadout.inference.v1 import inference_pb2_grpc as inference_grpc
from loadout.retry import RetryPolicy
from tests.support.loadout.scripted import Behaviour, FakeInference, FakeStore, Server
from tests.support.up import Up


@pytest.fixture
def fake_store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def fake_inference() -> FakeInference:
    return FakeInference()


@pytest.fixture
def store_server(fake_store: FakeStore) -> Iterator[Server]:
    server = Server(lambda s: store_grpc.add_AdapterStoreServiceServicer_to_server(fake_store, s))
    yield server
    server.kill()


@pytest.fixture
def start_inference(fake_inference: FakeInference) -> Iterator[Callable[..., Server]]:
    """Starts a server of `fake_inference`, also a second one on the address of a killed first."""
    servers = []

    def start(address: str = "127.0.0.1:0") -> Server:
        add = inference_grpc.add_InferenceServiceServicer_to_server
        servers.append(Server(lambda s: add(fake_inference, s), address))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def inference_server(start_inference: Callable[..., Server]) -> Server:
    return start_inference()


@pytest.fixture
def quick_retry() -> RetryPolicy:
    return RetryPolicy(max_attempts=4, first_backoff_s=0.02, max_backoff_s=0.1)


@pytest.fixture
def client(
    store_server: Server, inference_server: Server, quick_retry: RetryPolicy
) -> Iterator[Client]:
    addresses = {"store": store_server.address, "inference": inference_server.address}
    with Client(**addresses, timeout_s=20, retry=quick_retry) as client:
        yield client


@pytest.fixture
def fail() -> Callable[..., Behaviour]:
    """`fail(code, reason, subject, retry_after_s)`: a refusal as our services write it.

    Without a reason it is a bare status, as a proxy or a lost connection leaves it.
    """

    def build(
        code: grpc.StatusCode,
        reason: str = "",
        subject: str = "",
        retry_after_s: float | None = None,
        message: str = "no",
    ) -> Behaviour:
        details: list[Any] = []
        if reason:
            details.append(error_details_pb2.ErrorInfo(reason=reason, domain="loadout"))
        if subject:
            violation = error_details_pb2.BadRequest.FieldViolation(field=subject)
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        if retry_after_s is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(retry_after_s * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))

        def behave(request: Any, context: grpc.ServicerContext) -> None:
            if not details:
                context.abort(code, message)
            packed = [any_pb2.Any() for _ in details]
            for box, detail in zip(packed, details, strict=True):
                box.Pack(detail)
            number = code_pb2.Code.Value(code.name)
            status = status_pb2.Status(code=number, message=message, details=packed)
            context.abort_with_status(rpc_status.to_status(status))

        return behave

    return build


@pytest.fixture
def adapter_folder(tmp_path: Path) -> Path:
    """A folder as PEFT saves one, with weights of two and a half upload chunks."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    header = (2).to_bytes(8, "little") + b"{}"
    weights = header + bytes(range(256)) * (2 * 2048 + 1024)
    (folder / "adapter_model.safetensors").write_bytes(weights[: -len(header)])
    (folder / "README.md").write_text("not part of the adapter")
    return folder


@pytest.fixture
def registered() -> store_pb.RegisterAdapterResponse:
    adapter = store_pb.Adapter(name="default/a", version=3, digest="sha256:00", rank=8)
    return store_pb.RegisterAdapterResponse(adapter=adapter, revision=41)


@pytest.fixture
def chunks() -> list[inference_pb.GenerateResponse]:
    """A whole generation of two responses."""
    return [
        inference_pb.GenerateResponse(request_id="r", token_ids=[5, 6], text="he"),
        inference_pb.GenerateResponse(
            request_id="r",
            token_ids=[7],
            text="y",
            finish_reason=inference_pb.FINISH_REASON_STOP,
            usage=inference_pb.Usage(prompt_tokens=2, completion_tokens=3),
            adapter=inference_pb.AdapterIdentity(name="default/a@3", digest="sha256:00"),
            timings=inference_pb.Timings(first_token_seconds=0.25),
        ),
    ]


@pytest.fixture(scope="module")
def start_up() -> Iterator[Callable[..., Up]]:
    """`start_up(*arguments, cwd=DIR)`: `loadout up` in a process of its own, ended afterwards.
    Further arguments are those of `Up`."""
    with ExitStack() as stack:

        def start(*arguments: str, **further: Any) -> Up:
            return stack.enter_context(Up(arguments, **further))

        yield start
