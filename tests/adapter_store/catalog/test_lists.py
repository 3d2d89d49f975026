"""Pages, filters and tokens; and that a hundred thousand adapters are no trouble."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import event, insert

from adapter_store.api.convert import to_adapter
from adapter_store.catalog import names as names_module
from adapter_store.catalog.tables import schema
from adapter_store.core import ImageContent, ImageState, LayoutVerdict
from servicekit.errors import InvalidArgument
from servicekit.refs import AdapterName
from tests.support.store.catalogs import connected


def test_pages_in_order_without_gap_or_repeat(names, catalog):
    everything = sorted(f"{tenant}/n{i:02}" for tenant in ("a", "b", "default") for i in range(7))
    for name in reversed(everything):
        names.register(name, f"d{name}")
    found, token, revision = [], "", 0
    while True:
        page, token, revision = catalog.names.page(4, token)
        found += [str(record.name) for record in page]
        if not token:
            break
    assert found == everything
    assert revision == 21


def test_a_name_that_appears_between_pages_disturbs_nothing(names, catalog):
    for name in ("b", "d", "f"):
        names.register(name, "d")
    _, token, _ = catalog.names.page(2)
    names.register("a", "d")
    names.register("e", "d")
    assert [r.name.name for r in catalog.names.page(2, token)[0]] == ["e", "f"]


def test_filters(names, catalog):
    names.register("x/cat", "d1", labels={"team": "one", "k8s.io/app": "a=b"})
    names.register("x/cow", "d2", labels={"team": "two"}, base_model="org/other")
    names.register("y/cat", "d3", labels={"team": "one"})

    def found(text: str) -> list[str]:
        return [str(record.name) for record in catalog.names.page(filter_text=text)[0]]

    assert found("tenant=x") == ["x/cat", "x/cow"]
    assert found("name=ca") == ["x/cat", "y/cat"]
    assert found("name=c tenant=x base_model=org/other") == ["x/cow"]
    assert found("label.team=one") == ["x/cat", "y/cat"]
    assert found("label.team=one label.k8s.io/app=a=b") == ["x/cat"]
    assert found("label.team=") == []


@pytest.mark.parametrize(
    "text", ["color=red", "tenant", "label.=x", 'label.a"b=x', "tenant=a tenant=b", "=x"]
)
def test_malformed_filters_name_the_field(catalog, text):
    with pytest.raises(InvalidArgument, match=r"^filter") as caught:
        catalog.names.page(filter_text=text)
    assert caught.value.subject == "filter"


@pytest.mark.parametrize(
    "token", ["x", "!!!", "WzFd", "bnVsbA", "WyJhIiwxLCIiXQ", "YQ" * 10_000, "WyJhIiwiYiIsIngiXQ"]
)
def test_malformed_tokens_name_the_field(catalog, token):
    with pytest.raises(InvalidArgument, match=r"^page_token") as caught:
        catalog.names.page(page_token=token)
    assert caught.value.subject == "page_token"


def test_a_token_belongs_to_its_filter(names, catalog):
    for name in ("a", "b"):
        names.register(name, "d")
    _, token, _ = catalog.names.page(1, filter_text="tenant=default")
    with pytest.raises(InvalidArgument, match="another filter"):
        catalog.names.page(1, token, "tenant=x")


def fill(place, num_adapters: int) -> None:
    """Rows as 100,000 registrations would leave them, without their 100,000 commits."""
    rows = range(1, num_adapters + 1)
    with connected(place) as conn:
        for table, make in (
            (
                schema.blobs,
                lambda i: {
                    "digest": f"sha256:{i:064x}",
                    "rank": 8,
                    "targets": '["q_proj"]',
                    "source_bytes": 1,
                    "create_time": 0,
                },
            ),
            (
                schema.adapters,
                lambda i: {
                    "id": i,
                    "tenant": f"t{i % 100:02}",
                    "name": f"n{i:06}",
                    "current_version": 1,
                    "last_version": 1,
                    "revision": i,
                    "update_time": 0,
                },
            ),
            (
                schema.versions,
                lambda i: {
                    "adapter_id": i,
                    "version": 1,
                    "digest": f"sha256:{i:064x}",
                    "base_model": "org/tiny",
                    "source_uri": "",
                    "labels": "{}",
                    "pinned": False,
                    "create_time": 0,
                },
            ),
        ):
            conn.execute(insert(table), [make(i) for i in rows])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_time_and_statements_do_not_grow_with_the_catalog(names, catalog, place, count):
    fill(place, count)
    catalog.layouts.add("L", "org/tiny", "{}")
    statements: list[str] = []
    event.listen(
        catalog.database.engine, "before_cursor_execute", lambda *args: statements.append(args[2])
    )
    start = time.process_time()
    page, token, _ = catalog.names.page(1000, "", "")
    page, token, _ = catalog.names.page(1000, token, "")
    assert len(page) == 1000
    assert page[-1].verdicts
    # One query for the rows, one each for layouts, verdicts and the revision, and the BEGIN.
    assert len(statements) == 12
    assert catalog.names.get(names.ref("t01/n000001"))[0].version == 1
    names.register("t01/n000001", "d-new")
    assert len(catalog.images.unfinished("L", "", 500)) == 500
    assert catalog.counts().adapters == count
    assert time.process_time() - start < 5  # some tenths of a second


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_lookups_and_pages_use_indexes(catalog, place):
    def plan(sql: str) -> str:
        with connected(place) as conn:
            return " ".join(str(row) for row in conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}"))

    joined = (
        "SELECT * FROM adapters JOIN versions ON versions.adapter_id = adapters.id "
        "JOIN blobs ON blobs.digest = versions.digest "
    )
    for where in (
        "WHERE adapters.tenant = 'a' AND adapters.name = 'b' AND versions.version = 1",
        "WHERE versions.digest = 'd' AND versions.delete_time IS NULL",
        "WHERE current_version > 0 AND versions.version = current_version "
        "AND (tenant, name) > ('a', 'b') ORDER BY tenant, name LIMIT 5",
    ):
        found = plan(joined + where)
        assert "SCAN" not in found, found
        assert "TEMP B-TREE" not in found, found


def test_sql_in_a_filter_is_only_text(names, catalog):
    names.register("a", "d")
    assert catalog.names.page(filter_text="tenant='OR'1'='1")[0] == []
    assert catalog.names.page(filter_text="name=%")[0] == []


def test_page_size_is_within_the_contract(names, catalog, place):
    fill(place, 1500)
    assert len(catalog.names.page()[0]) == 100
    assert len(catalog.names.page(5000)[0]) == 1000
    assert catalog.names.page(1)[0][0].name == AdapterName("t00", "n000100")


def test_a_page_ends_before_its_bytes_are_too_many(names, catalog, monkeypatch):
    monkeypatch.setattr(names_module, "PAGE_BYTES", 5000)
    everything = [f"default/n{i}" for i in range(8)]
    for name in everything:
        names.register(name, f"d{name}", description="x" * 2000)
    found, token, sizes = [], "", []
    while not sizes or token:
        page, token, _ = catalog.names.page(100, token)
        found += [str(record.name) for record in page]
        sizes.append(len(page))
    assert found == everything
    assert sizes == [2, 2, 2, 2]
    monkeypatch.setattr(names_module, "PAGE_BYTES", 1)
    assert len(catalog.names.page(100)[0]) == 1


def test_the_estimate_of_a_records_bytes_is_never_too_low(names, catalog):
    labels = {f"k{i}": "v" * 200 for i in range(64)}
    names.register("default/n", "d", description="é" * 4000, labels=labels)
    catalog.layouts.add("L", "base", "{}")
    spaces = tuple(f"tower {number} {'x' * 100}" for number in range(16))
    content = ImageContent((), (), unused_spaces=spaces)
    catalog.images.set_verdict("d", LayoutVerdict("L", ImageState.READY, "", 256, content=content))
    record = catalog.names.page()[0][0]
    assert to_adapter(record).ByteSize() > 16 * 100
    assert to_adapter(record).ByteSize() <= record.message_bytes < 3 * to_adapter(record).ByteSize()
