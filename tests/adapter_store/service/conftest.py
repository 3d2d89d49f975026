"""A served store in this process, with real channels to it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import grpc
import pytest
import torch

from adapter_store.app import RunningStore, running_store
from adapter_store.config import StoreSettings
from adapter_store.core import Layout, Target
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc
from servicekit.rpc import interceptor
from tests.support import forks
from tests.support.wait import TIMEOUT_S, until

DTYPES = {"F32": pb.DATA_TYPE_FLOAT32, "F16": pb.DATA_TYPE_FLOAT16, "BF16": pb.DATA_TYPE_BFLOAT16}
QUIET_S = 0.02
"""How long a store that stops waits for further calls: its tests have ended theirs by then."""


def layout_message(layout: Layout) -> pb.ModelLayout:
    """As a server sends it that reads images up to the layout's format."""
    return pb.ModelLayout(
        base_model=layout.base_model,
        config_sha256=layout.config_sha256,
        dtype=DTYPES[layout.dtype.value],
        image_formats=range(1, layout.image_format + 1),
        targets=map(target_message, layout.targets),
    )


def target_message(target: Target) -> pb.Target:
    message = pb.Target(
        name=target.name,
        layer=target.layer,
        group=target.group,
        kind=pb.TargetKind.Value(f"TARGET_KIND_{target.kind.name}"),
        in_features=target.in_features,
        out_features=target.out_features,
        experts=target.experts,
        space=target.space,
        held=pb.Held.Value(f"HELD_{target.held.name}"),
        base_hashes=target.base_hashes,
        base_dtype=DTYPES[target.base_dtype.value] if target.base_dtype else 0,
        tied_to=target.tied_to,
    )
    for name in ("in_slice", "out_slice", "expert_slice"):
        if (part := getattr(target, name)) is not None:
            getattr(message, name).CopyFrom(pb.Slice(start=part[0], end=part[1]))
    if target.rank_part is not None:
        index, count = target.rank_part
        message.rank_part.CopyFrom(pb.RankPart(index=index, count=count))
    for other in target.other_names:
        added = message.other_names.add(
            name=other.name,
            block_sizes=other.block_sizes,
            block_part=other.block_part,
            transposed=other.transposed,
        )
        if other.outputs is not None:
            added.outputs.CopyFrom(pb.Slice(start=other.outputs[0], end=other.outputs[1]))
    return message


@dataclass
class Pulled:
    """What a pull gave, its hashes checked as a client checks them."""

    header: pb.ImageHeader
    data: bytes = b""
    part_ends: list[int] = field(default_factory=list)
    is_whole: bool = False


class Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds a token to every call."""

    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details._replace(metadata=self._metadata), request)

    intercept_unary_stream = intercept_unary_unary
    intercept_stream_unary = intercept_unary_unary
    intercept_stream_stream = intercept_unary_unary


class Client:
    """The contract as a caller sees it. `credentials`: of the channel; None: no TLS."""

    def __init__(
        self, address: str, token: str = "", credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        self.address = address
        if credentials is None:
            self.channel = grpc.insecure_channel(address)
        else:
            self.channel = grpc.secure_channel(address, credentials)
        if token:
            self.channel = grpc.intercept_channel(self.channel, Bearer(token))
        self.stub = pb_grpc.AdapterStoreServiceStub(self.channel)

    def register(self, name: str, folder, **fields) -> pb.RegisterAdapterResponse:
        return self.stub.RegisterAdapter(
            pb.RegisterAdapterRequest(name=name, source_uri=f"file://{folder}", **fields)
        )

    def upload(self, name: str, files: dict[str, bytes], chunk_bytes: int = 1000, **fields):
        def requests() -> Iterator[pb.UploadAdapterRequest]:
            yield pb.UploadAdapterRequest(meta=pb.UploadMeta(name=name, **fields))
            for file_name, data in files.items():
                for offset in range(0, len(data), chunk_bytes):
                    part = data[offset : offset + chunk_bytes]
                    chunk = pb.FileChunk(file_name=file_name, offset=offset, data=part)
                    yield pb.UploadAdapterRequest(chunk=chunk)

        return self.stub.UploadAdapter(requests())

    def register_layout(self, layout: Layout) -> str:
        return self.announce(layout).layout_id

    def announce(self, layout: Layout, **fields) -> pb.RegisterLayoutResponse:
        """Registers a layout with an announcement of these fields."""
        request = pb.RegisterLayoutRequest(
            layout=layout_message(layout), announcement=pb.Announcement(**fields)
        )
        return self.stub.RegisterLayout(request)

    def get(self, ref: str) -> pb.Adapter:
        return self.stub.GetAdapter(pb.GetAdapterRequest(ref=ref)).adapter

    def pull(self, digest: str, layout_id: str, offset: int = 0, image_id: str = "") -> Pulled:
        """Pulls to the end; the part that the stream starts within is not hashed."""
        stream = self.stub.PullAdapter(
            pb.PullAdapterRequest(
                digest=digest, layout_id=layout_id, offset=offset, image_id=image_id
            )
        )
        pulled = Pulled(next(stream).header)
        position = part_start = pulled.header.offset
        hashes = []
        for response in stream:
            kind = response.WhichOneof("part")
            if kind == "chunk":
                assert response.chunk.offset == position
                pulled.data += response.chunk.data
                position += len(response.chunk.data)
            elif kind == "layer_end":
                end = response.layer_end
                part = pulled.data[part_start - pulled.header.offset :]
                assert end.end_offset == position
                if pulled.part_ends or pulled.header.offset == 0:
                    assert hashlib.sha256(part).digest() == end.sha256
                hashes.append(end.sha256)
                pulled.part_ends.append(position)
                part_start = position
            else:
                if pulled.header.offset == 0:
                    whole = hashlib.sha256(b"".join(hashes)).digest()
                    assert response.trailer.sha256 == whole
                assert position == pulled.header.total_bytes
                pulled.is_whole = True
        return pulled

    def close(self) -> None:
        self.channel.close()


class Served:
    """A running store on a thread's own event loop."""

    def __init__(self, settings: StoreSettings) -> None:
        self._ready = threading.Event()
        self._settings = settings
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S)
        if self._error is not None:
            self._thread.join()
            raise self._error
        self._clients: list[Client] = []
        self.client = self.connect()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            async with running_store(self._settings) as self.running:
                self.running: RunningStore
                self._ready.set()
                await self._stop.wait()
        except BaseException as error:
            self._error = error
            self._ready.set()

    def connect(self, token: str = "", credentials=None) -> Client:
        """A client that is closed when the store stops."""
        self._clients.append(Client(self.running.grpc_address, token, credentials))
        return self._clients[-1]

    def run(self, coroutine):
        """Runs a coroutine on the store's own loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    def idle(self) -> None:
        """Waits until everything wanted ahead is made."""
        self.run(self.running.store.precompiler.wait_idle())

    def begin_stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.begin_stop()
        for client in self._clients:
            client.close()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


@contextmanager
def serving(folder):
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(interceptor, "QUIET_SECONDS", QUIET_S)

        def start(**settings) -> Served:
            values = {
                "listen": "127.0.0.1:0",
                "metrics_listen": "127.0.0.1:0",
                "data_dir": folder / "data",
                "source_roots": (folder,),
                "compile_workers": 1,
                "grace_seconds": 5,
                **settings,
            }
            served = Served(StoreSettings(**values))
            stack.callback(served.stop)
            return served

        yield start


@pytest.fixture
def serve(tmp_path):
    """serve(**settings): a served store over tmp_path/data that may read what tmp_path holds."""
    with serving(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def serve_shared(shared_folder):
    """Does as `serve`, over shared_folder, for all tests of a module."""
    with serving(shared_folder) as start:
        yield start


class Process:
    """The store as a process with the flags of an operator. `log` is all that it writes."""

    def __init__(self, tmp_path, *arguments: str, volume=None, **environment: str) -> None:
        self.ready_file = tmp_path / "ready.json"
        self.ready_file.unlink(missing_ok=True)
        self.log = tmp_path / "store.log"
        self.log.unlink(missing_ok=True)
        flags = [
            *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
            *("--data-dir", str(tmp_path / "data"), "--source-roots", str(tmp_path)),
            *("--ready-file", str(self.ready_file), "--log-format", "json"),
        ]
        self.process = forks.start(
            "adapter_store", [*flags, *arguments], self.log, environment, volume
        )

    def wait_until_ready(self) -> dict[str, str]:
        until(lambda: self.ready_file.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        return json.loads(self.ready_file.read_text())

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, number: int) -> tuple[int, str]:
        """Signals, waits; gives the exit status and the log."""
        self.signal(number)
        return self.process.wait(TIMEOUT_S), self.log.read_text()


@pytest.fixture
def spawn(tmp_path):
    """spawn("--flag", "value", ..., NAME="value"): a store as a process, with that environment; on
    a `volume` if one is given."""
    made: list[Process] = []

    def start(*arguments: str, volume=None, **environment: str) -> Process:
        made.append(Process(tmp_path, *arguments, volume=volume, **environment))
        return made[-1]

    yield start
    for process in made:
        process.process.kill()
        process.process.wait()


@pytest.fixture
def own_threads():
    """A store that starts takes torch's threads away from this process."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def store(serve) -> Served:
    return serve()


@pytest.fixture
def client(store) -> Client:
    return store.client


@pytest.fixture
def connect():
    """connect(address, token, credentials): a Client that is closed in the end."""
    with ExitStack() as stack:

        def make(address: str, token: str = "", credentials=None) -> Client:
            client = Client(address, token, credentials)
            stack.callback(client.close)
            return client

        yield make


@pytest.fixture
def refused():
    """with refused(code, "text", ...) as error: the call is answered so, and names each text."""

    class Refused:
        def __init__(self, code: str, *texts: str) -> None:
            self.code, self.texts = code, texts

        def __enter__(self) -> Refused:
            return self

        def __exit__(self, kind, error, traceback) -> bool:
            assert isinstance(error, grpc.RpcError), f"not refused: {error!r}"
            self.error = error
            assert error.code().name == self.code, error.details()
            for text in self.texts:
                assert text in error.details()
            return True

    return Refused
