"""A layout is live as long as it is used; then it only waits for its servers to come back."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.database import Place
from adapter_store.catalog.tables import layouts as layouts_module
from adapter_store.catalog.tables.layouts import FORGET_AFTER_TTLS, LayoutLimits
from adapter_store.catalog.tables.schema import layouts
from adapter_store.core import Announcement, ImageState, LayoutVerdict
from adapter_store.errors import LimitExceeded
from servicekit.refs import AdapterRef
from tests.support.store.catalogs import BASE, Clock, Names, connected, live_layouts

DAY = timedelta(days=1)
TTL = 7 * DAY
SECOND = timedelta(seconds=1)


def open_catalog(place: Place, clock: Clock, ttl: timedelta = TTL) -> Catalog:
    return Catalog(place, event_retention=1000, layout_ttl=ttl, clock=clock)


@pytest.fixture
def catalog(place, clock) -> Iterator[Catalog]:
    catalog = open_catalog(place, clock)
    yield catalog
    catalog.close()


def last_use(place: Place) -> int:
    with connected(place) as conn:
        return conn.execute(layouts.select()).one().last_use_time


def states(names: Names, name: str) -> dict[str, ImageState]:
    return {verdict.layout_id: verdict.state for verdict in names.get(name).verdicts}


def test_layout_is_live_until_unused_for_the_ttl(catalog, clock):
    assert catalog.layouts.add("L1", BASE, "{}")
    clock.now += TTL - SECOND
    assert live_layouts(catalog) == ["L1"]
    assert catalog.layouts.unused() == frozenset()
    assert catalog.counts().layouts == 1
    clock.now += 2 * SECOND
    assert live_layouts(catalog) == []
    assert catalog.layouts.unused() == {"L1"}
    assert catalog.counts().layouts == 0


def test_unused_layout_is_live_when_registered_again(catalog, clock):
    catalog.layouts.add("L1", BASE, '{"x": 1}')
    clock.now += 365 * DAY
    assert catalog.layouts.ids() == ["L1"]
    assert catalog.layouts.body("L1") == '{"x": 1}'
    assert catalog.layouts.add("L1", BASE, '{"x": 1}')  # as if it were new
    assert not catalog.layouts.add("L1", BASE, '{"x": 1}')
    assert live_layouts(catalog) == ["L1"]


def test_pull_makes_a_layout_live(catalog, clock):
    catalog.layouts.add("L1", BASE, "{}")
    clock.now += TTL - SECOND
    assert not catalog.layouts.use("L1")
    clock.now += TTL - SECOND
    assert live_layouts(catalog) == ["L1"]
    clock.now += TTL
    assert live_layouts(catalog) == []
    assert catalog.layouts.use("L1")
    assert live_layouts(catalog) == ["L1"]


def test_a_use_is_recorded_at_most_once_per_hour(catalog, clock, place):
    catalog.layouts.add("L1", BASE, "{}")
    first = last_use(place)
    clock.now += timedelta(minutes=59)
    other = open_catalog(place, clock)  # as after a restart: it does not know
    assert other.layouts.is_use_due("L1")
    other.layouts.use("L1")
    assert not other.layouts.is_use_due("L1")
    catalog.layouts.add("L1", BASE, "{}")
    assert last_use(place) == first
    clock.now += timedelta(minutes=1)
    catalog.layouts.use("L1")
    assert last_use(place) > first
    assert not catalog.layouts.is_use_due("L1")
    clock.now += timedelta(hours=1)
    assert catalog.layouts.is_use_due("L1")
    other.close()


def test_short_ttl_is_precise_to_a_tenth(place, clock):
    catalog = open_catalog(place, clock, timedelta(seconds=10))
    catalog.layouts.add("L1", BASE, "{}")
    for _ in range(20):
        clock.now += 2 * SECOND
        assert catalog.layouts.is_use_due("L1")
        assert not catalog.layouts.use("L1")
    catalog.close()


@pytest.mark.parametrize("ttl", [timedelta(0), timedelta(days=10**8)])
def test_without_an_end_all_layouts_are_live(place, clock, ttl):
    catalog = open_catalog(place, clock, ttl)
    catalog.layouts.add("L1", BASE, "{}")
    clock.now += 1000 * DAY
    assert live_layouts(catalog) == ["L1"]
    assert catalog.layouts.unused() == frozenset()
    assert catalog.layouts.forget_unused_images() == 0
    assert catalog.layouts.forget_unused() == []
    assert not catalog.layouts.use("L1")
    catalog.close()


def test_images_for_unused_layouts_are_pending_again(names, catalog, clock, monkeypatch):
    monkeypatch.setattr(layouts_module, "MAX_RESET", 1)
    catalog.layouts.add("old", BASE, "{}")
    for name in ("ready", "compiling", "incompatible"):
        names.register(name, name)
        catalog.images.set_verdict(name, LayoutVerdict("old", ImageState(name), "why", 1))
    clock.now += TTL
    catalog.layouts.add("new", BASE, "{}")
    catalog.images.set_verdict("ready", LayoutVerdict("new", ImageState.READY))
    assert catalog.layouts.forget_unused_images() == 2
    assert states(names, "ready") == {"old": ImageState.PENDING, "new": ImageState.READY}
    assert states(names, "compiling")["old"] is ImageState.PENDING
    assert states(names, "incompatible")["old"] is ImageState.INCOMPATIBLE
    assert catalog.layouts.forget_unused_images() == 0
    catalog.layouts.use("old")
    assert catalog.images.unfinished("old", "", 10) == ["compiling", "ready"]


def test_only_images_for_live_layouts_are_pinned(names, catalog, clock):
    catalog.layouts.add("old", BASE, "{}")
    clock.now += TTL
    catalog.layouts.add("new", BASE, "{}")
    digest = names.register("a", "d1", pinned=True)[0].digest
    assert catalog.images.pinned_keys() == [(digest, "new")]
    assert catalog.names.get(AdapterRef(digest=digest))[0].pinned
    catalog.layouts.use("old")
    assert sorted(catalog.images.pinned_keys()) == [(digest, "new"), (digest, "old")]


def test_a_clock_that_jumps_leaves_layouts_live(catalog, clock):
    catalog.layouts.add("L1", BASE, "{}")
    clock.now += 365 * DAY
    assert live_layouts(catalog) == []
    assert catalog.layouts.use("L1")
    clock.now -= 2 * 365 * DAY
    assert live_layouts(catalog) == ["L1"]
    assert not catalog.layouts.use("L1")
    assert catalog.layouts.forget_unused() == []
    clock.now += 365 * DAY
    assert live_layouts(catalog) == ["L1"]


@pytest.fixture
def limited(place, clock) -> Iterator[Catalog]:
    """At most eight layouts of a base model and six in all, a half of them for one account."""
    limits = LayoutLimits(8, 6, 0.5)
    catalog = Catalog(
        place, event_retention=1000, layout_ttl=TTL, layout_limits=limits, clock=clock
    )
    yield catalog
    catalog.close()


def add(catalog: Catalog, account: str, *numbers: int) -> None:
    """Each layout is of a base model of its own."""
    for number in numbers:
        catalog.layouts.add(f"{account}{number}", f"org/{account}{number}", "{}", account)


def test_layouts_of_all_base_models_are_shared(limited):
    add(limited, "a", 1, 2, 3)
    with pytest.raises(LimitExceeded, match="max-layouts-in-all") as refusal:
        add(limited, "a", 4)
    assert refusal.value.reason == "LAYOUT_LIMIT"
    add(limited, "a", 1)  # known
    add(limited, "b", 1)
    with pytest.raises(LimitExceeded):
        add(limited, "b", 2)
    add(limited, "c", 1)
    add(limited, "d", 1)
    with pytest.raises(LimitExceeded):
        add(limited, "e", 1)  # all six are in use
    assert len(live_layouts(limited)) == 6


def test_layouts_that_come_back_count_as_new_ones(limited, clock):
    add(limited, "a", 1, 2, 3)
    clock.now += TTL
    add(limited, "a", 4, 5, 6)
    with pytest.raises(LimitExceeded, match="max-layouts-in-all"):
        add(limited, "a", 1)
    assert not limited.layouts.use("a2")  # a pull is served, but nothing is compiled ahead
    assert live_layouts(limited) == ["a4", "a5", "a6"]
    limited.layouts.add("a1", "org/a1", "{}", "b")  # who brings it back is who has it
    clock.now += TTL
    assert limited.layouts.use("a2")
    add(limited, "a", 4, 5)
    with pytest.raises(LimitExceeded):
        add(limited, "a", 6)


def test_layouts_that_nobody_uses_are_forgotten(names, catalog, clock):
    for layout_id, base in (("used", "org/x"), ("unused", "org/y"), ("idle", BASE)):
        catalog.layouts.add(layout_id, base, "{}")
        catalog.servers.announce(
            layout_id, f"of {layout_id}", Announcement((f"alias of {layout_id}",))
        )
    names.register("a", "d1")
    catalog.images.set_verdict("d1", LayoutVerdict("unused", ImageState.INCOMPATIBLE, "why"))
    clock.now += FORGET_AFTER_TTLS * TTL - SECOND
    catalog.layouts.use("used")
    assert catalog.layouts.forget_unused() == []
    clock.now += 2 * SECOND
    assert catalog.layouts.forget_unused() == ["unused"]
    assert catalog.layouts.forget_unused() == []
    assert catalog.layouts.ids() == ["idle", "used"]  # a server may load its first adapter yet
    assert catalog.layouts.bases("unused") == []
    assert catalog.layouts.bases("used") == ["alias of used", "org/x"]
    # What still goes on for it has no effect.
    assert not catalog.images.set_verdict("d1", LayoutVerdict("unused", ImageState.READY))
    assert not catalog.layouts.use("unused")
    assert catalog.layouts.add("unused", BASE, "{}")
    assert states(names, "a") == dict.fromkeys(("idle", "unused"), ImageState.PENDING)


def test_of_layouts_with_adapters_the_latest_are_kept(limited, clock):
    names = Names(limited)
    names.register("a", "d1")
    for number in range(10):
        clock.now += TTL
        limited.layouts.add(f"L{number}", BASE, "{}")
        limited.images.set_verdict(
            "d1", LayoutVerdict(f"L{number}", ImageState.INCOMPATIBLE, "why")
        )
    clock.now += FORGET_AFTER_TTLS * TTL
    assert limited.layouts.forget_unused() == ["L3", "L2", "L1", "L0"]
    assert len(limited.layouts.ids()) == 6
    assert len(states(names, "a")) == 6
