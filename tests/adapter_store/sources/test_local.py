from __future__ import annotations

import os
import shutil
import socket
import stat
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from adapter_store.errors import InvalidAdapter, LimitExceeded, SourceUnavailable
from adapter_store.sources import Sources
from adapter_store.sources.local import LocalSource
from contract import folders
from servicekit.errors import Draining, FailedPrecondition, InvalidArgument, NotFound, ServiceError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NOBODY = 65534


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def source(root) -> LocalSource:
    return LocalSource([root])


def names(staging) -> list[str]:
    return sorted(path.name for path in staging.folder.iterdir())


def test_only_the_adapters_files_are_copied(source, root, staging, write_adapter):
    write_adapter(root / "a")
    assert source.fetch(f"file://{root}/a", staging) == ""
    assert names(staging) == [CONFIG, WEIGHTS]
    assert (staging.folder / WEIGHTS).read_bytes() == b"w" * 1000
    assert staging.total_bytes == 1002


@pytest.mark.parametrize("form", ["file://{}/a", "file://localhost{}/a/", "file://{}/x/../a"])
def test_forms_of_one_place(source, root, staging, write_adapter, form):
    write_adapter(root / "a")
    (root / "x").mkdir()
    source.fetch(form.format(root), staging)
    assert names(staging) == [CONFIG, WEIGHTS]


def test_a_percent_encoded_name(source, root, staging, write_adapter):
    write_adapter(root / "a b#c")
    source.fetch(f"file://{root}/a%20b%23c", staging)
    assert names(staging) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize(
    "uri",
    [
        "file://otherhost/a",
        "file://user:secret@/a",
        "file:relative",
        "file://[tokens/a",
        "file://{root}/a?x=1",
        "file://{root}/a#b",
        "file://{root}/a%00b",
    ],
)
def test_malformed_uris(source, root, staging, uri):
    with pytest.raises(InvalidArgument, match="source_uri") as caught:
        source.fetch(uri.format(root=root), staging)
    assert caught.value.subject == "source_uri"


@pytest.mark.parametrize("place", ["/..", "/../outside", "/a/../../outside"])
def test_nothing_outside_the_roots_is_read(source, root, staging, write_adapter, place):
    write_adapter(root.parent / "outside")
    write_adapter(root.parent)
    (root / "a").mkdir()
    with pytest.raises(InvalidArgument, match="--source-roots") as caught:
        source.fetch(f"file://{root}{place}", staging)
    assert caught.value.reason == "SOURCE_NOT_ALLOWED"
    assert names(staging) == []


def test_existence_outside_is_not_revealed(source, root, staging, write_adapter):
    write_adapter(root.parent / "there")
    messages = []
    for name in ("there", "gone0"):
        with pytest.raises(InvalidArgument) as caught:
            source.fetch(f"file://{root.parent}/{name}", staging)
        messages.append(str(caught.value).replace(name, ""))
    assert messages[0] == messages[1]


def test_without_roots_there_are_no_local_sources(root, staging, write_adapter):
    write_adapter(root / "a")
    with pytest.raises(InvalidArgument, match="--source-roots"):
        LocalSource([]).fetch(f"file://{root}/a", staging)


def test_a_folder_link_that_leads_out_is_refused(source, root, staging, write_adapter):
    write_adapter(root.parent / "outside")
    (root / "a").symlink_to(root.parent / "outside")
    with pytest.raises(InvalidArgument, match="--source-roots"):
        source.fetch(f"file://{root}/a", staging)


def test_a_file_link_that_leads_out_is_refused(source, root, staging, write_adapter):
    write_adapter(root / "a")
    (root.parent / "secret").write_bytes(b"secret")
    (root / "a" / WEIGHTS).unlink()
    (root / "a" / WEIGHTS).symlink_to(root.parent / "secret")
    with pytest.raises(InvalidArgument, match=f"{WEIGHTS} is outside the folders"):
        source.fetch(f"file://{root}/a", staging)
    assert names(staging) == []


def test_links_within_a_root_are_allowed(source, root, staging, write_adapter):
    write_adapter(root / "blobs")
    (root / "snapshot").mkdir()
    for name in (CONFIG, WEIGHTS):
        (root / "snapshot" / name).symlink_to(f"../blobs/{name}")
    source.fetch(f"file://{root}/snapshot", staging)
    assert names(staging) == [CONFIG, WEIGHTS]


def test_link_created_after_the_check_is_refused(source, root, staging, write_adapter, monkeypatch):
    """The race between resolving a path and opening it."""
    write_adapter(root / "a")
    write_adapter(root.parent / "outside", b"secret")
    resolve = LocalSource._resolve
    seen = []

    def resolve_then_swap(self, path, uri):
        resolved = resolve(self, path, uri)
        seen.append(path.name)
        if seen.count(WEIGHTS) == 2:  # once for its size, once to open it
            os.rename(root / "a", root / "moved")
            (root / "a").symlink_to(root.parent / "outside")
        return resolved

    monkeypatch.setattr(LocalSource, "_resolve", resolve_then_swap)
    with pytest.raises(InvalidArgument, match="not a folder"):
        source.fetch(f"file://{root}/a", staging)
    assert names(staging) == [CONFIG]


def swap_for_ever(over: threading.Event, path: Path, target: Path) -> None:
    """Replaces what is at `path` by a link to `target`, and back, as fast as it can."""
    spare, link = path.with_name("spare"), path.with_name("link")
    while not over.is_set():
        path.rename(spare)
        link.symlink_to(target)
        link.rename(path)
        path.unlink()
        spare.rename(path)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["a", f"a/{WEIGHTS}"])
@pytest.mark.parametrize("times", [15, pytest.param(50, marks=pytest.mark.long)])
def test_links_that_come_and_go_lead_nowhere(
    source, root, tmp_path, write_adapter, make_staging, place, times
):
    """A writer of the root races with the fetch, without knowing where that is."""
    write_adapter(root / "a")
    outside = write_adapter(tmp_path / "outside", b"secret" * 100)
    over = threading.Event()
    target = outside if place == "a" else outside / WEIGHTS
    swapping = threading.Thread(target=swap_for_ever, args=(over, root / place, target))
    swapping.start()
    num_fetched = num_refused = 0
    try:
        for _ in range(2000):
            staging = make_staging()
            try:
                source.fetch(f"file://{root}/a", staging)
                num_fetched += 1
            except (ServiceError, OSError):
                num_refused += 1
            for file in staging.folder.iterdir():
                assert not file.is_symlink()
                assert b"secret" not in file.read_bytes()
            shutil.rmtree(staging.folder)
            if num_fetched > times and num_refused > times:
                break
    finally:
        over.set()
        swapping.join()
    assert num_refused > 0


def test_a_loop_of_links(source, root, staging):
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with pytest.raises(InvalidArgument, match="a is outside the folders"):
        source.fetch(f"file://{root}/a", staging)


def test_what_is_no_regular_file_is_refused(source, root, staging, write_adapter):
    write_adapter(root / "a")
    (root / "a" / WEIGHTS).unlink()
    os.mkfifo(root / "a" / WEIGHTS)
    with pytest.raises(InvalidArgument, match="not a regular file") as caught:
        source.fetch(f"file://{root}/a", staging)
    assert caught.value.subject == WEIGHTS


def test_a_socket_is_no_regular_file(source, root, staging, write_adapter, monkeypatch):
    write_adapter(root / "a")
    (root / "a" / WEIGHTS).unlink()
    monkeypatch.chdir(root / "a")  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(WEIGHTS)
    with pytest.raises(InvalidArgument, match="not a regular file") as caught:
        source.fetch(f"file://{root}/a", staging)
    assert caught.value.subject == WEIGHTS


def test_a_name_that_no_file_can_have(source, root, staging):
    with pytest.raises(NotFound, match="its name is too long") as caught:
        source.fetch(f"file://{root}/{'a' * 256}", staging)
    assert caught.value.reason == "SOURCE_NOT_FOUND"


def test_a_link_in_the_place_of_what_was_resolved(
    source, root, staging, write_adapter, monkeypatch
):
    write_adapter(root / "a")
    (root / "a" / WEIGHTS).rename(root / "moved")
    monkeypatch.setattr(LocalSource, "_resolve", lambda self, path, uri: path)
    (root / "a" / WEIGHTS).symlink_to(root / "moved")
    with pytest.raises(SourceUnavailable, match=f"{WEIGHTS} changed") as caught:
        source.fetch(f"file://{root}/a", staging)
    assert caught.value.reason == "SOURCE_CHANGED"


def test_what_is_missing_is_named(source, root, staging, write_adapter):
    with pytest.raises(NotFound, match="nowhere does not exist") as caught:
        source.fetch(f"file://{root}/nowhere", staging)
    assert caught.value.reason == "SOURCE_NOT_FOUND"
    write_adapter(root / "a")
    with pytest.raises(InvalidArgument, match="not a folder"):
        source.fetch(f"file://{root}/a/{CONFIG}", staging)
    (root / "a" / CONFIG).unlink()
    with pytest.raises(InvalidAdapter, match=f"/a: {CONFIG} is missing"):
        source.fetch(f"file://{root}/a", staging)


def test_a_run_folder_suggests_its_latest_checkpoint(source, root, staging, write_adapter):
    for name in ("checkpoint-90", "checkpoint-1000", "checkpoint-500", "of-another-tenant"):
        write_adapter(root / "run" / name)
    with pytest.raises(InvalidAdapter) as caught:
        source.fetch(f"file://{root}/run/", staging)
    assert str(caught.value) == (
        f"file://{root}/run/: {CONFIG} is missing; below it are checkpoint-1000, "
        f"checkpoint-500, checkpoint-90: register one of them, such as "
        f"file://{root}/run/checkpoint-1000"
    )
    for number in range(2000, 2100):
        (root / "run" / f"checkpoint-{number}").mkdir()
    (root / "run" / "checkpoint-3000").touch()
    (root / "run" / "checkpoint-4000").symlink_to(root / "run" / "checkpoint-90")
    with pytest.raises(InvalidAdapter, match=r"checkpoint-2099, .*-2092 and 95 others: ") as caught:
        source.fetch(f"file://{root}/run", staging)
    assert len(str(caught.value)) < 500
    assert "000, " not in str(caught.value), "a file and a link"


def test_a_folder_of_very_many_entries_is_not_read_to_its_end(
    source, root, staging, write_adapter, monkeypatch
):
    write_adapter(root / "a")
    monkeypatch.setattr(folders, "MAX_ENTRIES", 3)  # it has four
    with pytest.raises(LimitExceeded, match="/a has more than 3 entries"):
        source.fetch(f"file://{root}/a", staging)
    assert names(staging) == []


def test_a_pickle_is_refused_by_name(source, root, staging, write_adapter):
    write_adapter(root / "a")
    (root / "a" / WEIGHTS).rename(root / "a" / "adapter_model.bin")
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.bin is a pickle") as caught:
        source.fetch(f"file://{root}/a", staging)
    assert (caught.value.subject, caught.value.reason) == (
        "adapter_model.bin",
        "FILE_NOT_SAFETENSORS",
    )


@pytest.mark.parametrize(("place", "named"), [("", "/a"), (WEIGHTS, WEIGHTS)])
def test_a_place_without_permission(root, make_staging, write_adapter, place, named):
    write_adapter(root / "a")
    staging = make_staging()
    (root / "a" / place).chmod(0)
    with ExitStack() as stack:
        if os.geteuid() == 0:  # who may read everything
            for folder in root.parents:  # pytest's are closed
                mode = stat.S_IMODE(folder.stat().st_mode)
                if mode | 0o011 != mode:
                    folder.chmod(mode | 0o011)
                    stack.callback(folder.chmod, mode)
            os.chown(staging.folder, NOBODY, NOBODY)
            stack.callback(os.seteuid, 0)
            os.seteuid(NOBODY)
        with pytest.raises(FailedPrecondition, match=f"may not read .*{named}") as caught:
            LocalSource([root]).fetch(f"file://{root}/a", staging)
    assert caught.value.reason == "SOURCE_ACCESS_DENIED"
    (root / "a" / place).chmod(0o755)


def test_limits_hold_before_the_first_byte(source, root, make_staging, write_adapter):
    write_adapter(root / "a")
    staging = make_staging(max_file_bytes=999)
    with pytest.raises(LimitExceeded, match=WEIGHTS) as caught:
        source.fetch(f"file://{root}/a", staging)
    assert caught.value.subject == WEIGHTS
    assert names(staging) == []
    staging = make_staging(max_adapter_bytes=1001)
    with pytest.raises(LimitExceeded, match="1002 bytes"):
        source.fetch(f"file://{root}/a", staging)
    source.fetch(f"file://{root}/a", make_staging(max_adapter_bytes=1002))


def changing_while_read(monkeypatch, change) -> None:
    """Calls `change` after the first read of the weights."""
    preadv = os.preadv
    done = []

    def read_then_change(fd: int, buffers: list[memoryview], offset: int) -> int:
        num_bytes = preadv(fd, buffers, offset)
        if bytes(buffers[0][:1]) == b"w" and not done:
            done.append(True)
            change()
        return num_bytes

    monkeypatch.setattr(os, "preadv", read_then_change)


@pytest.mark.parametrize("how", ["rewritten", "cut", "grown", "replaced", "config"])
def test_a_change_while_reading_is_noticed(source, root, staging, write_adapter, monkeypatch, how):
    weights = write_adapter(root / "a") / WEIGHTS

    def change() -> None:
        if how == "rewritten":
            with open(weights, "r+b") as file:
                file.write(b"x")
            os.utime(weights, ns=(1, 1))
        elif how == "cut":
            os.truncate(weights, 10)
        elif how == "grown":
            with open(weights, "ab") as file:
                file.write(b"more")
        else:
            name = WEIGHTS if how == "replaced" else CONFIG
            (root / "new").write_bytes((root / "a" / name).read_bytes())
            os.replace(root / "new", root / "a" / name)

    changing_while_read(monkeypatch, change)
    with pytest.raises(SourceUnavailable, match="changed while it was read") as caught:
        source.fetch(f"file://{root}/a", staging)
    assert caught.value.reason == "SOURCE_CHANGED"
    assert caught.value.subject == (CONFIG if how == "config" else WEIGHTS)


def test_a_stopping_store_stops_copying(source, root, staging, write_adapter):
    write_adapter(root / "a")
    staging.cancellation.stop.draining.set()
    with pytest.raises(Draining):
        source.fetch(f"file://{root}/a", staging)


@pytest.mark.parametrize("uri", ["", "/a", "ftp://x", "file:/a", "FILE:///a", "hub://x"])
def test_unknown_schemes_are_refused(source, staging, uri):
    with pytest.raises(InvalidArgument, match="file://") as caught:
        Sources({"file": source}).fetch(uri, staging)
    assert caught.value.subject == "source_uri"


@pytest.mark.parametrize("tail", ["a" * 3000, "a\nb", "a\x1b[2J"])
def test_uris_that_would_spoil_a_log_are_refused(source, staging, tail):
    with pytest.raises(InvalidArgument, match="source_uri") as caught:
        Sources({"file": source}).fetch(f"file:///{tail}", staging)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_what_would_be_dropped_is_refused_by_name(source, root, staging, write_adapter):
    folder = write_adapter(root / "a")
    (folder / "new_embeddings.safetensors").write_bytes(b"x")
    with pytest.raises(InvalidAdapter, match=r"new_embeddings\.safetensors: rows of ") as caught:
        source.fetch(f"file://{folder}", staging)
    assert caught.value.reason == "FILE_UNUSED"
    assert names(staging) == []


def test_mlx_weights_are_read(source, root, staging, write_adapter):
    folder = write_adapter(root / "a")
    (folder / WEIGHTS).rename(folder / "adapters.safetensors")
    (folder / "0000100_adapters.safetensors").write_bytes(b"x")
    source.fetch(f"file://{folder}", staging)
    assert names(staging) == [CONFIG, "adapters.safetensors"]
