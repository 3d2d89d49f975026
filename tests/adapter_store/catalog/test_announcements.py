"""What servers announce beside a layout lasts as long as they do, and compiles nothing."""

from __future__ import annotations

from datetime import timedelta

import pytest

from adapter_store.catalog.announcements import LASTS_FOR, MAX_PER_LAYOUT, RENEW_AFTER
from adapter_store.core import Announcement, ImageState, LayoutVerdict
from adapter_store.errors import LimitExceeded
from servicekit.refs import AdapterName
from tests.adapter_store.catalog.conftest import BASE

SECOND = timedelta(seconds=1)


@pytest.fixture
def announced(catalog):
    """The layout "L", announced as "A" with an alias and ranks up to 16."""
    catalog.add_layout("L", BASE, "{}")
    assert catalog.announce("L", "A", Announcement(("alias", "both"), 16))
    return catalog


def limits(names) -> list[tuple[str, int]]:
    (verdict,) = names.get("a").verdicts
    return [(server.announcement_id, server.max_rank) for server in verdict.servers]


def test_announcement_lasts_an_hour_after_its_renewals(announced, names, clock):
    names.register("a", "d1")
    assert limits(names) == [("A", 16)]
    clock.now += LASTS_FOR - SECOND
    assert announced.renew("A") == "L"
    clock.now += LASTS_FOR - SECOND
    assert limits(names) == [("A", 16)]
    assert announced.expire_announcements() == 0
    clock.now += 2 * SECOND
    assert limits(names) == []
    assert announced.layout_bases("L") == ["alias", "both", BASE]  # the store may have been away
    assert announced.expire_announcements() == 1
    assert announced.layout_bases("L") == [BASE]
    assert announced.renew("A") is None


def test_alias_stays_while_a_server_has_it(announced, clock):
    clock.now += LASTS_FOR - SECOND
    assert announced.announce("L", "B", Announcement(("both", "new")))
    assert not announced.announce("L", "C", Announcement(("new",)))
    clock.now += 2 * SECOND
    assert announced.expire_announcements() == 1
    assert announced.layout_bases("L") == ["both", "new", BASE]
    assert announced.known_base_models(AdapterName("default", "x")).served == {
        BASE: {BASE, "both", "new"}
    }


def test_renewals_are_due_every_few_minutes(announced, clock):
    assert not announced.is_renewal_due("A")
    assert announced.is_renewal_due("unknown")
    clock.now += RENEW_AFTER
    assert announced.is_renewal_due("A")
    announced.renew("A")
    assert not announced.is_renewal_due("A")


def test_server_that_renews_nothing_is_known_as_long_as_its_layout(announced, clock):
    announced.announce("L", "old", Announcement(("alias of old",), is_renewed=False))
    clock.now += timedelta(days=365)
    announced.expire_announcements()
    assert announced.layout_bases("L") == ["alias of old", BASE]


def test_layout_has_a_bounded_number_of_announcements(announced, clock):
    for number in range(MAX_PER_LAYOUT - 1):
        announced.announce("L", f"N{number}", Announcement(max_rank=number))
    with pytest.raises(LimitExceeded, match="16 different") as caught:
        announced.announce("L", "more", Announcement())
    assert caught.value.reason == "ANNOUNCEMENT_LIMIT"
    announced.announce("L", "A", Announcement(("alias", "both"), 16))
    clock.now += LASTS_FOR
    announced.announce("L", "more", Announcement())


def test_verdict_is_of_the_adapter_and_the_announcement(announced, names):
    announced.announce("L", "B", Announcement(max_rank=8))
    announced.announce("L", "C", Announcement())
    names.register("a", "d1", rank=12)
    (verdict,) = names.get("a").verdicts
    assert [server.refusal(12) for server in verdict.servers] == [
        "",
        "rank 12 is above this server's limit 8",
        "",
    ]
    announced.set_verdict("d1", LayoutVerdict("L", ImageState.READY, "", 256))
    (verdict,) = names.get("a").verdicts
    assert [server.announcement_id for server in verdict.servers] == ["C", "B", "A"]
