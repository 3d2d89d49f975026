"""What only a catalog that several replicas share has to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from adapter_store.catalog.catalog import Catalog
from adapter_store.errors import CatalogUnavailable
from servicekit.refs import AdapterName, AdapterRef
from tests.support.store.catalogs import Names, ReceivedEvents
from tests.support.wait import until

A = AdapterName("default", "a")


@pytest.fixture
def replicas(catalog_dsn) -> Iterator[list[Catalog]]:
    """Two replicas' views of one catalog."""
    catalogs = [Catalog(catalog_dsn, event_retention=1000) for _ in range(2)]
    yield catalogs
    for catalog in catalogs:
        catalog.close()


def test_each_replica_hears_of_every_change_in_order(replicas):
    received = [ReceivedEvents(catalog) for catalog in replicas]

    def work(catalog: Catalog, thread: int) -> None:
        for i in range(10):
            Names(catalog).register("shared", f"d{thread}-{i}")

    threads = [
        threading.Thread(target=work, args=(replicas[i % 2], i), daemon=True) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for each in received:
        assert each.wait(40) == list(range(1, 41))
    for thread in threads:
        thread.join()
    assert received[0].events == received[1].events == replicas[0].history.since(0, 100)
    assert Names(replicas[1]).get("shared").version == 40


def test_what_one_replica_recorded_the_other_reads_at_once(replicas):
    one, two = map(Names, replicas)
    _, revision = one.register("a", "d1", labels={"k": "v"})
    assert (two.get("a").labels, two.catalog.history.revision()) == ({"k": "v"}, revision)
    two.catalog.names.remove(A)
    assert one.catalog.names.page()[0] == []


def test_a_change_that_fails_leaves_no_gap(replicas):
    names = Names(replicas[0])
    names.register("a", "d1")
    with pytest.raises(LookupError), replicas[0].history.change() as (conn, _made):  # noqa: PT012
        conn.exec_driver_sql("UPDATE history SET revision = 99")
        raise LookupError
    assert Names(replicas[1]).register("a", "d2")[1] == 2


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_the_databases_encoding_is_its_own_matter(postgres, encoding):
    """SQL_ASCII is what a server has that was set up without a locale."""
    dsn = postgres.create_database(encoding=encoding)
    catalog = Catalog(dsn, event_retention=10)
    try:
        Names(catalog).register("a", "d1", labels={"für": "größe"})
        assert Names(catalog).get("a").labels == {"für": "größe"}
    finally:
        catalog.close()
        postgres.drop_database(dsn)


def test_a_restart_of_the_database_is_survived(postgres, replicas):
    received = [ReceivedEvents(catalog) for catalog in replicas]
    Names(replicas[0]).register("a", "d1")
    postgres.stop()
    try:
        for catalog in replicas:
            with pytest.raises(CatalogUnavailable, match="does not answer"):
                catalog.names.get(AdapterRef(A))
            with pytest.raises(CatalogUnavailable):
                catalog.names.remove(A)
    finally:
        postgres.start()
    record, revision = Names(replicas[1]).register("a", "d2")
    assert (record.version, revision) == (2, 2)
    for each in received:
        assert each.wait(2) == [1, 2]


def test_a_follower_that_was_away_for_long_goes_on(catalog_dsn, replicas):
    received = ReceivedEvents(replicas[1])
    short = Catalog(catalog_dsn, event_retention=10)
    replicas[1].history._follower._position = -100
    for i in range(64):
        Names(short).register("a", f"d{i}")
    short.close()
    until(lambda: received.events and received.events[-1].revision >= 64)


def test_replicas_that_start_together_migrate_once(postgres):
    dsn = postgres.create_database()
    opened: list[Catalog] = []

    def start() -> None:
        opened.append(Catalog(dsn, event_retention=10))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [catalog.history.revision() for catalog in opened] == [0] * 4
    for catalog in opened:
        catalog.close()
    postgres.drop_database(dsn)


def test_a_database_that_vanishes_without_a_word_is_noticed(replicas):
    with replicas[0].database.read() as conn:
        made = conn.connection.driver_connection.info.get_parameters()
    assert int(made["tcp_user_timeout"]) <= 10_000
    idle, every, count = (int(made[f"keepalives_{name}"]) for name in ("idle", "interval", "count"))
    assert idle + every * count <= 10


def test_read_only_server_is_disconnected(replicas):
    catalog = replicas[0]
    Names(catalog).register("a", "d1")
    catalog.history.close()
    catalog.database.engine.dispose()  # so that there is one connection
    with catalog.database.engine.begin() as conn:  # it stays so until the connection is closed
        conn.exec_driver_sql("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
    with pytest.raises(CatalogUnavailable, match="does not answer"):
        catalog.names.remove(A)
    assert Names(catalog).register("a", "d2")[1] == 2
