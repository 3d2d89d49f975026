"""What callers, the log and `on_end` learn of a call, for every kind of method."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from google.rpc import error_details_pb2
from grpc_status import rpc_status

import adapter_store.errors
import inference_svc.errors
from adapter_store.core import ROLES
from servicekit.auth.authenticator import Authenticator
from servicekit.auth.policy import Policy, PolicyFile, parse_policy
from servicekit.errors import Draining, NotFound, ServiceError, Unauthenticated
from servicekit.rpc import call_context
from servicekit.rpc.call import Trailers
from servicekit.rpc.interceptor import CallInterceptor, CallRules, TokenInterceptor
from servicekit.rpc.places import CALLER
from servicekit.rpc.requests import RequestBounds
from servicekit.rpc.status import INTERNAL_MESSAGE, code_for
from servicekit.telemetry.recent_errors import CallEnd
from tests.servicekit.rpc.served import call_places
from tests.support.access.policies import token_lines, token_of
from tests.support.error_kinds import GENERAL, kinds_of

KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream", "writing"]
"""Kinds of methods; `writing` is a unary_stream whose handler writes its responses itself."""
ERRORS = [*GENERAL, *kinds_of(adapter_store.errors), *kinds_of(inference_svc.errors)]
Action = Callable[[grpc.aio.ServicerContext], Awaitable[None]]
TENANTS = {"first": "team-a", "second": "team-a", "other": "team-b"}
"""Tokens by their names."""


def trailers(error: Exception | None) -> Trailers:
    return (("x-error", type(error).__name__),)


RULES = CallRules(
    "test.domain",
    requests=dict.fromkeys(("Do", "Poll", "Elsewhere"), RequestBounds(BytesValue)),
    polled=frozenset({"Poll"}),
    logged_elsewhere=frozenset({"Elsewhere"}),
    facts=("tenant",),
    private=frozenset({"secret"}),
    trailers=trailers,
)


async def no_requests() -> AsyncIterator[bytes]:
    """Yields nothing as long as the call lasts: with a write under way when the server refuses,
    grpc.aio's client may report the write's failure instead."""
    await asyncio.Event().wait()
    yield b""


def call(
    kind: str, action: Action, method: str = "Do", drain: bool = False
) -> tuple[object, list[CallEnd], Any]:
    """Calls a method of this kind whose handler runs `action(context)` after one response. Returns
    the answer or the error, the ends that were noted, and the trailers."""
    ends: list[CallEnd] = []
    arity = "unary_stream" if kind == "writing" else kind

    async def one(request: Any, context: Any) -> bytes:
        await action(context)
        return b"done"

    async def many(request: Any, context: Any) -> Any:
        yield b"first"
        await action(context)

    async def write(request: Any, context: Any) -> None:
        await context.write(b"first")
        await action(context)

    handlers = {"writing": write, "unary_stream": many, "stream_stream": many}

    async def main() -> tuple[object, list[CallEnd], Any]:
        interceptor = CallInterceptor(RULES, call_places(), ends.append)
        if drain:
            await interceptor.drain(0)
        server = grpc.aio.server(interceptors=[interceptor])
        handler = getattr(grpc, f"{arity}_rpc_method_handler")(handlers.get(kind, one))
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", {method: handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                made = getattr(channel, arity)(f"/test.Service/{method}")(
                    no_requests() if arity.startswith("stream") else b""
                )
                try:
                    if arity.endswith("stream"):
                        answer: object = [response async for response in made]
                    else:
                        answer = await made
                except grpc.aio.AioRpcError as error:
                    answer = error
                return answer, ends, dict(await made.trailing_metadata())
        finally:
            await server.stop(60)  # handlers whose answer has arrived still end

    return asyncio.run(main())


def failing(error: BaseException) -> Action:
    async def action(context: grpc.aio.ServicerContext) -> None:
        raise error

    return action


async def nothing(context: grpc.aio.ServicerContext) -> None:
    call_context.note(tenant="team-a", empty="")


@pytest.mark.parametrize("kind", KINDS)
def test_good_answers_pass_through(kind: str) -> None:
    answer, [end], sent = call(kind, nothing)
    assert answer == ([b"first"] if kind.endswith(("stream", "writing")) else b"done")
    assert (end.method, end.code, end.reason) == ("Do", "OK", "")
    assert end.facts.keys() == {"request_id", "tenant"}
    assert end.facts["tenant"] == "team-a"
    assert sent["x-error"] == "NoneType"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_a_status_with_details(kind: str) -> None:
    error, [end], sent = call(kind, failing(NotFound("what is wrong", subject="the.culprit")))
    assert isinstance(error, grpc.aio.AioRpcError)
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "what is wrong")
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("NOT_FOUND", "test.domain")
    assert info.metadata["subject"] == "the.culprit"
    assert (end.code, end.reason, end.message) == ("NOT_FOUND", "NOT_FOUND", "what is wrong")
    assert sent["x-error"] == "NotFound"


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_has_its_code(error: type[ServiceError]) -> None:
    caught, [end], _ = call("unary_unary", failing(error("what is wrong")))
    assert isinstance(caught, grpc.aio.AioRpcError)
    assert caught.code() is code_for(error)
    assert (end.code, end.reason) == (code_for(error).name, error.reason)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bug_answers_a_fixed_text_and_is_logged(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        error, [end], _ = call(kind, failing(RuntimeError("password is hunter2")))
    assert isinstance(error, grpc.aio.AioRpcError)
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE)
    assert "hunter2" in caplog.text
    assert end.reason == "INTERNAL"
    assert end.message.startswith("RuntimeError at test_interceptor.py:")


@pytest.mark.parametrize("kind", KINDS)
def test_a_caller_that_has_gone_is_no_fault(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        error, [end], _ = call(kind, failing(grpc.aio.InternalError("execute_batch")))
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.code() is grpc.StatusCode.CANCELLED
    assert (end.code, end.reason) == ("CANCELLED", "")
    assert "call failed" not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_of_the_handler_passes_through(kind: str) -> None:
    async def action(context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.DATA_LOSS, "by hand")

    error, [end], _ = call(kind, action)
    assert isinstance(error, grpc.aio.AioRpcError)
    assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "by hand")
    assert end.code == "DATA_LOSS"


@pytest.mark.parametrize("kind", KINDS)
def test_a_draining_server_answers(kind: str) -> None:
    error, [end], _ = call(kind, nothing, drain=True)
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert end.reason == Draining.reason


def test_a_message_beyond_ascii_survives() -> None:
    error, _, _ = call("unary_unary", failing(NotFound("größe → 0", subject="größe")))
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.details() == "größe → 0"


def lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [each for each in caplog.records if each.name == "servicekit.rpc.interceptor"]


def test_each_call_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        call("unary_unary", nothing)
        call("unary_unary", failing(NotFound("gone")))
        call("unary_unary", nothing, method="Poll")
        call("unary_unary", failing(NotFound("of a prompt", subject="secret")), method="Poll")
        call("unary_unary", nothing, method="Elsewhere")
        call("unary_unary", failing(Unauthenticated("no token")), method="Elsewhere")
    done, refused, polled, private, unread = lines(caplog)
    assert (done.message, done.method, done.code) == ("call finished", "Do", "OK")
    assert (done.tenant, done.levelname) == ("team-a", "INFO")
    assert done.seconds >= 0
    assert (refused.message, refused.reason, refused.why) == ("call refused", "NOT_FOUND", "gone")
    assert polled.levelname == "DEBUG"
    assert (private.levelname, private.why) == ("INFO", "")
    assert (unread.message, unread.method, unread.reason) == (
        *("call refused", "Elsewhere", "UNAUTHENTICATED"),
    )


def test_a_call_without_a_token_is_refused_unread(caplog: pytest.LogCaptureFixture) -> None:
    refusals: list[tuple[str, str, str]] = []
    ends: list[CallEnd] = []

    async def handler(request: Any, context: Any) -> bytes:
        raise AssertionError("the handler was called")

    async def main() -> grpc.aio.AioRpcError:
        tokens = TokenInterceptor(
            Authenticator(PolicyFile(None, lambda text: Policy(), Policy())),
            RULES.domain,
            lambda method, peer, error: refusals.append((method, peer, error.reason)),
        )
        server = grpc.aio.server(
            interceptors=[CallInterceptor(RULES, call_places(), ends.append), tokens]
        )
        handlers = {"Elsewhere": grpc.unary_unary_rpc_method_handler(handler)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", handlers),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await channel.unary_unary("/test.Service/Elsewhere")(b"x")
                return raised.value
        finally:
            await server.stop(60)  # handlers whose answer has arrived still end

    with caplog.at_level(logging.INFO):
        error = asyncio.run(main())
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    [(method, peer, reason)], [end], [line] = refusals, ends, lines(caplog)
    assert (method, reason) == ("Elsewhere", "UNAUTHENTICATED")
    assert (end.code, end.facts["peer"]) == ("UNAUTHENTICATED", peer)
    assert (line.method, line.reason, line.peer) == ("Elsewhere", "UNAUTHENTICATED", peer)


def test_a_handler_can_let_go_of_its_request() -> None:
    """Nobody else holds it, however long the call lasts."""
    counts: list[int] = []

    async def handler(request: Any, context: Any) -> BytesValue:
        counts.append(sys.getrefcount(request))
        return BytesValue()

    async def main() -> None:
        server = grpc.aio.server(
            interceptors=[CallInterceptor(RULES, call_places(), lambda end: None)]
        )
        handlers = {"Do": grpc.unary_unary_rpc_method_handler(handler, BytesValue.FromString)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", handlers),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await channel.unary_unary("/test.Service/Do")(b"")
        await server.stop(60)

    asyncio.run(main())
    assert counts == [2]  # the handler's, and that of the function that counts


def test_tokens_of_one_tenant_are_one_account() -> None:
    """Their calls take one share between them."""
    policy = parse_policy(
        "".join(token_lines(name, ["reader"], [tenant]) for name, tenant in TENANTS.items()),
        ROLES,
    )
    accounts: dict[str, str] = {}

    async def handler(request: Any, context: Any) -> BytesValue:
        accounts[dict(context.invocation_metadata())["x-request-id"]] = CALLER.get()
        return BytesValue()

    async def main() -> None:
        policies = PolicyFile(None, lambda text: policy, policy)
        tokens = TokenInterceptor(Authenticator(policies), RULES.domain, lambda *refused: None)
        calls = CallInterceptor(RULES, call_places(), lambda end: None)
        server = grpc.aio.server(interceptors=[calls, tokens])
        handlers = {
            "Do": grpc.unary_unary_rpc_method_handler(
                handler, response_serializer=BytesValue.SerializeToString
            )
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", handlers),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for name in TENANTS:
                token = ("authorization", f"Bearer {token_of(name)}")
                do = channel.unary_unary("/test.Service/Do")
                await do(b"", metadata=(token, ("x-request-id", name)))
        await server.stop(60)

    asyncio.run(main())
    assert accounts["first"] == accounts["second"] != accounts["other"]
