from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import insert

from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.tables.lookup import MIN_HIDDEN_MICROS
from adapter_store.catalog.tables.schema import images
from adapter_store.core import Announcement, ImageKey, ImageState, LayoutVerdict
from servicekit.refs import AdapterName
from tests.support.store.catalogs import connected

GRACE = timedelta(seconds=60)


def test_states_appear_in_the_record(names, catalog):
    catalog.layouts.add("L1", "org/tiny", '{"x": 1}')
    catalog.layouts.add("L2", "org/other", "{}")
    record, _ = names.register("a", "d1")
    assert record.verdicts == (LayoutVerdict("L1", ImageState.PENDING),)
    ready = LayoutVerdict("L1", ImageState.READY, "", 256)
    catalog.images.set_verdict("d1", LayoutVerdict("L1", ImageState.COMPILING))
    catalog.images.set_verdict("d1", ready)
    assert names.get("a").verdicts == (ready,)
    assert catalog.images.access(ImageKey("d1", "L1"), GRACE).verdict == ready


def test_adding_a_layout_again_changes_nothing(catalog):
    assert catalog.layouts.add("L1", "a", '{"x": 1}')
    assert not catalog.layouts.add("L1", "c", '{"x": 2}')
    assert catalog.layouts.body("L1") == '{"x": 1}'
    assert catalog.layouts.body("L0") is None
    assert catalog.layouts.ids() == ["L1"]


def test_aliases_serve(names, catalog):
    catalog.layouts.add("L1", "org/tiny", "{}")
    catalog.servers.announce("L1", "A1", Announcement(("tiny",)))
    names.register("a", "d1", base_model="tiny")
    names.register("b", "d2", base_model="elsewhere")
    assert catalog.images.access(ImageKey("d1", "L1"), GRACE).serves_base
    assert not catalog.images.access(ImageKey("d2", "L1"), GRACE).serves_base
    assert catalog.images.access(ImageKey("d2", "L1"), GRACE).has_record


def test_unfinished_are_the_current_digests_without_a_verdict(names, catalog):
    catalog.layouts.add("L1", "org/tiny", "{}")
    names.register("a", "old")
    names.register("a", "d1")
    names.register("b", "d2")
    names.register("c", "d3")
    names.register("d", "d3")
    names.register("gone", "d4")
    catalog.names.remove(AdapterName("default", "gone"))
    names.register("e", "d5", base_model="org/other")
    catalog.images.set_verdict("d2", LayoutVerdict("L1", ImageState.READY))
    catalog.images.set_verdict("d3", LayoutVerdict("L1", ImageState.COMPILING))
    assert catalog.images.unfinished("L1", "", 10) == ["d1", "d3"]
    assert catalog.images.unfinished("L1", "", 1) == ["d1"]
    assert catalog.images.unfinished("L1", "d1", 10) == ["d3"]
    catalog.images.set_verdict("d1", LayoutVerdict("L1", ImageState.INCOMPATIBLE, "too wide"))
    assert catalog.images.unfinished("L1", "", 10) == ["d3"]


def test_a_verdict_for_a_collected_blob_is_dropped(catalog):
    catalog.layouts.add("L1", "org/tiny", "{}")
    catalog.images.set_verdict("gone", LayoutVerdict("L1", ImageState.READY))
    assert catalog.images.access(ImageKey("gone", "L1"), GRACE).verdict.state is ImageState.PENDING


def test_what_was_compiling_is_pending_after_a_restart(names, catalog, place):
    catalog.layouts.add("L1", "org/tiny", "{}")
    names.register("a", "d1")
    names.register("b", "d2")
    catalog.images.set_verdict("d1", LayoutVerdict("L1", ImageState.COMPILING))
    catalog.images.set_verdict("d2", LayoutVerdict("L1", ImageState.READY))
    catalog.close()
    again = Catalog(place, event_retention=10)
    assert again.images.access(ImageKey("d1", "L1"), GRACE).verdict.state is ImageState.PENDING
    assert again.images.access(ImageKey("d2", "L1"), GRACE).verdict.state is ImageState.READY
    again.close()


def test_another_compiler_forgets_verdicts(names, catalog):
    assert catalog.images.adopt_compiler("1")
    catalog.layouts.add("L1", "org/tiny", "{}")
    names.register("a", "d1")
    catalog.images.set_verdict("d1", LayoutVerdict("L1", ImageState.INCOMPATIBLE, "no"))
    assert not catalog.images.adopt_compiler("1")
    assert (
        catalog.images.access(ImageKey("d1", "L1"), GRACE).verdict.state is ImageState.INCOMPATIBLE
    )
    assert catalog.images.adopt_compiler("2")
    assert catalog.images.access(ImageKey("d1", "L1"), GRACE).verdict.state is ImageState.PENDING


def test_pinned_keys(names, catalog):
    names.register("a", "d1", pinned=True)
    assert catalog.images.pinned_keys() == []
    catalog.layouts.add("L1", "org/tiny", "{}")
    catalog.layouts.add("L2", "org/tiny", "{}")
    assert sorted(catalog.images.pinned_keys()) == [("d1", "L1"), ("d1", "L2")]
    catalog.names.remove(AdapterName("default", "a"))
    assert catalog.images.pinned_keys() == []


def test_any_number_of_digests(names):
    names.register("a", "d1")
    digests = [f"d{i}" for i in range(70_000)]  # more than a statement has places for values
    assert names.catalog.blobs.unknown(digests) == set(digests) - {"d1"}


BUILD = timedelta(seconds=10)
LEAST = timedelta(microseconds=MIN_HIDDEN_MICROS)
KEY = ImageKey("d1", "L1")


def state(names, name: str) -> ImageState:
    return names.get(name).verdicts[0].state


def hidden_s(catalog: Catalog, tenant: str) -> float:
    return catalog.images.access(KEY, GRACE, frozenset([tenant])).hidden_s


def build(names, catalog, clock, final: ImageState, duration: timedelta) -> None:
    """Registers d1 as a/x, whose image is built then, or being built."""
    catalog.layouts.add("L1", "org/tiny", "{}")
    names.register("a/x", "d1")
    catalog.images.set_verdict("d1", LayoutVerdict("L1", ImageState.COMPILING))
    if final is not ImageState.COMPILING:
        clock.now += duration
        micros = duration // timedelta(microseconds=1)
        catalog.images.set_verdict("d1", LayoutVerdict("L1", final, "why", 256, micros))


@pytest.mark.parametrize(
    ("final", "duration", "hidden"),
    [
        (ImageState.READY, BUILD, BUILD),
        (ImageState.INCOMPATIBLE, BUILD, BUILD),
        (ImageState.INCOMPATIBLE, timedelta(microseconds=1), LEAST),
        (ImageState.COMPILING, BUILD, LEAST),
    ],
)
def test_known_content_is_pending_for_as_long_as_its_build_took(
    names, catalog, clock, final, duration, hidden
):
    build(names, catalog, clock, final, duration)
    assert state(names, "a/x") is final  # who waited for the build sees its end
    assert hidden_s(catalog, "a") == 0
    record, _ = names.register("b/y", "d1")
    assert record.verdicts == (LayoutVerdict("L1", ImageState.PENDING, is_hidden=True),)
    assert 0 < hidden_s(catalog, "b") <= hidden.total_seconds()
    clock.now += hidden - timedelta(milliseconds=20)
    assert state(names, "b/y") is ImageState.PENDING
    clock.now += timedelta(milliseconds=20)
    assert state(names, "b/y") is final
    assert hidden_s(catalog, "b") == 0


def test_what_an_earlier_release_has_built_is_hidden_too(names, catalog, clock, place):
    catalog.layouts.add("L1", "org/tiny", "{}")
    names.register("a/x", "d1")
    with connected(place) as conn:  # as a migration leaves it: no time of the build
        values = {"state": "ready", "reason": "", "image_bytes": 256}
        conn.execute(insert(images).values(digest="d1", layout_id="L1", **values))
    names.register("b/y", "d1")
    assert state(names, "b/y") is ImageState.PENDING
    clock.now += LEAST
    assert state(names, "b/y") is ImageState.READY


def test_a_clock_that_is_set_back_makes_nothing_young_again(names, catalog, clock):
    build(names, catalog, clock, ImageState.READY, BUILD)
    names.register("b/y", "d1")
    clock.now -= timedelta(seconds=30)  # as much as replicas' clocks may differ
    assert state(names, "b/y") is ImageState.PENDING
    assert 0 < hidden_s(catalog, "b") <= BUILD.total_seconds()
    clock.now -= timedelta(hours=1)
    assert state(names, "b/y") is state(names, "a/x") is ImageState.READY
    assert hidden_s(catalog, "b") == 0


def test_a_clock_that_jumps_stops_nothing(names, catalog, clock):
    build(names, catalog, clock, ImageState.READY, BUILD)
    for jump in (timedelta(days=365), timedelta(days=-730), timedelta(days=365)):
        clock.now += jump
        name = f"b/y{jump.days}"
        names.register(name, "d1")
        assert hidden_s(catalog, "b") <= BUILD.total_seconds()
        clock.now += BUILD
        assert state(names, name) is ImageState.READY
        assert names.get(name).verdicts[0].image_bytes == 256
