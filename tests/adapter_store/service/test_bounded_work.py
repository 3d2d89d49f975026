"""No caller makes work that outlives its call, or that nothing bounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from sqlalchemy import Engine, event

from adapter_store.app import CALL_THREADS
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.adapter_store.catalog.test_interrupt import ENDLESS

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
