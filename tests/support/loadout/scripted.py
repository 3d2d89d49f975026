"""In-process gRPC servers of the real contract, whose answers the tests script."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from loadout.adapter_store.v1 import adapter_store_pb2_grpc as store_grpc
from loadout.inference.v1 import inference_pb2_grpc as inference_grpc

Behaviour = Callable[[Any, grpc.ServicerContext], Any]


class Scripted:
    """Answers each RPC with the next scripted behaviour; the last one stays.

    `requests` keeps what came in, per RPC; `cancelled` is set when a client leaves a stream.
    """

    def __init__(self) -> None:
        self.requests: dict[str, list[Any]] = {}
        self.cancelled = threading.Event()
        self._script: dict[str, list[Behaviour]] = {}

    def on(self, rpc: str, *behaviours: Behaviour | Any) -> None:
        self._script[rpc] = [
            each if callable(each) else (lambda request, context, answer=each: answer)
            for each in behaviours
        ]

    def answer(self, rpc: str, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.setdefault(rpc, []).append(request)
        script = self._script[rpc]
        behaviour = script.pop(0) if len(script) > 1 else script[0]
        return behaviour(request, context)


def _methods(rpcs: list[str]) -> dict[str, Any]:
    def method(rpc: str) -> Any:
        def handle(self: Scripted, request: Any, context: grpc.ServicerContext) -> Any:
            context.add_callback(lambda: context.code() or self.cancelled.set())
            if rpc in ("UploadAdapter", "UploadImage"):
                request = list(request)
            return self.answer(rpc, request, context)

        return handle

    return {rpc: method(rpc) for rpc in rpcs}


def _rpcs(servicer: type) -> list[str]:
    return [name for name in vars(servicer) if name[0].isupper()]


class FakeStore(Scripted, store_grpc.AdapterStoreServiceServicer):
    locals().update(_methods(_rpcs(store_grpc.AdapterStoreServiceServicer)))


class FakeInference(Scripted, inference_grpc.InferenceServiceServicer):
    locals().update(_methods(_rpcs(inference_grpc.InferenceServiceServicer)))


class Server:
    """A gRPC server on a free port of 127.0.0.1; `kill` drops it with all connections."""

    def __init__(
        self,
        add: Callable[[grpc.Server], None],
        address: str = "127.0.0.1:0",
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._grpc = grpc.server(ThreadPoolExecutor(8))
        add(self._grpc)
        if credentials is None:
            port = self._grpc.add_insecure_port(address)
        else:
            port = self._grpc.add_secure_port(address, credentials)
        self.address = f"127.0.0.1:{port}"
        self._grpc.start()

    def kill(self) -> None:
        self._grpc.stop(grace=None).wait()
