"""Layouts as servers and their operators see them: announced, watched, gone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import grpc
import pytest

from adapter_store.catalog import layouts as layouts_module
from adapter_store.catalog import presence
from adapter_store.catalog.tables import announcements
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.store.messages import layout_message
from tests.support.wait import until


@pytest.fixture
def served(serve):
    return serve()


@pytest.fixture(scope="module")
def unchanged(serve_shared):
    """A store for calls that are refused, or change nothing."""
    return serve_shared()


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
    assert state.servers[0].reason == "rank 4 is above this server's limit 2 (--max-rank)"


A, B = pb.SEGMENT_KIND_A, pb.SEGMENT_KIND_B


def test_layout_state_says_which_targets_a_server_refuses(served, make_adapter, make_layout):
    client = served.client
    announced = [
        client.announce(make_layout(), lora_targets=names)
        for names in (["v_proj", "q_proj", "v_proj"], ["q_proj", "v_proj"], ["q_proj", "o_proj"])
    ]
    assert announced[0] == announced[1] != announced[2]
    assert announced[0].layout_id == announced[2].layout_id
    client.register("a", make_adapter(("q_proj", "v_proj")))
    served.idle()
    (state,) = client.get("a").layout_states
    assert {each.announcement_id: (each.servable, each.reason) for each in state.servers} == {
        announced[0].announcement_id: (True, ""),
        announced[2].announcement_id: (
            False,
            "target v_proj is not among this server's --lora-targets (o_proj, q_proj)",
        ),
    }


def test_announced_kinds(served, make_layout):
    """A and B go without saying, and kinds of later releases occur in no image of this store."""
    plain, named, later, more = (
        served.client.announce(make_layout(), segment_kinds=kinds).announcement_id
        for kinds in ([], [B, A], [A, B, 99], [A, B, pb.SEGMENT_KIND_MAGNITUDE])
    )
    assert plain == named == later != more


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
    assert catalog.servers.expire() == 1
    assert catalog.layouts.bases(watched.layout_id) == ["org/tiny", "tiny"]
    later = datetime.now(UTC) + timedelta(hours=2)
    with monkeypatch.context() as patch:
        patch.setattr(catalog.times, "now", lambda: later)
        assert catalog.servers.expire() == 1
    with refused("NOT_FOUND", "announcement_id", "register the layout again"):
        for _ in range(3):
            next(watch)


@pytest.fixture
def watched(served, make_adapter, make_layout, monkeypatch):
    """A watch of the only server that could serve the adapter "a"."""
    monkeypatch.setattr(presence, "GONE_AFTER_SECONDS", 0.0)
    accepted = served.client.announce(make_layout())
    served.client.register("a", make_adapter())
    request = pb.WatchAdaptersRequest(announcement_id=accepted.announcement_id)
    watch = served.client.stub.WatchAdapters(request)
    next(watch)
    return watch


def servers(client) -> list[pb.ServerVerdict]:
    (state,) = client.get("a").layout_states
    return list(state.servers)


def test_server_that_leaves_is_there_no_more(served, watched):
    """But its layout is compiled for: it may come back."""
    assert servers(served.client)
    watched.cancel()
    until(lambda: not servers(served.client))
    assert served.running.store.catalog.layouts.served()


def test_servers_are_there_while_their_store_restarts(served, watched, serve):
    served.begin_stop()
    with pytest.raises(grpc.RpcError):
        for _ in watched:
            pass
    served.stop()
    assert servers(serve().client)


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
        ({"lora_targets": ["q_proj", ""]}, "announcement.lora_targets[1]"),
        ({"lora_targets": ["self_attn.q_proj"]}, "announcement.lora_targets[0]"),
        ({"lora_targets": ["q" * 129]}, "announcement.lora_targets[0]"),
        ({"lora_targets": ["q_proj", "k_proj", "q_prj"]}, "announcement.lora_targets[2]"),
        ({"lora_targets": ["q_proj"] * 257}, "announcement.lora_targets"),
        ({"segment_kinds": [A, B, 0]}, "announcement.segment_kinds[2]"),
        ({"segment_kinds": [B, pb.SEGMENT_KIND_BIAS]}, "announcement.segment_kinds"),
        ({"segment_kinds": [A, B] * 33}, "announcement.segment_kinds"),
        ({"max_added_tokens": 2**31}, "announcement.max_added_tokens"),
        ({"weight_form": "int4\n"}, "announcement.weight_form"),
        ({"weight_form": "a" * 65}, "announcement.weight_form"),
        ({"num_ranks": 1025}, "announcement.num_ranks"),
        ({"num_ranks": 2, "rank_index": 2}, "announcement.rank_index"),
        ({"rank_index": 1}, "announcement.rank_index"),
        (
            {"num_ranks": 2, "rank_index": 1, "first_announcement_id": "x"},
            "announcement.first_announcement_id",
        ),
        (
            {"num_ranks": 2, "first_announcement_id": "sha256:" + "0" * 64},
            "announcement.first_announcement_id",
        ),
    ],
)
def test_invalid_announcements(unchanged, make_layout, refused, fields, subject):
    with refused("INVALID_ARGUMENT", subject):
        unchanged.client.announce(make_layout(), **fields)


def test_invalid_id_of_a_watch(unchanged, refused):
    with refused("INVALID_ARGUMENT", "announcement_id"):
        next(unchanged.client.stub.WatchAdapters(pb.WatchAdaptersRequest(announcement_id="x")))


def test_layouts_are_listed_page_by_page(served, make_adapter, make_layout, monkeypatch):
    monkeypatch.setattr(layouts_module, "PAGE_LAYOUTS", 2)
    client = served.client
    ids = sorted(
        client.announce(make_layout(base_model=f"org/{name}"), max_rank=8, aliases=[name]).layout_id
        for name in "abc"
    )
    client.register("a", make_adapter(base_model_name_or_path="org/a"))
    served.idle()
    first = client.stub.ListLayouts(pb.ListLayoutsRequest())
    rest = client.stub.ListLayouts(pb.ListLayoutsRequest(page_token=first.next_page_token))
    assert (len(first.layouts), rest.next_page_token) == (2, "")
    layouts = [*first.layouts, *rest.layouts]
    assert [layout.layout_id for layout in layouts] == ids
    (layout,) = (each for each in layouts if each.base_model == "org/a")
    assert (list(layout.aliases), list(layout.max_ranks), layout.images) == (["a"], [8], 1)
    assert layout.image_bytes > 0
    assert layout.create_time.seconds > 0
    assert layout.last_use_time.seconds > 0


def test_forgotten_layout(served, make_adapter, make_layout, refused):
    """Its server notices, and its images are compiled anew once it is registered again."""
    client = served.client
    accepted = client.announce(make_layout())
    digest = client.register("a", make_adapter()).adapter.digest
    served.idle()
    watch = client.stub.WatchAdapters(
        pb.WatchAdaptersRequest(announcement_id=accepted.announcement_id)
    )
    next(watch)
    request = pb.ForgetLayoutRequest(layout_id=accepted.layout_id)
    assert client.stub.ForgetLayout(request).images == 1
    with refused("NOT_FOUND", "announcement_id"):
        for _ in range(3):
            next(watch)
    with refused("NOT_FOUND", "no layout"):
        client.pull(digest, accepted.layout_id)
    with refused("NOT_FOUND", "layout_id"):
        client.stub.ForgetLayout(request)
    assert not client.get("a").layout_states
    assert client.register_layout(make_layout()) == accepted.layout_id
    served.idle()
    assert client.pull(digest, accepted.layout_id).is_whole


def test_forgetting_needs_a_whole_id(served, refused):
    for layout_id in ("", "4b6b58a697e1"):
        with refused("INVALID_ARGUMENT", "layout_id"):
            served.client.stub.ForgetLayout(pb.ForgetLayoutRequest(layout_id=layout_id))
