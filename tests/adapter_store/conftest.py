"""Databases and an S3 server for the store, a tiny layout, and adapters for it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.loaders
import botocore.session
import pytest

from adapter_store.catalog import follower
from adapter_store.catalog.catalog import Catalog
from loadout.demo.process import Process
from tests.support.servers.postgres import PostgresServer
from tests.support.store.adapters import MakeAdapter, MakeLayout, save_adapter, tiny_layout
from tests.support.store.catalogs import CATALOG, empty_catalog, make_data_folder


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real server, for all tests of a session that ask for it. Catalogs over it close quickly."""
    with PostgresServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower, "STOP_SECONDS", 0.02)
        yield server


@pytest.fixture(scope="session")
def migrated_dsn(postgres: PostgresServer) -> str:
    """The database of an empty catalog, to be copied: migrations take longer than most tests."""
    dsn = postgres.create_database()
    Catalog(dsn, event_retention=1).close()
    return dsn


@pytest.fixture
def catalog_dsn(postgres: PostgresServer, migrated_dsn: str) -> Iterator[str]:
    """An empty catalog's database for one test."""
    dsn = postgres.create_database(copy_of=migrated_dsn)
    yield dsn
    postgres.drop_database(dsn)


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an empty catalog, to be copied."""
    path = tmp_path_factory.mktemp("catalog") / CATALOG
    path.write_bytes(empty_catalog())
    return path


@pytest.fixture
def catalog_file(migrated_file: Path, tmp_path: Path) -> Path:
    """An empty catalog's file for one test."""
    return Path(shutil.copyfile(migrated_file, tmp_path / CATALOG))


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The folder of one test's store, which has an empty catalog."""
    return make_data_folder(tmp_path / "data")


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory) -> Iterator[str]:
    """An S3 server in a process of its own."""
    folder = tmp_path_factory.mktemp("s3")
    command = [sys.executable, "-m", "loadout.demo.s3", str(folder / "ready.json")]
    process = Process("s3", command, folder, folder / "ready.json")
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Each client would read the descriptions of S3 anew, a megabyte of JSON.
            loader = botocore.loaders.create_loader()
            patch.setattr(botocore.session, "create_loader", lambda *_: loader)
            yield process.wait_ready(120)["url"]
    finally:
        process.stop(30)


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeAdapter:
    """make_adapter(folder="adapter", modules=("q_proj",), rank=4, dtype=float32, seed=0,
    tensors=None, **config): see save_adapter."""

    def make(
        modules: tuple[str, ...] = ("q_proj", "v_proj"), folder: str = "adapter", **fields: Any
    ) -> Path:
        return save_adapter(tmp_path / folder, modules, **fields)

    return make


@pytest.fixture
def make_layout() -> MakeLayout:
    """See tiny_layout."""
    return tiny_layout
