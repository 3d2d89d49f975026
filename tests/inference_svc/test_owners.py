from __future__ import annotations

import pytest

from inference_svc import owners
from inference_svc.owners import Owners


def test_the_least_recently_asked_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "MAX_DIGESTS", 2)
    known = Owners()
    known.note("x", "a")
    known.note("y", "a")
    known.note("x", "b")
    known.note("z", "c")
    assert known.of("x") == {"a", "b"}
    assert known.of("y") == frozenset()
    assert known.of("z") == {"c"}
