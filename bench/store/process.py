"""Runs the real store in its own process, with a plain gRPC stream in the same process that pulls
are compared with.

    python -m bench.store.process SETTINGS_JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch

from adapter_store.app import running_store
from adapter_store.config import StoreSettings
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc

RAW_BYTES = 512 << 10
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))


async def _raw(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    """Yields the requested number of messages of RAW_BYTES, all with the same bytes."""
    data = bytes(RAW_BYTES)
    for _ in range(int(request)):
        yield data


async def _serve(settings: StoreSettings) -> None:
    torch.set_num_threads(1)
    async with running_store(settings) as running:
        raw = grpc.aio.server()
        handler = grpc.unary_stream_rpc_method_handler(_raw)
        raw.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("raw", {"raw": handler}),)
        )
        raw_address = f"127.0.0.1:{raw.add_insecure_port('127.0.0.1:0')}"
        await raw.start()
        print(json.dumps({"grpc": running.grpc_address, "raw": raw_address}), flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the benchmark closes it
        await raw.stop(None)


@dataclass
class BenchStore:
    """The client of a store in its own process."""

    address: str
    raw_address: str
    process: psutil.Process

    def __post_init__(self) -> None:
        self.channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self.stub = pb_grpc.AdapterStoreServiceStub(self.channel)
        raw = grpc.insecure_channel(self.raw_address, options=CHANNEL_OPTIONS)
        self.raw = raw.unary_stream("/raw/raw")

    def register(self, name: str, source_uri: str) -> str:
        """Registers a source and returns the adapter's digest."""
        request = pb.RegisterAdapterRequest(name=name, source_uri=source_uri)
        return str(self.stub.RegisterAdapter(request).adapter.digest)

    def register_layout(self, layout: pb.ModelLayout) -> str:
        request = pb.RegisterLayoutRequest(layout=layout)
        return str(self.stub.RegisterLayout(request).layout_id)

    def pull(self, digest: str, layout_id: str) -> Any:
        """Returns the call, an iterator of responses."""
        return self.stub.PullAdapter(pb.PullAdapterRequest(digest=digest, layout_id=layout_id))

    def wait_ready(self, name: str) -> None:
        """Waits until the images of an adapter are compiled and stored."""
        ref = pb.GetAdapterRequest(ref=name)
        states = [pb.IMAGE_STATE_PENDING]
        while any(state != pb.IMAGE_STATE_READY for state in states):
            states = [s.state for s in self.stub.GetAdapter(ref).adapter.layout_states]

    def resident_bytes(self) -> int:
        return int(self.process.memory_info().rss)


@contextmanager
def bench_store(
    folder: Path, *, env: dict[str, str] | None = None, **settings: Any
) -> Iterator[BenchStore]:
    """Runs a store over `folder`/data that may read `folder`, within the context.

    `env` is added to the environment; `settings` replace the adapter store's.
    """
    values = {
        "listen": "127.0.0.1:0",
        "metrics_listen": "127.0.0.1:0",
        "data_dir": str(folder / "data"),
        "source_roots": str(folder),
        "log_level": "warning",
        **settings,
    }
    variables = os.environ | (env or {})
    command = [sys.executable, "-m", "bench.store.process", json.dumps(values)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            ready = json.loads(process.stdout.readline())
            yield BenchStore(ready["grpc"], ready["raw"], psutil.Process(process.pid))
        finally:
            process.stdin.close()


if __name__ == "__main__":
    asyncio.run(_serve(StoreSettings(**json.loads(sys.argv[1]))))
