"""Data directories that the version before this one made are read as they are.

`upgrade/` holds two of them, each with a JSON file of what that version answered about it:

    single    one adapter of a local folder, and its compiled image
    history   several versions, a pin, a rolled-back and a deleted name, two layouts, content that
              two names share, and an adapter that no layout can serve

Empty folders and the lock file are left out; the catalogs are vacuumed to small pages.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from adapter_store.build import Store, open_store
from adapter_store.config import StoreSettings
from adapter_store.core import ANYONE, AdapterRecord, ImageKey
from contract.images.header import ImageChunk, ImageHeader, ImageTrailer
from servicekit.refs import AdapterName

FOLDER = Path(__file__).with_name("upgrade")
DIRECTORIES = ("single", "history")
TEN_YEARS_SECONDS = 10 * 365 * 86400.0


@pytest.fixture(params=DIRECTORIES)
def directory(request) -> str:
    return request.param


@pytest.fixture
def expected(directory) -> dict[str, Any]:
    return json.loads((FOLDER / f"{directory}.json").read_text())


@pytest.fixture
def settings(directory, tmp_path) -> StoreSettings:
    """A copy of the directory; what is deleted in it, or unused, is so for years."""
    shutil.copytree(FOLDER / directory, tmp_path / "data")
    return StoreSettings(
        data_dir=tmp_path / "data",
        delete_grace_seconds=TEN_YEARS_SECONDS,
        layout_ttl_seconds=0,
    )


def as_json(record: AdapterRecord) -> dict[str, Any]:
    return {
        "name": str(record.name),
        "version": record.version,
        "digest": record.digest,
        "source_uri": record.source_uri,
        "base_model": record.base_model,
        "rank": record.rank,
        "targets": list(record.targets),
        "source_bytes": record.source_bytes,
        "create_time": record.create_time.isoformat(),
        "pinned": record.pinned,
        "labels": record.labels,
        "description": record.description,
        "config_base_model": record.config_base_model,
        "files": [[file.name, file.size_bytes, file.sha256] for file in record.files],
        "is_deleted": record.delete_time is not None,
        "verdicts": [
            [v.layout_id, v.state.value, v.reason, v.image_bytes] for v in record.verdicts
        ],
    }


async def pull(store: Store, digest: str, layout_id: str) -> dict[str, Any]:
    data, image_id, trailer = b"", "", ""
    async for message in store.use_cases.pulls.stream(ImageKey(digest, layout_id), 0, "", None):
        match message:
            case ImageHeader():
                image_id = message.image_id
            case ImageChunk():
                data += bytes(message.data)
            case ImageTrailer():
                trailer = message.sha256.hex()
    return {
        "digest": digest,
        "layout_id": layout_id,
        "image_id": image_id,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "trailer": trailer,
    }


def test_names_versions_and_history(settings, expected):
    async def main() -> None:
        async with open_store(settings) as store:
            records, _, revision = await store.use_cases.reading.page(ANYONE, 0, "", "")
            assert [as_json(record) for record in records] == expected["current"]
            assert revision == expected["revision"]
            for name, versions in expected["versions"].items():
                page = await store.use_cases.reading.versions(
                    ANYONE, AdapterName(*name.split("/")), 0, ""
                )
                assert page.current_version == versions["current"]
                assert [as_json(record) for record in page.records] == versions["records"]
            events = store.catalog.history.since(0, 1000)
            assert [[e.revision, e.kind.value, e.name, e.version, e.digest] for e in events] == (
                expected["events"]
            )

    asyncio.run(main())


def test_images_are_pulled_from_disk(settings, expected):
    async def main() -> None:
        async with open_store(settings) as store:
            for image in expected["images"]:
                assert await pull(store, image["digest"], image["layout_id"]) == image
            assert store.images.disk_counts.misses == 0

    asyncio.run(main())


def test_images_are_compiled_from_blobs_to_the_same_bytes(settings, expected):
    shutil.rmtree(settings.data_dir / "images")

    async def main() -> None:
        async with open_store(settings) as store:
            for image in expected["images"]:
                assert await pull(store, image["digest"], image["layout_id"]) == image
            assert store.images.disk_counts.hits == 0

    asyncio.run(main())


def test_changes_continue_the_history(settings, expected):
    """A change is the next revision; opened again, all is as it was left."""
    record = expected["current"][0]
    name = AdapterName(*record["name"].split("/"))

    async def main() -> None:
        async with open_store(settings) as store:
            _, revision = await store.use_cases.editing.delete(ANYONE, name, 0)
            assert revision == expected["revision"] + 1
        async with open_store(settings) as store:
            page = await store.use_cases.reading.versions(ANYONE, name, 0, "")
            assert (page.current_version, page.revision) == (0, revision)
            assert len(page.records) == len(expected["versions"][record["name"]]["records"])

    asyncio.run(main())
