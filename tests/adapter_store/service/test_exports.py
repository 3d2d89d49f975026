"""ExportAdapter: a plain LoRA of an adapter over real channels, with the client's own checks."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import loadout
from adapter_store.images.pull import CHUNK_BYTES
from contract.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from loadout import AsyncClient, errors
from loadout._client.export import Export
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.store.adapters import save_adapter
from tests.support.store.served import Served

pytestmark = [pytest.mark.processes]


@pytest.fixture
def open_client() -> Iterator[Callable[..., loadout.Client]]:
    made: list[loadout.Client] = []

    def start(of: Served, token: str | None = None) -> loadout.Client:
        made.append(loadout.Client(store=of.running.grpc_address, token=token))
        return made[-1]

    yield start
    for client in made:
        client.close()


def messages_of(store: Served, ref: str) -> list[pb.ExportAdapterResponse]:
    return list(store.client.stub.ExportAdapter(pb.ExportAdapterRequest(ref=ref)))


def test_the_folder_is_registered_again_as_the_same_change(
    store: Served, open_client: Any, tmp_path: Path
) -> None:
    client = open_client(store)
    folder = save_adapter(tmp_path / "a", use_rslora=True, rank_pattern={"v_proj": 4})
    registered = store.client.register("a", folder).adapter
    exported = client.export("a@1", tmp_path / "out" / "plain")
    assert (exported.name, exported.version) == ("default/a", 1)
    assert exported.digest == registered.digest
    found = sorted(path.name for path in (tmp_path / "out").rglob("*"))
    assert found == [CONFIG_FILE, WEIGHTS_FILE, "plain"]  # and nothing half done beside it
    made, saved = (load_file(each / WEIGHTS_FILE) for each in (tmp_path / "out/plain", folder))
    assert made.keys() == saved.keys()
    assert client.register("b", tmp_path / "out" / "plain").adapter.rank == 4
    with pytest.raises(errors.InvalidArgument, match="exists"):
        client.export("a", folder)

    async def run() -> None:
        async with AsyncClient(store=store.running.grpc_address) as other:
            await other.export(registered.digest, tmp_path / "async")

    asyncio.run(run())
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        assert (tmp_path / "async" / name).read_bytes() == (
            tmp_path / "out/plain" / name
        ).read_bytes()


def test_a_large_one_comes_in_chunks_and_leaves_no_memory_reserved(
    store: Served, tmp_path: Path
) -> None:
    key = "base_model.model.model.layers.0.q.lora_{}.weight"
    features = 3 * CHUNK_BYTES // 16
    tensors = {key.format("A"): torch.ones(8, features), key.format("B"): torch.ones(16, 8)}
    folder = save_adapter(tmp_path / "large", ("q",), rank=8, tensors=tensors)
    store.client.register("large", folder)
    header, *chunks, trailer = messages_of(store, "large")
    assert [file.sha256 for file in header.header.files] == ["", ""]
    data: dict[str, bytes] = {}
    for message in chunks:
        chunk = message.chunk
        assert 0 < len(chunk.data) <= CHUNK_BYTES
        assert chunk.offset == len(data.get(chunk.file_name, b""))
        data[chunk.file_name] = data.get(chunk.file_name, b"") + chunk.data
    assert {file.name: file.size_bytes for file in header.header.files} == {
        name: len(content) for name, content in data.items()
    }
    assert {file.name: file.sha256 for file in trailer.trailer.files} == {
        name: hashlib.sha256(content).hexdigest() for name, content in data.items()
    }
    assert store.running.store.use_cases.calls.places.pulled_bytes.used == 0


def test_refusals(store: Served, open_client: Any, tmp_path: Path) -> None:
    client = open_client(store)
    dora = save_adapter(tmp_path / "bias", rank=4, alora_invocation_tokens=[3, 4])
    store.client.register("alora", dora)
    with pytest.raises(errors.FailedPrecondition, match="aLoRA") as refused:
        client.export("alora", tmp_path / "out")
    assert (refused.value.reason, refused.value.subject) == ("NOT_PLAIN_LORA", "alora")
    with pytest.raises(errors.NotFound):
        client.export("nothing", tmp_path / "out")
    store.client.register("a", save_adapter(tmp_path / "a"))
    sizes: list[int] = []

    def refuse(num_bytes: int) -> None:
        sizes.append(num_bytes)
        raise errors.ResourceExhausted("no room", subject="disk")

    with pytest.raises(errors.ResourceExhausted, match="no room"):
        client.export("a", tmp_path / "out", admit=refuse)
    client.export("a", tmp_path / "elsewhere", admit=sizes.append)
    exported = sum(each.stat().st_size for each in (tmp_path / "elsewhere").iterdir())
    assert sizes == [exported, exported]
    assert not (tmp_path / "out").exists()


def test_a_damaged_source_gives_no_folder(store: Served, open_client: Any, tmp_path: Path) -> None:
    digest = store.client.register("a", save_adapter(tmp_path / "a")).adapter.digest
    blob = tmp_path / "data" / "blobs" / digest.removeprefix("sha256:") / WEIGHTS_FILE
    data = bytearray(blob.read_bytes())
    data[-9] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    with pytest.raises(errors.DataLoss, match="register the adapter again"):
        open_client(store).export("a", tmp_path / "out" / "a")
    assert not list((tmp_path / "out").iterdir())


def test_other_tenants_adapters_do_not_exist(serve: Any, open_client: Any, tmp_path: Path) -> None:
    publisher = token_lines("publisher", ["publisher"], ["acme"])
    reader = token_lines("reader", ["reader"], ["zeta"])
    policy = write_policy(tmp_path, publisher, reader)
    store = serve(policy_file=policy)
    store.connect(token_of("publisher")).register("acme/a", save_adapter(tmp_path / "a"))
    with pytest.raises(errors.NotFound):
        open_client(store, token_of("reader")).export("acme/a", tmp_path / "out")
    with pytest.raises(errors.PermissionDenied):
        open_client(store, token_of("publisher")).export("acme/a", tmp_path / "out")


def header(**sizes: int) -> pb.ExportAdapterResponse:
    names = {"config": CONFIG_FILE, "weights": WEIGHTS_FILE}
    files = [pb.SourceFile(name=names.get(name, name), size_bytes=sizes[name]) for name in sizes]
    return pb.ExportAdapterResponse(header=pb.ExportHeader(files=files))


def chunk(name: str, offset: int, data: bytes) -> pb.ExportAdapterResponse:
    return pb.ExportAdapterResponse(chunk=pb.FileChunk(file_name=name, offset=offset, data=data))


def trailer(**files: bytes) -> pb.ExportAdapterResponse:
    names = {"config": CONFIG_FILE, "weights": WEIGHTS_FILE}
    sent = [
        pb.SourceFile(name=names[name], sha256=hashlib.sha256(files[name]).hexdigest())
        for name in files
    ]
    return pb.ExportAdapterResponse(trailer=pb.ExportTrailer(files=sent))


BOTH = header(config=1, weights=2)
WHOLE = [BOTH, chunk(CONFIG_FILE, 0, b"c"), chunk(WEIGHTS_FILE, 0, b"ww")]


def receive(files: Export, messages: list[pb.ExportAdapterResponse]) -> None:
    for message in messages:
        files.add(message)
    files.finish()


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [chunk(CONFIG_FILE, 0, b"c")],
        [BOTH, BOTH],
        [header(config=1)],
        [pb.ExportAdapterResponse(header=pb.ExportHeader(files=[pb.SourceFile(name="../../x")]))],
        [BOTH, chunk("../../x", 0, b"c")],
        [BOTH, chunk(CONFIG_FILE, 0, b"cc")],
        [BOTH, chunk(WEIGHTS_FILE, 1, b"w")],
        WHOLE,
        [*WHOLE[:2], trailer(config=b"c", weights=b"")],
        [*WHOLE, trailer(config=b"c", weights=b"w!")],
        [*WHOLE, trailer(config=b"c")],
        [*WHOLE, trailer(config=b"c", weights=b"ww"), WHOLE[2]],
        [pb.ExportAdapterResponse()],
    ],
)
def test_a_store_that_lies_gives_no_folder(
    messages: list[pb.ExportAdapterResponse], tmp_path: Path
) -> None:
    files = Export(tmp_path / "out" / "a")
    with pytest.raises(errors.DataLoss):
        receive(files, messages)
    files.close()
    assert not list((tmp_path / "out").iterdir())
