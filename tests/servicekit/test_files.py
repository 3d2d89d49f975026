"""When files that change are taken over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servicekit.errors import InvalidSetting
from servicekit.settings.files import Contents, FileWatch, ReloadableFiles, Sight
from tests.support.machine.secret_volume import SecretVolume


class Words(ReloadableFiles):
    """Takes over any contents but "bad"."""

    def _use(self, contents: Contents) -> None:
        if b"bad" in contents:
            raise InvalidSetting("a bad word", subject=self.setting)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "word"
    path.write_bytes(b"old")
    return path


@pytest.fixture
def watch(path: Path) -> FileWatch:
    return FileWatch(Words("words_file", path))


def test_a_change_is_taken_over_when_it_is_found_again(watch: FileWatch, path: Path) -> None:
    assert watch.look() is Sight.SAME
    path.write_bytes(b"new")
    assert watch.look() is Sight.UNSETTLED
    assert watch.files.contents == (b"old",)
    assert watch.look() is Sight.TAKEN_OVER
    assert watch.files.contents == (b"new",)
    assert watch.look() is Sight.SAME


def test_what_is_being_written_is_not_taken_over(watch: FileWatch, path: Path) -> None:
    for part in (b"", b"n", b"ne", b""):
        path.write_bytes(part)
        assert watch.look() is Sight.UNSETTLED
    path.write_bytes(b"old")
    assert watch.look() is Sight.SAME


def test_same_size_and_date_hide_no_change(watch: FileWatch, path: Path) -> None:
    watch.look()
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"new")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    watch.look()
    assert watch.look() is Sight.TAKEN_OVER


def test_a_file_written_again_unchanged_is_the_same(watch: FileWatch, path: Path) -> None:
    path.unlink()
    path.write_bytes(b"old")
    assert watch.look() is Sight.SAME


def test_a_missing_file_is_reported_until_it_is_back(watch: FileWatch, path: Path) -> None:
    moved = path.rename(path.with_name("away"))
    assert watch.look() is Sight.UNSETTLED  # an editor may be about to write it anew
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="word"):
            watch.look()
    assert watch.files.contents == (b"old",)
    moved.rename(path)
    assert watch.look() is Sight.SAME


def test_bad_contents_are_reported_until_others_come(watch: FileWatch, path: Path) -> None:
    path.write_bytes(b"bad")
    watch.look()
    for _ in range(2):
        with pytest.raises(InvalidSetting, match="a bad word"):
            watch.look()
    assert watch.files.contents == (b"old",)
    path.write_bytes(b"new")
    watch.look()
    assert watch.look() is Sight.TAKEN_OVER


def test_a_secret_volume_is_taken_over_as_a_whole(tmp_path: Path) -> None:
    volume = SecretVolume(tmp_path / "volume", {"a": b"1", "b": b"2"})
    watch = FileWatch(Words("words_file", volume.path / "a", volume.path / "b"))
    volume.replace({"a": b"3", "b": b"4"})
    assert [watch.look() for _ in range(3)] == [Sight.UNSETTLED, Sight.TAKEN_OVER, Sight.SAME]
    assert watch.files.contents == (b"3", b"4")


def test_a_pipe_is_read_once() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"new")
    os.close(writer)
    files = Words("words_file", Path(f"/dev/fd/{reader}"))
    os.close(reader)
    assert files.contents == (b"new",)
    assert not files.can_be_watched


def test_no_files_are_not_watched(path: Path) -> None:
    assert not Words("words_file").can_be_watched
    assert Words("words_file", path).can_be_watched
