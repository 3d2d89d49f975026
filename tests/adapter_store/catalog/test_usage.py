"""Quotas, checked where content is recorded."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.tables import usage
from adapter_store.core import Quota
from servicekit.errors import QuotaExceeded
from servicekit.refs import AdapterName
from tests.support.store.catalogs import Names


def register(names, name: str, digest: str, quota: Quota, source_bytes: int = 100):
    return names.catalog.names.register(
        names.new(name, digest, source_bytes=source_bytes), "", quota
    )


def refused(names, subject: str, *arguments, **more) -> None:
    revision = names.catalog.history.revision()
    with pytest.raises(QuotaExceeded, match=f"^{subject}: tenant ") as caught:
        register(names, *arguments, **more)
    assert caught.value.subject == subject
    assert caught.value.retry_after_s == 0
    assert names.catalog.history.revision() == revision


def test_adapters(names):
    quota = Quota(max_adapters=2)
    register(names, "t/a", "d1", quota)
    register(names, "t/b", "d1", quota)
    refused(names, "max_adapters", "t/c", "d1", quota)
    register(names, "t/a", "d2", quota)  # a new version is no new adapter
    register(names, "u/c", "d1", quota)  # nor is another tenant's
    names.catalog.names.remove(AdapterName("t", "b"))
    register(names, "t/c", "d1", quota)
    refused(names, "max_adapters", "t/b", "d1", quota)  # deleted: it would be one more again


def test_bytes_count_each_content_once_for_each_tenant(names):
    quota = Quota(max_bytes=250)
    register(names, "t/a", "d1", quota)
    register(names, "t/b", "d1", quota)
    register(names, "t/a", "d2", quota)
    refused(names, "max_bytes", "t/c", "d3", quota)
    register(names, "t/c", "d3x", quota, source_bytes=50)
    refused(names, "max_bytes", "t/c", "d4", quota, source_bytes=1)
    register(names, "u/a", "d3", quota)
    refused(names, "max_bytes", "t/c", "d3", quota)  # kept for another, not for this one


def test_deleted_bytes_count_until_they_expire(names):
    quota = Quota(max_bytes=100)
    register(names, "t/a", "d1", quota)
    names.catalog.names.remove(AdapterName("t", "a"))
    refused(names, "max_bytes", "t/a", "d2", quota)
    register(names, "t/a", "d1", quota)  # the same content takes no more
    names.catalog.names.remove(AdapterName("t", "a"))
    names.catalog.expiry.expire_deleted(timedelta(0))
    register(names, "t/a", "d2", quota)


def test_names_in_all_are_bounded(names, monkeypatch):
    """A deleted name keeps its row for good: without a bound they would fill the catalog."""
    monkeypatch.setattr(usage, "MAX_NAMES", 2)
    quota = Quota(max_adapters=1)
    for name in ("t/a", "t/b"):
        names.catalog.names.check_capacity(AdapterName(*name.split("/")), "", quota)
        register(names, name, "d1", quota)
        names.catalog.names.remove(AdapterName(*name.split("/")))
    with pytest.raises(
        QuotaExceeded, match=r"^name: tenant 't' has used all of its 2 names"
    ) as caught:
        names.catalog.names.check_capacity(AdapterName("t", "c"), "", quota)
    assert caught.value.subject == "name"
    names.catalog.names.check_capacity(AdapterName("t", "a"), "", quota)  # it has its row
    names.catalog.names.check_capacity(AdapterName("u", "c"), "", quota)


def test_a_lowered_quota_refuses_only_what_would_take_more(names):
    for name in ("t/a", "t/b"):
        names.register(name, f"d-{name}")
    quota = Quota(max_adapters=1, max_bytes=1)
    register(names, "t/a", "d-t/b", quota)
    register(names, "t/a", "d-t/a", quota)
    refused(names, "max_adapters", "t/c", "d-t/a", quota)
    refused(names, "max_bytes", "t/a", "d-new", quota)


def test_restored_name_counts_again(names):
    quota = Quota(max_adapters=1)
    register(names, "t/a", "d1", quota)
    register(names, "t/a", "d2", quota)
    names.catalog.names.rollback(AdapterName("t", "a"), 1, quota=quota)
    names.catalog.names.remove(AdapterName("t", "a"))
    register(names, "t/b", "d1", quota)
    with pytest.raises(QuotaExceeded, match="max_adapters: tenant 't' would have 2"):
        names.catalog.names.rollback(AdapterName("t", "a"), 1, quota=quota)
    names.catalog.names.remove(AdapterName("t", "b"))
    assert names.catalog.names.rollback(AdapterName("t", "a"), 1, quota=quota)[0].version == 1


def test_nothing_at_all(names):
    refused(names, "max_adapters", "t/a", "d1", Quota(max_adapters=0))
    refused(names, "max_bytes", "t/a", "d1", Quota(max_bytes=0))


def test_early_check(names):
    catalog, name = names.catalog, AdapterName("t", "a")
    names.register("t/b", "d1")
    catalog.names.check_capacity(name, "", Quota(2, 101))
    with pytest.raises(QuotaExceeded, match="max_adapters"):
        catalog.names.check_capacity(name, "", Quota(max_adapters=1))
    with pytest.raises(QuotaExceeded, match="max_bytes"):
        catalog.names.check_capacity(name, "", Quota(max_bytes=100))
    catalog.names.check_capacity(name, "d1", Quota(max_bytes=100))


@pytest.mark.parametrize("quota", [Quota(max_adapters=5), Quota(max_bytes=500)])
def test_quotas_hold_however_many_register_at_once(names, quota):
    assert num_granted([names], quota) == 5


@pytest.mark.parametrize("quota", [Quota(max_adapters=5), Quota(max_bytes=500)])
def test_quotas_hold_over_replicas(catalog_dsn, quota):
    replicas = [Catalog(catalog_dsn, event_retention=1000) for _ in range(2)]
    try:
        assert num_granted([Names(catalog) for catalog in replicas], quota) == 5
    finally:
        for catalog in replicas:
            catalog.close()


def num_granted(replicas: list[Names], quota: Quota) -> int:
    """Eight threads make 32 registrations of new names and contents."""
    granted, start = [], threading.Barrier(8)

    def work(worker: int) -> None:
        names = replicas[worker % len(replicas)]
        start.wait()
        for i in range(4):
            try:
                register(names, f"t/n{worker}-{i}", f"d{worker}-{i}", quota)
            except QuotaExceeded:
                continue
            granted.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replicas[0].catalog.counts().adapters == len(granted)
    return len(granted)


def test_byte_counts_are_integers_in_every_database(names) -> None:
    """PostgreSQL sums them into a decimal number, which no answer could carry."""
    names.register("t/a", "sha256:a")
    names.register("t/b", "sha256:b")
    blob_bytes = names.catalog.counts().blob_bytes
    assert (type(blob_bytes), blob_bytes) == (int, 200)
