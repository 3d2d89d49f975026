"""No caller makes work that outlives its call, or that nothing bounds."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from sqlalchemy import Engine, event

from adapter_store.build import CALL_THREADS
from adapter_store.core import ANYONE
from adapter_store.registration.registrar import Registration
from adapter_store.sources.upload import FileChunk
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from servicekit.errors import ShareExceeded
from servicekit.refs import AdapterName
from servicekit.shares import MAX_QUEUED
from tests.support.access.policies import ROOT, token_lines, token_of, write_policy
from tests.support.store.catalogs import ENDLESS
from tests.support.wait import until

pytestmark = pytest.mark.slow

TIMEOUT_S = 20


@contextmanager
def endless_lists():
    """Makes the database look for the adapters of a list for ever."""

    def replace(conn, cursor, statement, parameters, context, executemany):
        if "json_extract" in statement:
            return ENDLESS, ()
        return statement, parameters

    event.listen(Engine, "before_cursor_execute", replace, retval=True)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", replace)


def test_lists_end_with_their_callers(client, make_adapter):
    client.register("a", make_adapter())

    def list_adapters(_number: int) -> str:
        request = pb.ListAdaptersRequest(filter="label.a=b")
        with pytest.raises(grpc.RpcError) as raised:
            client.stub.ListAdapters(request, timeout=0.5)
        return raised.value.code().name

    with endless_lists(), ThreadPoolExecutor(2 * CALL_THREADS) as pool:
        codes = set(pool.map(list_adapters, range(2 * CALL_THREADS)))
    assert codes == {"DEADLINE_EXCEEDED"}
    found = client.stub.GetAdapter(pb.GetAdapterRequest(ref="a"), timeout=TIMEOUT_S)
    assert found.adapter.name == "default/a"


@pytest.mark.parametrize("text", ["x" * 4097, " ".join(f"label.a{n}=b" for n in range(17))])
def test_a_filter_has_bounds(client, refused, text):
    with refused("INVALID_ARGUMENT", "filter"):
        client.stub.ListAdapters(pb.ListAdaptersRequest(filter=text))


def test_an_upload_that_cannot_be_finished_leaves_nothing(store, tmp_path):
    """Its caller has so many calls waiting that no further one may wait: the store's own may."""
    use_cases = store.running.store.use_cases
    places = use_cases.calls.places
    go_on = threading.Event()
    waiting: list[Future[bool]] = []

    async def chunks() -> AsyncIterator[FileChunk]:
        yield FileChunk("adapter_config.json", 0, b"{}")
        for _ in range(places.fetches.shares.capacity + MAX_QUEUED):
            waiting.append(places.fetches.submit(ANYONE.account, go_on.wait, TIMEOUT_S))

    async def upload() -> None:
        with pytest.raises(ShareExceeded):
            await use_cases.registering.upload(
                ANYONE, Registration(AdapterName("default", "a")), chunks()
            )

    store.run(upload())
    assert places.staged_bytes.used == 2
    uses = {use.name: use for use in use_cases.status.read_work().places}
    assert uses["fetch_workers"].num_waiting > MAX_QUEUED  # to remove what was received
    assert uses["fetch_workers"].num_refused == 1
    go_on.set()
    assert all(each.result(TIMEOUT_S) for each in waiting)
    until(lambda: places.staged_bytes.used == 0)
    assert not list((tmp_path / "data" / "staging").iterdir())


def test_lists_of_one_tenant_leave_others_the_processors(serve, tmp_path, monkeypatch) -> None:
    """A tenant that owes more than a burst waits with its lists, and with nothing else."""
    monkeypatch.setattr("adapter_store.build.LIST_PROCESSORS", 1e-6)
    monkeypatch.setattr("adapter_store.build.LIST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr("servicekit.work_budget.BURST_SECONDS", 1e-4)
    roles = ["publisher", "reader"]
    policy = write_policy(tmp_path, ROOT, *(token_lines(each, roles, [each]) for each in "ab"))
    served = serve(policy_file=policy)
    a, b, root = (served.connect(token_of(name)) for name in ("a", "b", "root"))
    lists = [
        lambda client, **fields: client.stub.ListAdapters(pb.ListAdaptersRequest(**fields)),
        lambda client: client.stub.ListVersions(pb.ListVersionsRequest(name="none")),
    ]
    assert not lists[0](a).adapters
    for list_some in lists:
        with pytest.raises(grpc.RpcError) as raised:
            list_some(a)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert raised.value.details().startswith("list_work: tenant a has taken more than")
    with pytest.raises(grpc.RpcError) as raised:
        lists[0](root, tenants=["a"])
    assert "tenant a has taken" in raised.value.details()
    assert not lists[0](b).adapters
    assert not lists[0](root).adapters
    with pytest.raises(grpc.RpcError) as raised:
        a.stub.GetAdapter(pb.GetAdapterRequest(ref="none"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
