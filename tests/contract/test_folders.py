"""Folders that strangers have made: what of them is read, and that nothing else is."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import folders
from contract.folders import (
    FileChanged,
    FileDenied,
    FileMissing,
    FileRefused,
    GivenFolder,
    LinkFound,
    NotRegular,
    TooLarge,
    shown,
)
from tests.support.servers.hub_cache import REPOSITORY, SNAPSHOT, linked

pytestmark = pytest.mark.timeout(60)  # a fault may be to wait for ever

NAME = "adapter_config.json"
NOBODY = 65534


def read(folder: Path, name: str = NAME) -> bytes:
    with GivenFolder(folder) as given, given.open(name) as file:
        return file.read_all(1 << 20)


def refusal(folder: Path, name: str = NAME) -> FileRefused:
    with GivenFolder(folder) as given, pytest.raises(FileRefused) as caught:
        given.open(name)
    assert str(caught.value).startswith(f"{name} ")
    return caught.value


@contextmanager
def without_rights() -> Iterator[None]:
    """Root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (os.mkfifo, NotRegular, "a pipe, not a regular file: remove it"),
        (make_socket, NotRegular, "a socket, not a regular file"),
        (Path.mkdir, NotRegular, "a folder, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), LinkFound, "a link, which is not followed"),
        (lambda path: path.symlink_to("/etc/hostname"), LinkFound, "put a copy of the file there"),
        (lambda path: path.symlink_to("beside"), LinkFound, "a link"),
        (lambda path: path.symlink_to(path.name), LinkFound, "a link"),
        (lambda path: None, FileMissing, "is missing"),
    ],
    ids=["pipe", "socket", "folder", "to a device", "to a file", "beside it", "loop", "nothing"],
)
def test_only_regular_files_inside_are_opened(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
    kind: type[FileRefused],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    (tmp_path / "beside").write_text("x")
    make(tmp_path / NAME)
    error = refusal(tmp_path)
    assert type(error) is kind
    assert words in str(error)


def test_a_device_is_not_even_opened() -> None:
    assert "is a device" in str(refusal(Path("/dev"), "zero"))


@pytest.mark.parametrize("name", ["../secret", "inner/x", "..", "", "."])
def test_a_path_is_no_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for path in (tmp_path / "secret", folder / "inner" / "x"):
        path.write_text("x")
    refusal(folder, name)


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / NAME).write_text("x")
    (tmp_path / "last").symlink_to("checkpoint-7")
    assert read(tmp_path / "last") == b"x"


@pytest.mark.parametrize("place", ["file", "pipe", "nowhere"])
def test_what_is_no_folder(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileRefused, match=place):
        GivenFolder(tmp_path / place)


def test_a_trusted_folder_has_links_and_no_pipes(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "blob")
    (tmp_path / "folder" / "to a pipe").symlink_to(tmp_path / "pipe")
    with GivenFolder(tmp_path / "folder", is_trusted=True) as trusted:
        assert trusted.open("link").read_all(1) == b"x"
        with pytest.raises(NotRegular, match="to a pipe is a pipe"):
            trusted.open("to a pipe")
        with pytest.raises(FileMissing):
            trusted.open("gone")


# Links of Hugging Face's cache


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A commit's folder in a hub's cache, and a secret outside of it."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / NAME).write_text("x")
    return linked(tmp_path / "whole", tmp_path / "cache")


def test_a_link_of_a_hubs_cache_is_followed(snapshot: Path, tmp_path: Path) -> None:
    assert (snapshot / NAME).is_symlink()
    assert read(snapshot) == b"x"
    (tmp_path / "french").symlink_to(snapshot)
    assert read(tmp_path / "french") == b"x"
    inner = snapshot / "checkpoints" / "7"
    inner.mkdir(parents=True)
    (inner / NAME).symlink_to(f"../../{os.readlink(snapshot / NAME)}")
    assert read(inner) == b"x"


@pytest.mark.parametrize(
    "target",
    [
        "../../../../secret",
        "../../blobs/../../../secret",
        f"../../../{REPOSITORY}/blobs/{0:064x}",
        f"../../blobs/./{0:064x}",
        f"../blobs/{0:064x}",
        f"../../../blobs/{0:064x}",
        f"../../blobs/{0:064x}\n",
        "../../blobs/id_rsa",
        "../../refs/main",
    ],
)
def test_other_links_in_a_hubs_cache_are_not(snapshot: Path, target: str) -> None:
    (snapshot / NAME).unlink()
    (snapshot / NAME).symlink_to(target)
    assert type(refusal(snapshot)) is LinkFound


def test_an_absolute_link_is_not(snapshot: Path) -> None:
    blob = (snapshot / NAME).resolve()
    (snapshot / NAME).unlink()
    (snapshot / NAME).symlink_to(blob)
    assert type(refusal(snapshot)) is LinkFound


def test_blobs_that_lead_elsewhere_are_not_read(snapshot: Path, tmp_path: Path) -> None:
    blob = (snapshot / NAME).resolve()
    blob.unlink()
    blob.symlink_to(tmp_path / "secret")
    assert type(refusal(snapshot)) is LinkFound
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / blob.name).write_text("secret")
    blob.unlink()
    blob.parent.rmdir()
    blob.parent.symlink_to(tmp_path / "others")
    assert type(refusal(snapshot)) is LinkFound


@pytest.mark.parametrize(
    "place", [SNAPSHOT.replace("models--", ""), f"{REPOSITORY}/snapshots/main", "snapshots/1"]
)
def test_a_folder_that_only_looks_like_a_cache(snapshot: Path, tmp_path: Path, place: str) -> None:
    other = tmp_path / "other" / place
    other.mkdir(parents=True)
    blobs = other.parent.parent / "blobs"
    (snapshot / NAME).resolve().parent.rename(blobs)
    (other / NAME).symlink_to(os.readlink(snapshot / NAME))
    assert (other / NAME).read_text() == "x"
    assert type(refusal(other)) is LinkFound


def test_a_blob_that_is_gone(snapshot: Path) -> None:
    (snapshot / NAME).resolve().unlink()
    error = refusal(snapshot)
    assert type(error) is FileMissing
    assert "download it again" in str(error)


# What changes meanwhile, and what is too much


def test_a_file_that_vanishes_after_it_was_listed(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    with GivenFolder(tmp_path) as given:
        assert NAME in given.names
        (tmp_path / NAME).unlink()
        with pytest.raises(FileMissing, match=f"{NAME} is missing"):
            given.open(NAME)


@pytest.mark.parametrize("how", ["grows for ever", "is cut", "is rewritten", "is replaced"])
def test_a_file_that_changes_while_it_is_read(tmp_path: Path, how: str) -> None:
    path = tmp_path / NAME
    path.write_bytes(b"x" * 100)
    num_bytes = 0
    with GivenFolder(tmp_path) as given, given.open(NAME) as file:
        if how == "is replaced":  # by its path alone: what is open stays
            path.rename(tmp_path / "before")
            path.write_bytes(b"y" * 100)
            assert b"".join(map(bytes, file.pieces(30))) == b"x" * 100
            return
        with pytest.raises(FileChanged, match=NAME):  # noqa: PT012
            for piece in file.pieces(30):
                num_bytes += len(piece)
                if how == "grows for ever":
                    with path.open("ab") as more:
                        more.write(b"y" * 1000)
                elif how == "is cut":
                    os.truncate(path, 50)
                else:
                    path.write_bytes(b"y" * 100)
                    os.utime(path, ns=(1, 1))
    assert num_bytes <= 100


def test_sizes_are_looked_at_before_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).touch()
    os.truncate(tmp_path / NAME, 1 << 40)
    monkeypatch.setattr(os, "preadv", None)
    with GivenFolder(tmp_path) as given, given.open(NAME) as file:
        assert file.size_bytes == 1 << 40
        with pytest.raises(TooLarge, match=f"{NAME} has 1099511627776 bytes, over .* of 10"):
            file.read_all(10)


def test_a_folder_of_very_many_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        (tmp_path / str(number)).touch()
    monkeypatch.setattr(folders, "MAX_ENTRIES", 3)
    with GivenFolder(tmp_path) as given, pytest.raises(TooLarge) as caught:
        _ = given.names
    assert str(caught.value).startswith(f"{tmp_path} has more than 3 entries: put ")


def test_what_this_user_may_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).touch(mode=0)
    (tmp_path / "closed").mkdir(mode=0)
    with GivenFolder(tmp_path) as given, without_rights():
        with pytest.raises(FileDenied, match=f"{NAME} may not be read by this user"):
            given.open(NAME)
        with pytest.raises(FileDenied, match="closed may not be read by this user"):
            GivenFolder(tmp_path / "closed")


@pytest.mark.slow
def test_links_that_come_and_go_lead_nowhere(tmp_path: Path) -> None:
    """A writer of the folder races with the reader."""
    folder, secret = tmp_path / "folder", tmp_path / "secret"
    folder.mkdir()
    path, spare, link = (folder / name for name in (NAME, "spare", "link"))
    path.write_text("x")
    secret.write_text("secret")
    over = threading.Event()

    def swap_for_ever() -> None:
        while not over.is_set():
            path.rename(spare)
            link.symlink_to(secret)
            link.rename(path)
            path.unlink()
            spare.rename(path)

    swapping = threading.Thread(target=swap_for_ever)
    swapping.start()
    num_read = num_refused = 0
    try:
        while num_read < 100 or num_refused < 100:
            try:
                assert read(folder) == b"x"
                num_read += 1
            except FileRefused:
                num_refused += 1
    finally:
        over.set()
        swapping.join()


# Errors


@given(st.text(max_size=2000) | st.binary(max_size=300).map(os.fsdecode))
def test_a_name_is_shown_as_it_is_or_escaped(name: str) -> None:
    text = shown(name)
    assert text.isprintable()
    assert len(text) <= folders.MAX_SHOWN_CHARS + 3
    assert text == name or not name.isprintable() or len(name) > folders.MAX_SHOWN_CHARS


def test_an_odd_name_is_escaped_in_errors(tmp_path: Path) -> None:
    name = os.fsdecode(b"a\x1b[2J\xff")
    os.mkfifo(tmp_path / name)
    with GivenFolder(tmp_path) as given, pytest.raises(NotRegular) as caught:
        given.open(name)
    assert str(caught.value).startswith(r"'a\x1b[2J\udcff' is a pipe")
    assert caught.value.name == name


@pytest.mark.parametrize("kind", [FileMissing, FileDenied, LinkFound, TooLarge, FileChanged])
def test_errors_are_the_systems_and_can_be_pickled(kind: type[FileRefused]) -> None:
    error = kind("a", "is bad")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.name, again.why) == (kind, "a is bad", "a", "is bad")
    assert isinstance(again, OSError)
    assert (again.errno, again.filename) == (kind.code, "a")
