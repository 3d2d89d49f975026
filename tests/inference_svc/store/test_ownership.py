from __future__ import annotations

import pytest

from inference_svc.store import ownership
from inference_svc.store.ownership import GRACE_SECONDS, Owners


def test_a_claim_is_one_of_a_name_for_a_digest() -> None:
    known = Owners()
    known.note("x", "a/one")
    known.note("x", "b/one")
    known.note("y", "a/one")
    assert known.has({"a", "c"}, "x", 0.0)
    assert known.has({"b"}, "x", 0.0)
    assert not known.has({"c"}, "x", 0.0)
    assert not known.has({"b"}, "y", 0.0)
    known.doubt("a/one", 10.0)
    known.doubt("a/one", 20.0)  # still in doubt since the first
    late_s = 10.0 + GRACE_SECONDS
    assert known.has({"a"}, "x", late_s - 1)
    assert [known.has({"a"}, digest, late_s) for digest in "xy"] == [False, False]
    assert known.has({"b"}, "x", late_s)
    assert known.is_over({"a"}, "x", late_s)
    assert not known.is_over({"a", "b"}, "x", late_s)
    assert not known.is_over({"c"}, "x", late_s)  # it never had one
    known.note("x", "a/other")
    assert known.has({"a"}, "x", late_s)


def test_what_the_store_denies_is_forgotten() -> None:
    known = Owners()
    known.note("x", "a/one")
    known.note("x", "b/one")
    known.doubt_all(0.0)
    known.forget({"a"}, "x")
    assert not known.has({"a"}, "x", 0.0)
    assert not known.is_over({"a"}, "x", GRACE_SECONDS)
    assert known.is_over({"b"}, "x", GRACE_SECONDS)


def test_the_least_recently_asked_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "MAX_CLAIMS", 3)
    known = Owners()
    for digest, name in (("x", "a/n"), ("y", "a/n"), ("x", "a/n"), ("x", "b/n"), ("z", "c/n")):
        known.note(digest, name)
    found = [known.has({tenant}, digest, 0.0) for digest, tenant in ("xa", "xb", "ya", "zc")]
    assert found == [True, True, False, True]
