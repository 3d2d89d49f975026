import asyncio
import logging
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from inference_svc import errors
from inference_svc.api.grpc.status import StatusInterceptor
from inference_svc.api.load_report import LOAD_HEADER, REFUSED_HEADER
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc
from servicekit.errors import Draining, InvalidArgument, ServiceError
from servicekit.rpc.status import INTERNAL_MESSAGE, code_for
from servicekit.telemetry.recent_errors import CallEnd
from tests.servicekit.kinds import GENERAL, kinds_of


class Raising(pb_grpc.InferenceServiceServicer):
    """Answers every call with the error it was given, streams after one message."""

    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        await context.write(pb.GenerateResponse(text="first"))
        if self._error is None:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "aborted by hand")
        else:
            raise self._error

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self._error is None:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "aborted by hand")
        else:
            raise self._error


def ask(
    error: BaseException | None,
) -> tuple[list[grpc.aio.AioRpcError], list[tuple[str, str, str]]]:
    """What a unary and a streaming caller see over a real channel, and what was counted."""
    ends: list[tuple[str, str, str]] = []

    async def body() -> list[grpc.aio.AioRpcError]:
        def note(end: CallEnd) -> None:
            ends.append((end.method, end.code, end.reason))

        interceptor = StatusInterceptor(note, lambda: "TEXT load")
        server = grpc.aio.server(interceptors=[interceptor])
        pb_grpc.add_InferenceServiceServicer_to_server(Raising(error), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        seen = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetServerInfo(pb.GetServerInfoRequest())
            seen.append(caught.value)
            call = stub.Generate(pb.GenerateRequest())
            assert (await call.read()).text == "first"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            seen.append(caught.value)
        await server.stop(0)
        return seen

    return asyncio.run(body()), ends


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    status = rpc_status.from_call(error)
    assert status is not None
    found: dict[str, Any] = {}
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.type_url.rpartition(".")[2])
        found[kind.__name__] = kind.FromString(packed.value)
    return found


@pytest.mark.parametrize("kind", [*GENERAL, *kinds_of(errors)], ids=lambda kind: kind.__name__)
def test_every_error_has_its_status_unary_and_streamed(
    kind: type[ServiceError],
) -> None:
    seen, ends = ask(kind("what went wrong", subject="culprit", retry_after_s=1.5))
    code = code_for(kind)
    assert ends == [(method, code.name, kind.reason) for method in ("GetServerInfo", "Generate")]
    for error in seen:
        assert error.code() is code
        trailers = dict(error.trailing_metadata())
        assert trailers[LOAD_HEADER] == "TEXT load"
        goes_elsewhere = kind in (Draining, errors.QueueFull)
        assert trailers.get(REFUSED_HEADER) == (kind.reason if goes_elsewhere else None)
        if code is grpc.StatusCode.INTERNAL:
            assert error.details() == INTERNAL_MESSAGE
            continue
        assert error.details() == "what went wrong"
        details = details_of(error)
        assert details["ErrorInfo"].reason == kind.reason
        assert details["ErrorInfo"].metadata["subject"] == "culprit"
        assert details["RetryInfo"].retry_delay.ToMilliseconds() == 1500
        violations = details["BadRequest"].field_violations if "BadRequest" in details else []
        assert [v.field for v in violations] == ["culprit"] * (kind is InvalidArgument)


@pytest.mark.parametrize("error", [ValueError("secret path"), ServiceError("secret")])
def test_the_unknown_answers_a_fixed_text_and_is_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "inference_svc.api.grpc.status"):
        seen, ends = ask(error)
    assert [e.code() for e in seen] == [grpc.StatusCode.INTERNAL] * 2
    assert [e.details() for e in seen] == [INTERNAL_MESSAGE] * 2
    assert [code for _, code, _ in ends] == ["INTERNAL"] * 2
    assert "secret" in caplog.text


def test_an_abort_passes_through() -> None:
    seen, ends = ask(None)
    assert [e.details() for e in seen] == ["aborted by hand"] * 2
    assert [code for _, code, _ in ends] == ["OUT_OF_RANGE"] * 2
