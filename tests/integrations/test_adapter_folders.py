"""Room for new folders, with a client that writes them without a store."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadout.errors import ResourceExhausted
from loadout.integrations import adapter_folders
from loadout.integrations.adapter_folders import AdapterFolders

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")
NUM_BYTES = 10


class Client:
    """Its adapters have `num_bytes` bytes each."""

    num_bytes = NUM_BYTES

    async def export(
        self, _: str, folder: Path, *, admit: Callable[[int], object], timeout_s: float
    ) -> None:
        await asyncio.to_thread(admit, self.num_bytes)
        folder.mkdir()
        (folder / "weights").touch()


def folders_of(root: Path, max_bytes: int, client: Any = None) -> AdapterFolders:
    return AdapterFolders(client or Client(), root, max_bytes)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_folders, "GRACE_SECONDS", 0.0)


async def use(folders: AdapterFolders, digest: str) -> Path:
    path = await folders.take(digest)
    folders.release(digest)
    return path


@pytest.mark.usefixtures("short_grace")
def test_a_folder_that_somebody_else_has_removed_makes_room(tmp_path: Path) -> None:
    async def main() -> None:
        folders = folders_of(tmp_path, NUM_BYTES)
        shutil.rmtree(await use(folders, A))
        assert (await folders.take(B)).is_dir()
        assert folders.used_bytes == NUM_BYTES
        await folders.close()

    asyncio.run(main())


@pytest.mark.usefixtures("short_grace")
def test_files_that_a_removal_leaves_do_not_block_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)

    async def main() -> None:
        folders = folders_of(tmp_path, NUM_BYTES)
        for digest in (A, B, A, B):
            assert (await use(folders, digest)).is_dir()
        await folders.close()

    asyncio.run(main())


@pytest.mark.usefixtures("short_grace")
def test_a_folder_that_cannot_be_removed_stays_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.startswith("a"):
            raise PermissionError(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)

    async def main() -> None:
        folders = folders_of(tmp_path, 2 * NUM_BYTES)
        stays = await use(folders, A)
        goes = await use(folders, B)
        assert (await folders.take(C)).is_dir()
        assert (stays.is_dir(), goes.is_dir()) == (True, False)
        with pytest.raises(ResourceExhausted):
            await folders.take(B)
        assert folders.used_bytes == 2 * NUM_BYTES
        await folders.close()

    asyncio.run(main())


@pytest.mark.usefixtures("short_grace")
def test_a_folder_that_is_used_while_another_is_removed_has_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_removing, may_remove = threading.Event(), threading.Event()
    rmtree = shutil.rmtree

    def slow(path: Path, **options: Any) -> None:
        is_removing.set()
        may_remove.wait()
        rmtree(path, **options)

    async def main() -> None:
        client = Client()
        folders = folders_of(tmp_path, 2 * NUM_BYTES, client)
        paths = [await use(folders, digest) for digest in (A, B)]
        monkeypatch.setattr(shutil, "rmtree", slow)
        client.num_bytes = 2 * NUM_BYTES  # needs the room of both
        third = asyncio.create_task(folders.take(C))
        await asyncio.to_thread(is_removing.wait)
        await use(folders, B)
        may_remove.set()
        with pytest.raises(ResourceExhausted):
            await third
        assert [path.is_dir() for path in paths] == [False, True]
        await folders.close()

    asyncio.run(main())


def test_bytes_that_a_cancelled_export_asks_for_last_are_not_kept(tmp_path: Path) -> None:
    may_ask, has_asked = threading.Event(), threading.Event()
    is_running = threading.Event()

    class Late(Client):
        async def export(
            self, _: str, folder: Path, *, admit: Callable[[int], object], timeout_s: float
        ) -> None:
            def ask() -> None:
                is_running.set()
                may_ask.wait()
                admit(NUM_BYTES)
                has_asked.set()

            await asyncio.to_thread(ask)

    async def main() -> None:
        folders = folders_of(tmp_path, NUM_BYTES, Late())
        taking = asyncio.create_task(folders.take(A))
        await asyncio.to_thread(is_running.wait)
        # The loop cancels the export first. The bytes are asked for meanwhile, so that their turn
        # comes when the export has ended, and before the loop says so.
        closing = asyncio.create_task(folders.close())
        may_ask.set()
        time.sleep(0.2)
        await asyncio.gather(taking, closing, return_exceptions=True)
        await asyncio.to_thread(has_asked.wait)
        assert folders.used_bytes == 0

    asyncio.run(main())
