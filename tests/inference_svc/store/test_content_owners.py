from __future__ import annotations

import pytest

from inference_svc.store import content_owners
from inference_svc.store.content_owners import GRACE_SECONDS, OwnershipCache


def test_claims_expire_a_grace_after_a_change() -> None:
    cache = OwnershipCache()
    cache.confirm("x", "a/one")
    cache.confirm("x", "b/one")
    cache.confirm("y", "a/one")
    assert cache.is_owner({"a", "c"}, "x", 0.0)
    assert cache.is_owner({"b"}, "x", 0.0)
    assert not cache.is_owner({"c"}, "x", 0.0)
    assert not cache.is_owner({"b"}, "y", 0.0)
    cache.mark_stale("a/one", 10.0)
    cache.mark_stale("a/one", 20.0)  # stale since the first
    late_s = 10.0 + GRACE_SECONDS
    assert cache.is_owner({"a"}, "x", late_s - 1)
    assert [cache.is_owner({"a"}, digest, late_s) for digest in "xy"] == [False, False]
    assert cache.is_owner({"b"}, "x", late_s)
    assert cache.needs_revalidation({"a"}, "x", late_s)
    assert not cache.needs_revalidation({"a", "b"}, "x", late_s)
    assert not cache.needs_revalidation({"c"}, "x", late_s)  # it never had one
    cache.confirm("x", "a/other")
    assert cache.is_owner({"a"}, "x", late_s)


def test_denied_claims_are_removed() -> None:
    cache = OwnershipCache()
    cache.confirm("x", "a/one")
    cache.confirm("x", "b/one")
    cache.mark_all_stale(0.0)
    cache.remove({"a"}, "x")
    assert not cache.is_owner({"a"}, "x", 0.0)
    assert not cache.needs_revalidation({"a"}, "x", GRACE_SECONDS)
    assert cache.needs_revalidation({"b"}, "x", GRACE_SECONDS)


def test_least_recently_confirmed_is_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_owners, "MAX_CLAIMS", 3)
    cache = OwnershipCache()
    for digest, name in (("x", "a/n"), ("y", "a/n"), ("x", "a/n"), ("x", "b/n"), ("z", "c/n")):
        cache.confirm(digest, name)
    found = [cache.is_owner({tenant}, digest, 0.0) for digest, tenant in ("xa", "xb", "ya", "zc")]
    assert found == [True, True, False, True]
