"""Whose memory is freed before an upload is refused."""

from __future__ import annotations

import pytest

from adapter_store.sources.limits import StagedBytes
from servicekit.errors import ShareExceeded
from servicekit.shares import Shares


class Memory:
    """A place of ten bytes, of which one tenant gets at most `share`; says what was freed."""

    def __init__(self, share: float) -> None:
        self.shares = Shares("memory", 10, share)
        self.freed: list[str] = []
        self.kept = {name: StagedBytes(self.shares, name) for name in ("own", "other")}
        room = (lambda: self.free("own"), lambda: self.free("other"))
        self.staged = StagedBytes(self.shares, "own", make_room=room)

    def free(self, name: str) -> None:
        self.freed.append(name)
        self.kept[name].release()


def test_a_tenant_at_its_share_frees_its_own_alone() -> None:
    memory = Memory(0.5)
    memory.kept["other"].add(2)
    memory.kept["own"].add(4)
    memory.staged.add(2)
    assert memory.freed == ["own"]
    with pytest.raises(ShareExceeded):
        memory.staged.add(3)
    assert memory.freed == ["own", "own"]
    assert memory.shares.used_by("other") == 2


def test_a_full_place_is_freed_of_what_others_have_deleted() -> None:
    memory = Memory(1.0)
    memory.kept["other"].add(8)
    memory.kept["own"].add(2)
    memory.staged.add(2)
    assert memory.freed == ["own"]
    memory.staged.add(4)
    assert memory.freed == ["own", "own", "other"]
