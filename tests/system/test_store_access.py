"""The inference service's clients at a store that requires certificates and tokens."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.images.header import ImageTrailer
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.targets import build_layout
from inference_svc.config import InferenceSettings
from inference_svc.errors import AdapterNotFound, StoreUnavailable
from inference_svc.model.architectures import load_description
from inference_svc.store.client import CatalogClient, ImageClient
from inference_svc.store.credentials import StoreAccess, read_store_access
from inference_svc.store.replicas import Endpoint, Replicas
from inference_svc.store.types import Announcement
from tests.support.access.certificates import Authority, credentials
from tests.support.access.policies import ROOT, token_lines, token_of, write_policy
from tests.support.models.zoo import Zoo
from tests.support.store.client import Client
from tests.support.store.served import Served, serving


class Guarded:
    """A store with mTLS and a policy; `root` may do everything there."""

    def __init__(self, start: Callable[..., Served], folder: Path, zoo: Zoo) -> None:
        self.folder, self.zoo = folder, zoo
        self.authority = Authority(folder)
        self.clients = Authority(folder, "clients")
        cert, key = self.authority.issue("server")
        server = token_lines("server", ["server"], ["team-a"])
        self.served = start(
            tls_cert_file=cert,
            tls_key_file=key,
            tls_client_ca_file=self.clients.path,
            policy_file=write_policy(folder, ROOT, server),
        )
        self.pair = self.clients.issue("us")
        trusted = credentials(self.authority.pem, self.pair)
        self.root: Client = self.served.connect(token_of("root"), trusted)

    @property
    def address(self) -> str:
        return self.served.running.grpc_address

    def access(self, **changes: Any) -> StoreAccess:
        """Returns what the settings of a server make."""
        token = self.folder / "token"
        token.write_text(token_of("server"))
        fields = {
            "store_token_file": token,
            "store_tls_ca_file": self.authority.path,
            "store_tls_cert_file": self.pair[0],
            "store_tls_key_file": self.pair[1],
        } | changes
        fields = {name: value for name, value in fields.items() if value is not None}
        model_dir = self.zoo.model_dir
        return read_store_access(InferenceSettings(model=model_dir, store=self.address, **fields))

    def register(self, name: str) -> str:
        folder = self.folder / name.replace("/", "-")
        shutil.copytree(self.zoo.adapter_dirs["r16"], folder)
        return str(self.root.register(name, folder).adapter.digest)


@pytest.fixture(scope="module")
def guarded(zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("guarded")
    with serving(folder) as start:
        yield Guarded(start, folder, zoos("llama"))


def layout_of(zoo: Zoo) -> ModelLayout:
    return build_layout(load_description(zoo.model_dir), "llama", torch.float32)


def ask(
    guarded: Guarded, access: StoreAccess, body: Callable[[CatalogClient], Awaitable[Any]]
) -> Any:
    async def main() -> Any:
        client = CatalogClient(Replicas.at(guarded.address), access)
        try:
            async with asyncio.timeout(60):
                return await body(client)
        finally:
            await client.close()

    return asyncio.run(main())


def test_every_call_is_authorised(guarded: Guarded) -> None:
    """With its certificate and token, within its tenants; other tenants' adapters are not found."""
    access = guarded.access()
    digest = guarded.register("team-a/mine")
    guarded.register("team-b/theirs")

    async def body(client: CatalogClient) -> str:
        session = await client.connect()
        accepted = await session.register_layout(layout_of(guarded.zoo), Announcement((), 8))
        assert (await client.get_adapter("team-a/mine")).digest == digest
        with pytest.raises(AdapterNotFound):
            await client.get_adapter("team-b/theirs")
        assert await session.get_revision() == 2
        events = session.watch(0, accepted.announcement_id)
        assert [(await anext(events)).name for _ in range(1)] == ["team-a/mine"]
        assert (await anext(events)).revision == 2
        await events.aclose()
        return accepted.layout_id

    layout_id = ask(guarded, access, body)
    images = ImageClient(Replicas.at(guarded.address), access)
    *_, last = images.pull(digest, layout_id)
    assert isinstance(last, ImageTrailer)
    images.close()


def test_calls_without_credentials_are_refused(guarded: Guarded) -> None:
    """The log has the reason; callers learn that the store does not serve us."""
    wrong = guarded.folder / "wrong-token"
    wrong.write_text("another")
    others = Authority(guarded.folder, "others")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"store_token_file": None}, r"refuses this server \(UNAUTHENTICATED\)"),
        ({"store_token_file": wrong}, r"refuses this server \(UNAUTHENTICATED\)"),
        ({"store_tls_ca_file": others.path}, "does not answer"),
        ({"store_tls_cert_file": None, "store_tls_key_file": None}, "does not answer"),
    ]
    for changes, message in cases:
        access = guarded.access(**changes)

        async def body(client: CatalogClient) -> None:
            await client.get_adapter("team-a/mine")

        with pytest.raises(StoreUnavailable, match=message) as caught:
            ask(guarded, access, body)
        assert token_of("server") not in f"{caught.value} {caught.value.__notes__}"
        images = ImageClient(Replicas.at(guarded.address), access)
        with pytest.raises(StoreUnavailable, match=message):
            list(images.pull("sha256:" + "0" * 64, "sha256:" + "1" * 64))
        images.close()


def test_certificate_is_checked_for_the_configured_name(guarded: Guarded) -> None:
    """And not for the address that the name resolves to."""
    for name, is_good in (("localhost", True), ("store.example", False)):
        images = ImageClient(Replicas([Endpoint(guarded.address, name)]), guarded.access())
        unknown = images.pull("sha256:" + "0" * 64, "sha256:" + "1" * 64)
        with pytest.raises((AdapterNotFound, StoreUnavailable)) as caught:
            list(unknown)
        is_reached = "UNAVAILABLE" not in caught.value.message
        assert is_reached == is_good
        images.close()
