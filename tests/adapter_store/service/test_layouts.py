"""Layouts as servers and their operators see them: announced, watched, gone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from adapter_store.catalog import announcements
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.adapter_store.service.conftest import layout_message


@pytest.fixture
def served(serve):
    return serve()


def test_layout_state_has_a_verdict_for_every_server(served, make_adapter, make_layout):
    client = served.client
    small = client.announce(make_layout(), max_rank=2)
    large = client.announce(make_layout(), max_rank=16, aliases=["tiny"])
    assert small.layout_id == large.layout_id
    client.register("a", make_adapter(rank=4))
    served.idle()
    (state,) = client.get("a").layout_states
    assert state.state == pb.IMAGE_STATE_READY
    assert [(each.announcement_id, each.max_rank, each.servable) for each in state.servers] == [
        (small.announcement_id, 2, False),
        (large.announcement_id, 16, True),
    ]
    assert state.servers[0].reason == "rank 4 is above this server's limit 2"


def test_announcement_lasts_as_long_as_the_watch(served, make_layout, monkeypatch, refused):
    monkeypatch.setattr(announcements, "RENEW_AFTER", timedelta(0))
    catalog, client = served.running.store.catalog, served.client
    with monkeypatch.context() as patch:
        patch.setattr(announcements, "LASTS_FOR", timedelta(0))
        watched = client.announce(make_layout(), aliases=["tiny"])
        client.announce(make_layout(base_model="org/other"))
    request = pb.WatchAdaptersRequest(announcement_id=watched.announcement_id)
    watch = client.stub.WatchAdapters(request)
    assert next(watch).event.kind == pb.EVENT_KIND_BOOKMARK
    assert catalog.expire_announcements() == 1
    assert catalog.layout_bases(watched.layout_id) == ["org/tiny", "tiny"]
    later = datetime.now(UTC) + timedelta(hours=2)
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "_clock", lambda: later)
        assert catalog.expire_announcements() == 1
    with refused("NOT_FOUND", "announcement_id", "register the layout again"):
        for _ in range(3):
            next(watch)


def test_layout_of_a_server_that_announces_nothing(served, make_adapter, make_layout):
    """Of an earlier release: its aliases are in the layout, and no part of its identity."""
    message = layout_message(make_layout())
    message.aliases.append("tiny")
    request = pb.RegisterLayoutRequest(layout=message)
    layout_id = served.client.stub.RegisterLayout(request).layout_id
    assert layout_id == served.client.register_layout(make_layout())
    adapter = served.client.register("a", make_adapter(base_model_name_or_path="tiny")).adapter
    assert adapter.base_model == "org/tiny"
    assert [state.layout_id for state in adapter.layout_states] == [layout_id]


@pytest.mark.parametrize(
    ("fields", "subject"),
    [
        ({"aliases": [""]}, "announcement.aliases[0]"),
        ({"aliases": ["a\nb"]}, "announcement.aliases[0]"),
        ({"aliases": [str(number) for number in range(65)]}, "announcement.aliases"),
        ({"max_rank": 2**31}, "announcement.max_rank"),
    ],
)
def test_invalid_announcements(served, make_layout, refused, fields, subject):
    with refused("INVALID_ARGUMENT", subject):
        served.client.announce(make_layout(), **fields)


def test_invalid_id_of_a_watch(served, refused):
    with refused("INVALID_ARGUMENT", "announcement_id"):
        next(served.client.stub.WatchAdapters(pb.WatchAdaptersRequest(announcement_id="x")))
