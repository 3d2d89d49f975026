"""A client of several replicas of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadout import AsyncClient, Client, errors
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as store_grpc
from loadout.retry import RetryPolicy
from tests.support.loadout.scripted import FakeStore, Server

QUICK = RetryPolicy(first_backoff_s=0.001)
ADAPTER = store_pb.Adapter(name="default/a", version=1, digest="sha256:00")


class Replicas:
    """Two servers, each with answers of its own, which say who answered by the revision."""

    def __init__(self) -> None:
        self.fakes = [FakeStore(), FakeStore()]
        self.servers = [self._start(index) for index in range(2)]

    def _start(self, index: int) -> Server:
        fake = self.fakes[index]
        fake.on("GetAdapter", store_pb.GetAdapterResponse(adapter=ADAPTER))
        for rpc in ("RegisterAdapter", "UploadAdapter"):
            response = getattr(store_pb, f"{rpc}Response")
            fake.on(rpc, response(adapter=ADAPTER, revision=index + 1))
        return Server(lambda s: store_grpc.add_AdapterStoreServiceServicer_to_server(fake, s))

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def num_calls(self) -> list[int]:
        return [sum(map(len, fake.requests.values())) for fake in self.fakes]


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    made = Replicas()
    yield made
    for server in made.servers:
        server.kill()


@pytest.mark.parametrize("as_text", [True, False])
def test_reads_and_registrations_go_on_without_one(
    replicas: Replicas, adapter_folder: Path, as_text: bool
) -> None:
    store = ",".join(replicas.addresses) if as_text else replicas.addresses
    with Client(store=store, retry=QUICK) as client:
        for _ in range(8):
            client.get("a")
        replicas.servers[0].kill()
        before = replicas.num_calls()[0]
        for _ in range(8):
            assert client.get("a").version == 1
            assert client.register("a", "s3://bucket/a").revision == 2
            assert client.register("a", adapter_folder).revision == 2
        assert replicas.num_calls()[0] == before


def test_the_asyncio_client_does_so_too(replicas: Replicas, adapter_folder: Path) -> None:
    async def main() -> None:
        async with AsyncClient(store=replicas.addresses, retry=QUICK) as client:
            replicas.servers[1].kill()
            for _ in range(4):
                assert (await client.get("a")).version == 1
                assert (await client.register("a", adapter_folder)).revision == 1

    asyncio.run(main())


def test_without_any_the_last_is_named(replicas: Replicas) -> None:
    for server in replicas.servers:
        server.kill()
    with (
        Client(store=replicas.addresses, retry=QUICK) as client,
        pytest.raises(errors.StreamLost, match=r"^the adapter store at 127\.0\.0\.1:"),
    ):
        client.get("a")


def test_each_address_is_checked(replicas: Replicas) -> None:
    with pytest.raises(
        errors.InvalidArgument, match=r"store: the token would go to 192\.0\.2\.1:1"
    ):
        Client(store=[*replicas.addresses, "192.0.2.1:1"], token="t")
