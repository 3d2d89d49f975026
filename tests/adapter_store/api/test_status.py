"""Every error of the table over a real channel, with its code, message and details."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from adapter_store import errors
from adapter_store.api.status import StatusInterceptor
from adapter_store.metrics.metrics import Metrics
from servicekit.errors import NotFound
from servicekit.rpc.status import INTERNAL_MESSAGE, code_for
from tests.servicekit.kinds import kinds_of

KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


def call(kind: str, action, metrics: Metrics | None = None) -> object:
    """Calls a method of this kind whose handler runs `action(context)` after one response."""

    async def one(request, context):
        await action(context)
        return b"done"

    async def many(request, context):
        yield b"first"
        await action(context)

    async def main():
        server = grpc.aio.server(interceptors=[StatusInterceptor(metrics or Metrics())])
        handler = getattr(grpc, f"{kind}_rpc_method_handler")(
            many if kind.endswith("stream") else one
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", {"Do": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                method = getattr(channel, kind)("/test.Service/Do")
                made = method(iter([b"x"]) if kind.startswith("stream") else b"x")
                if kind.endswith("stream"):
                    return [response async for response in made]
                return await made
        finally:
            await server.stop(None)

    return asyncio.run(main())


def failing(error: BaseException):
    async def action(context):
        raise error

    return action


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", kinds_of(errors), ids=lambda error: error.__name__)
def test_every_error_for_every_kind_of_method(error, kind):
    metrics = Metrics()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        call(kind, failing(error("what is wrong", subject="the.culprit")), metrics)
    status = rpc_status.from_call(caught.value)
    expected = code_for(error).name
    assert caught.value.code().name == expected
    assert caught.value.details() == "what is wrong"
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.metadata["subject"]) == (error.reason, "the.culprit")
    requests = metrics.requests.labels("Do", expected)
    assert requests._value.get() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_exceptions_answer_a_fixed_text_and_are_logged(kind, caplog):
    with pytest.raises(grpc.aio.AioRpcError) as caught, caplog.at_level(logging.ERROR):
        call(kind, failing(RuntimeError("password is hunter2")))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == INTERNAL_MESSAGE
    assert "hunter2" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_caller_that_has_gone_is_no_fault_of_ours(kind, caplog):
    metrics = Metrics()
    with pytest.raises(grpc.aio.AioRpcError) as caught, caplog.at_level(logging.WARNING):
        call(kind, failing(grpc.aio.InternalError("execute_batch")), metrics)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert metrics.requests.labels("Do", "CANCELLED")._value.get() == 1
    assert "call failed" not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_of_the_handler_passes_through(kind):
    async def action(context):
        await context.abort(grpc.StatusCode.DATA_LOSS, "as said")

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        call(kind, action)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "as said")


@pytest.mark.parametrize("kind", KINDS)
def test_good_answers_pass_through(kind):
    async def action(context):
        pass

    metrics = Metrics()
    expected = [b"first"] if kind.endswith("stream") else b"done"
    assert call(kind, action, metrics) == expected
    assert metrics.requests.labels("Do", "OK")._value.get() == 1


def test_a_message_beyond_ascii_survives():
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        call("unary_unary", failing(NotFound("größe → 0", subject="größe")))
    assert caught.value.details() == "größe → 0"
