"""Every RPC of the store as a caller of some role would call it, and who may."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.access.policies import token_of
from tests.support.store.adapters import tiny_layout
from tests.support.store.client import Client
from tests.support.store.served import Served

OWN, OTHER = "team-a", "team-b"

SERVICE = pb.DESCRIPTOR.services_by_name["AdapterStoreService"]

# The name is the role of its token, all of them for team-a alone but the last; "" sends none.
CALLERS = {
    "nobody": "",
    "stranger": token_of("unknown"),
    "reader": token_of("reader"),
    "publisher": token_of("publisher"),
    "server": token_of("server"),
    "admin": token_of("admin"),
    "caller": token_of("caller"),  # a role of the inference service only
    "root": token_of("root"),  # an admin of every tenant
}

READERS = {"reader", "publisher", "server", "admin", "root"}

PULLERS = {"reader", "server", "admin", "root"}

PUBLISHERS = {"publisher", "admin", "root"}

OPERATORS = {"server", "admin", "root"}

ADMINS = {"admin", "root"}

ALLOWED = {
    "RegisterAdapter": PUBLISHERS,
    "UploadAdapter": PUBLISHERS,
    "GetAdapter": READERS,
    "ListAdapters": READERS,
    "DeleteAdapter": PUBLISHERS,
    "ListVersions": READERS,
    "RollbackAdapter": PUBLISHERS,
    "PruneVersions": PUBLISHERS,
    "PinAdapter": ADMINS,
    "UnpinAdapter": ADMINS,
    "RegisterLayout": OPERATORS,
    "ListLayouts": OPERATORS,
    "ForgetLayout": {"root"},
    "PullAdapter": PULLERS,
    "ExportAdapter": PULLERS,
    "GetText": PULLERS,
    "WatchAdapters": READERS,
    "GetStoreStatus": OPERATORS,
    # What tells of all tenants is for who is for all.
    "GetDebugInfo": {"root"},
}

# How a caller with the role is answered about another tenant's adapter.
ABOUT_OTHERS = {
    "RegisterAdapter": "PERMISSION_DENIED",
    "UploadAdapter": "PERMISSION_DENIED",
    "ListAdapters": "nothing",
    "WatchAdapters": "nothing",
    "RegisterLayout": "OK",  # layouts and the status are no tenant's
    "ListLayouts": "OK",
    "GetStoreStatus": "OK",
}


@dataclass
class House:
    """Two tenants, each with an adapter `kept` of a content of its own."""

    served: Served
    clients: dict[str, Client]
    layout_id: str
    folders: dict[str, Path]
    digests: dict[str, str]
    numbers: itertools.count
    unused: dict[str, str] = field(default_factory=dict)
    """By tenant an adapter with two versions that no call has changed."""

    @contextmanager
    def fresh(self, tenant: str) -> Iterator[str]:
        """Yields an adapter of the tenant with two versions. The next call gets another one, unless
        this call is refused: then it has changed nothing."""
        if tenant not in self.unused:
            name = f"{tenant}/n{next(self.numbers)}"
            for content in ("old", tenant):
                self.clients["root"].register(name, self.folders[content])
            self.unused[tenant] = name
        yield self.unused[tenant]
        del self.unused[tenant]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def register_adapter(house: House, client: Client, tenant: str) -> str:
    client.register(f"{tenant}/n{next(house.numbers)}", house.folders[tenant])
    return "OK"


def upload_adapter(house: House, client: Client, tenant: str) -> str:
    client.upload(f"{tenant}/n{next(house.numbers)}", files_of(house.folders[tenant]))
    return "OK"


def get_adapter(house: House, client: Client, tenant: str) -> str:
    assert client.get(f"{tenant}/kept").digest == house.digests[tenant]
    assert client.get(house.digests[tenant]).name == f"{tenant}/kept"
    return "OK"


def list_adapters(house: House, client: Client, tenant: str) -> str:
    listed = client.stub.ListAdapters(pb.ListAdaptersRequest(filter=f"tenant={tenant}")).adapters
    assert {adapter.name.partition("/")[0] for adapter in listed} <= {tenant}
    return "OK" if listed else "nothing"


def delete_adapter(house: House, client: Client, tenant: str) -> str:
    with house.fresh(tenant) as name:
        client.stub.DeleteAdapter(pb.DeleteAdapterRequest(name=name))
    return "OK"


def list_versions(house: House, client: Client, tenant: str) -> str:
    response = client.stub.ListVersions(pb.ListVersionsRequest(name=f"{tenant}/kept"))
    assert response.current_version == 1
    return "OK"


def rollback_adapter(house: House, client: Client, tenant: str) -> str:
    with house.fresh(tenant) as name:
        request = pb.RollbackAdapterRequest(name=name, version=1)
        assert client.stub.RollbackAdapter(request).adapter.version == 1
    return "OK"


def prune_versions(house: House, client: Client, tenant: str) -> str:
    with house.fresh(tenant) as name:
        request = pb.PruneVersionsRequest(name=name, keep=1)
        assert client.stub.PruneVersions(request).deleted_versions == [1]
    return "OK"


def pin_adapter(house: House, client: Client, tenant: str) -> str:
    with house.fresh(tenant) as name:
        assert client.stub.PinAdapter(pb.PinAdapterRequest(ref=name)).adapter.pinned
    return "OK"


def unpin_adapter(house: House, client: Client, tenant: str) -> str:
    with house.fresh(tenant) as name:
        assert not client.stub.UnpinAdapter(pb.UnpinAdapterRequest(ref=name)).adapter.pinned
    return "OK"


def register_layout(house: House, client: Client, tenant: str) -> str:
    assert client.register_layout(tiny_layout()) == house.layout_id
    return "OK"


def list_layouts(house: House, client: Client, tenant: str) -> str:
    listed = client.stub.ListLayouts(pb.ListLayoutsRequest()).layouts
    assert [layout.layout_id for layout in listed] == [house.layout_id]
    return "OK"


def forget_layout(house: House, client: Client, tenant: str) -> str:
    other = house.clients["root"].register_layout(tiny_layout(base_model="org/forgotten"))
    client.stub.ForgetLayout(pb.ForgetLayoutRequest(layout_id=other))
    return "OK"


def get_text(house: House, client: Client, tenant: str) -> str:
    digest = f"sha256:{hashlib.sha256(tenant.encode()).hexdigest()}"
    content = client.stub.GetText(pb.GetTextRequest(digest=digest)).content
    assert content.decode() == tenant
    return "OK"


def export_adapter(house: House, client: Client, tenant: str) -> str:
    messages = client.stub.ExportAdapter(pb.ExportAdapterRequest(ref=f"{tenant}/kept"))
    assert [message.WhichOneof("part") for message in messages][-1] == "trailer"
    return "OK"


def pull_adapter(house: House, client: Client, tenant: str) -> str:
    assert client.pull(house.digests[tenant], house.layout_id).is_whole
    return "OK"


def watch_adapters(house: House, client: Client, tenant: str) -> str:
    newest = house.clients["root"].stub.GetStoreStatus(pb.GetStoreStatusRequest()).revision
    watch = client.stub.WatchAdapters(pb.WatchAdaptersRequest())
    tenants = set()
    for response in watch:
        tenants.add(response.event.name.partition("/")[0])
        if response.event.revision >= newest:  # of an event or a bookmark: never behind
            break
    watch.cancel()
    return "OK" if tenant in tenants else "nothing"


def get_store_status(house: House, client: Client, tenant: str) -> str:
    client.stub.GetStoreStatus(pb.GetStoreStatusRequest())
    return "OK"


def get_debug_info(house: House, client: Client, tenant: str) -> str:
    assert list(client.stub.GetDebugInfo(pb.GetDebugInfoRequest()))
    return "OK"


ASK: dict[str, Callable[[House, Client, str], str]] = {
    "RegisterAdapter": register_adapter,
    "UploadAdapter": upload_adapter,
    "GetAdapter": get_adapter,
    "ListAdapters": list_adapters,
    "DeleteAdapter": delete_adapter,
    "ListVersions": list_versions,
    "RollbackAdapter": rollback_adapter,
    "PruneVersions": prune_versions,
    "PinAdapter": pin_adapter,
    "UnpinAdapter": unpin_adapter,
    "RegisterLayout": register_layout,
    "ListLayouts": list_layouts,
    "ForgetLayout": forget_layout,
    "PullAdapter": pull_adapter,
    "ExportAdapter": export_adapter,
    "GetText": get_text,
    "WatchAdapters": watch_adapters,
    "GetStoreStatus": get_store_status,
    "GetDebugInfo": get_debug_info,
}
