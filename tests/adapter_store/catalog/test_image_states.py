from __future__ import annotations

from datetime import timedelta

from adapter_store.catalog.catalog import Catalog
from adapter_store.core import ImageKey, ImageState, LayoutVerdict
from servicekit.refs import AdapterName

GRACE = timedelta(seconds=60)


def test_states_appear_in_the_record(names, catalog):
    catalog.add_layout("L1", ["org/tiny", "tiny"], {"x": 1})
    catalog.add_layout("L2", ["org/other"], {})
    record, _ = names.register("a", "d1")
    assert record.verdicts == (LayoutVerdict("L1", ImageState.PENDING),)
    ready = LayoutVerdict("L1", ImageState.READY, "", 256)
    catalog.set_verdict("d1", LayoutVerdict("L1", ImageState.COMPILING))
    catalog.set_verdict("d1", ready)
    assert names.get("a").verdicts == (ready,)
    assert catalog.image_access(ImageKey("d1", "L1"), GRACE).verdict == ready


def test_adding_a_layout_again_changes_nothing(catalog):
    assert catalog.add_layout("L1", ["a", "b", "a"], {"x": 1})
    assert not catalog.add_layout("L1", ["c"], {"x": 2})
    assert catalog.layout_body("L1") == {"x": 1}
    assert catalog.layout_body("L0") is None
    assert catalog.layout_ids() == ["L1"]


def test_aliases_serve(names, catalog):
    catalog.add_layout("L1", ["org/tiny", "tiny"], {})
    names.register("a", "d1", base_model="tiny")
    names.register("b", "d2", base_model="elsewhere")
    assert catalog.image_access(ImageKey("d1", "L1"), GRACE).serves_base
    assert not catalog.image_access(ImageKey("d2", "L1"), GRACE).serves_base
    assert catalog.image_access(ImageKey("d2", "L1"), GRACE).has_record


def test_unfinished_are_the_current_digests_without_a_verdict(names, catalog):
    catalog.add_layout("L1", ["org/tiny"], {})
    names.register("a", "old")
    names.register("a", "d1")
    names.register("b", "d2")
    names.register("c", "d3")
    names.register("d", "d3")
    names.register("gone", "d4")
    catalog.remove(AdapterName("default", "gone"))
    names.register("e", "d5", base_model="org/other")
    catalog.set_verdict("d2", LayoutVerdict("L1", ImageState.READY))
    catalog.set_verdict("d3", LayoutVerdict("L1", ImageState.COMPILING))
    assert catalog.unfinished("L1", "", 10) == ["d1", "d3"]
    assert catalog.unfinished("L1", "", 1) == ["d1"]
    assert catalog.unfinished("L1", "d1", 10) == ["d3"]
    catalog.set_verdict("d1", LayoutVerdict("L1", ImageState.INCOMPATIBLE, "too wide"))
    assert catalog.unfinished("L1", "", 10) == ["d3"]


def test_a_verdict_for_a_collected_blob_is_dropped(catalog):
    catalog.add_layout("L1", ["org/tiny"], {})
    catalog.set_verdict("gone", LayoutVerdict("L1", ImageState.READY))
    assert catalog.image_access(ImageKey("gone", "L1"), GRACE).verdict.state is ImageState.PENDING


def test_what_was_compiling_is_pending_after_a_restart(names, catalog, place):
    catalog.add_layout("L1", ["org/tiny"], {})
    names.register("a", "d1")
    names.register("b", "d2")
    catalog.set_verdict("d1", LayoutVerdict("L1", ImageState.COMPILING))
    catalog.set_verdict("d2", LayoutVerdict("L1", ImageState.READY))
    catalog.close()
    again = Catalog(place, event_retention=10)
    assert again.image_access(ImageKey("d1", "L1"), GRACE).verdict.state is ImageState.PENDING
    assert again.image_access(ImageKey("d2", "L1"), GRACE).verdict.state is ImageState.READY
    again.close()


def test_another_compiler_forgets_verdicts(names, catalog):
    assert catalog.adopt_compiler("1")
    catalog.add_layout("L1", ["org/tiny"], {})
    names.register("a", "d1")
    catalog.set_verdict("d1", LayoutVerdict("L1", ImageState.INCOMPATIBLE, "no"))
    assert not catalog.adopt_compiler("1")
    assert (
        catalog.image_access(ImageKey("d1", "L1"), GRACE).verdict.state is ImageState.INCOMPATIBLE
    )
    assert catalog.adopt_compiler("2")
    assert catalog.image_access(ImageKey("d1", "L1"), GRACE).verdict.state is ImageState.PENDING


def test_pinned_keys(names, catalog):
    names.register("a", "d1", pinned=True)
    assert catalog.pinned_keys() == []
    catalog.add_layout("L1", ["org/tiny"], {})
    catalog.add_layout("L2", ["org/tiny"], {})
    assert sorted(catalog.pinned_keys()) == [("d1", "L1"), ("d1", "L2")]
    catalog.remove(AdapterName("default", "a"))
    assert catalog.pinned_keys() == []


def test_any_number_of_digests(names):
    names.register("a", "d1")
    digests = [f"d{i}" for i in range(70_000)]  # more than a statement has places for values
    assert names.catalog.unknown_digests(digests) == set(digests) - {"d1"}
