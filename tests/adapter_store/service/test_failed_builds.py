"""A build that fails by a bug is a verdict with its reason, and is not tried at each pull."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from adapter_store.images import builder, stored_source
from adapter_store.images.builder import RETRY_SECONDS
from loadout.adapter_store.v1 import adapter_store_pb2 as pb

pytestmark = pytest.mark.slow


class Bug:
    """Takes the place of a function of the builder, and raises while `is_there`."""

    def __init__(self, function: Callable) -> None:
        self._function = function
        self.is_there = True
        self.num_calls = 0

    def __call__(self, *args, **kwargs):
        self.num_calls += 1
        if self.is_there:
            raise ValueError("not enough values to unpack")
        return self._function(*args, **kwargs)


@pytest.fixture(
    params=[
        (stored_source, "open_checkpoint"),
        (builder, "plan_image"),
        (builder, "compile_parts"),
    ],
    ids=lambda param: param[1],
)
def bug(request, monkeypatch) -> Bug:
    module, name = request.param
    bug = Bug(getattr(module, name))
    monkeypatch.setattr(module, name, bug)
    monkeypatch.setattr(stored_source.VerifiedCheckpoints, "find", lambda *_: None)
    return bug


def test_it_is_a_verdict_and_tried_again_later(
    serve, make_adapter, make_layout, refused, bug, caplog
):
    caplog.set_level(logging.ERROR, builder.__name__)
    store = serve(compile_ahead=False)
    client = store.client
    bug.is_there = False
    layout_id = client.register_layout(make_layout())
    digest = client.register("a", make_adapter()).adapter.digest
    client.pull(digest, layout_id)
    store.run(store.running.store.images.wait_idle())
    store.running.store.images.drop_digests({digest})

    bug.is_there, calls = True, bug.num_calls
    store.running.store.images._disk.clear()
    for _ in range(3):
        with refused("FAILED_PRECONDITION", "a bug (ValueError)", "tries again"):
            client.pull(digest, layout_id)
    assert bug.num_calls == calls + 1
    [state] = client.get("a").layout_states
    assert state.state == pb.IMAGE_STATE_INCOMPATIBLE
    assert "ValueError" in state.reason
    assert "unpack" not in state.reason, "what is in our code's error is for the log"
    assert [record.exc_info is not None for record in caplog.records] == [True]

    catalog = store.running.store.catalog
    late = datetime.now(UTC) + timedelta(seconds=RETRY_SECONDS)
    catalog.times.now = lambda: late
    assert client.get("a").layout_states[0].state == pb.IMAGE_STATE_PENDING
    with refused("FAILED_PRECONDITION", "a bug (ValueError)"):
        client.pull(digest, layout_id)
    assert bug.num_calls == calls + 2
    assert [record.exc_info is not None for record in caplog.records] == [True, False]

    catalog.times.now = lambda: late + timedelta(seconds=RETRY_SECONDS + 1)
    bug.is_there = False
    assert client.pull(digest, layout_id).is_whole
    store.run(store.running.store.images.wait_idle())
    assert client.get("a").layout_states[0].state == pb.IMAGE_STATE_READY
