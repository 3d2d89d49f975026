"""The reserve of a volume: given up when it is full, and whole again once it is not."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress

import pytest

from adapter_store.blobs.volume import (
    LARGE_PIECES,
    NUM_PIECES,
    RESERVE_BYTES,
    SMALL_PIECES,
    Volume,
)
from adapter_store.errors import DiskFull
from tests.support.machine.small_volume import SmallVolume, small_volume

pytestmark = pytest.mark.processes

MIB = 1 << 20


@pytest.fixture
def small(tmp_path) -> Iterator[SmallVolume]:
    with small_volume(tmp_path / "volume", 8 * MIB) as small:
        yield small


@pytest.fixture
def evicted() -> list[int]:
    return []


@pytest.fixture
def volume(small, evicted) -> Volume:
    volume = Volume(small.outside, evicted.append)
    assert volume.restore()
    return volume


def pieces(small: SmallVolume) -> int:
    return len(list((small.outside / "reserve").iterdir()))


def test_a_reserve_really_holds_space(small, volume):
    assert small.free_bytes == 7 * MIB
    assert pieces(small) == NUM_PIECES


def test_it_is_given_up_piece_by_piece(small, volume, evicted):
    piece_bytes = MIB // NUM_PIECES
    volume.make_room()
    assert pieces(small) == NUM_PIECES, "there is space"
    for is_large in (False, True):
        left, num_pieces = pieces(small), LARGE_PIECES if is_large else SMALL_PIECES
        small.fill()
        assert not volume.has_space()
        volume.make_room(is_large=is_large)
        assert small.free_bytes == num_pieces * piece_bytes
        assert pieces(small) == left - num_pieces
    while pieces(small):
        small.fill()
        volume.make_room()
        assert small.free_bytes
        assert not evicted
    small.fill()
    volume.make_room()
    assert evicted == [SMALL_PIECES * piece_bytes]


def test_nothing_is_added_until_it_is_whole_again(small, volume):
    small.fill()
    volume.make_room()
    with pytest.raises(DiskFull, match="--data-dir is full"):
        volume.check_space(0)
    small.empty()
    (small.outside / "less").write_bytes(bytes(27 * MIB // 4))
    assert not volume.has_space(), "it would be full again at once"
    (small.outside / "less").unlink()
    volume.check_space(5 * MIB)
    assert pieces(small) == NUM_PIECES
    with pytest.raises(DiskFull):
        volume.check_space(8 * MIB)


def test_a_restart_finds_what_is_left(small, volume, evicted):
    small.fill()
    volume.make_room()
    again = Volume(small.outside, evicted.append)
    assert not again.has_space()
    small.empty()
    with open(small.outside / "reserve" / "0", "r+b") as piece:  # as a copy of the folder has it
        size = piece.seek(0, 2)
        piece.truncate(0)
        piece.truncate(size)
    again = Volume(small.outside, evicted.append)
    assert again.restore()
    assert small.free_bytes == 7 * MIB


def test_without_inodes_it_is_full(tmp_path):
    with small_volume(tmp_path / "volume", 8 * MIB, "nr_inodes=40") as small:
        volume = Volume(small.outside, evict=lambda num_bytes: None)
        assert volume.has_space()
        with suppress(OSError):
            for number in range(40):
                (small.outside / f"empty{number}").touch()
        with pytest.raises(DiskFull):
            volume.check_space(0)
        volume.make_room()
        for number in range(4):
            (small.outside / f"needed{number}").touch()


def test_a_large_volume_gives_little(tmp_path):
    volume = Volume(tmp_path, evict=lambda num_bytes: None)
    assert volume.restore()
    sizes = [path.stat().st_size for path in (tmp_path / "reserve").iterdir()]
    assert sum(sizes) == RESERVE_BYTES


def fail_allocations(monkeypatch, number: int) -> None:
    """Has the file system refuse to allocate space that is not written."""

    def fail(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM])
def test_where_space_cannot_be_allocated_it_is_written(small, evicted, monkeypatch, number):
    fail_allocations(monkeypatch, number)
    volume = Volume(small.outside, evicted.append)
    volume.check_space(5 * MIB)
    assert small.free_bytes == 7 * MIB
    assert pieces(small) == NUM_PIECES
    small.fill()
    with pytest.raises(DiskFull):
        volume.check_space(0)
    volume.make_room()
    assert small.free_bytes == SMALL_PIECES * MIB // NUM_PIECES


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_that_is_used_up_is_a_full_volume(small, evicted, monkeypatch, number):
    fail_allocations(monkeypatch, number)
    with pytest.raises(DiskFull):
        Volume(small.outside, evicted.append).check_space(0)
    assert pieces(small) == 0


def test_without_a_reserve_it_is_used(small, evicted, caplog):
    """An error of the reserve that is not of space refuses nothing, and is logged once."""
    (small.outside / "reserve").write_text("no folder")
    volume = Volume(small.outside, evicted.append)
    for _ in range(3):
        volume.check_space(5 * MIB)
    [record] = caplog.records
    assert "has no reserve" in record.message
    volume.make_room()
    small.fill()
    with pytest.raises(DiskFull):
        volume.check_space(0)
    small.empty()
    (small.outside / "reserve").unlink()
    volume.check_space(5 * MIB)
    assert pieces(small) == NUM_PIECES, "it is tried again"
