"""What lies around against what the catalog has: nothing more, nothing less."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from sqlalchemy import Engine, text

from adapter_store.build import Store
from tests.support.wait import until

CLEAN_S = 60.0


def find_orphan_records(catalog: Engine) -> tuple[list[str], set[str]]:
    """Returns what is wrong within the catalog, and the digests of all its blobs."""
    with catalog.connect() as conn:
        digests = set(conn.scalars(text("SELECT digest FROM blobs")))
        used = set(conn.scalars(text("SELECT digest FROM versions WHERE delete_time IS NULL")))
        images = set(conn.scalars(text("SELECT digest FROM images")))
    found = [f"catalog: blob {digest} of no version" for digest in digests - used]
    found += [f"catalog: version of no blob {digest}" for digest in used - digests]
    found += [f"catalog: image of no blob {digest}" for digest in images - digests]
    return found, digests


def find_local_orphans(data_dir: Path, digests: set[str]) -> list[str]:
    """Returns what is wrong with the files of a store that keeps blobs in its own folder."""
    blobs = {f"sha256:{folder.name}" for folder in (data_dir / "blobs").iterdir()}
    return [
        *compare_blobs(blobs, digests),
        *find_passing_files(data_dir),
        *find_stray_images(data_dir / "images", digests),
    ]


def compare_blobs(kept: Iterable[str], digests: set[str]) -> list[str]:
    kept = set(kept)
    found = [f"blobs: {digest} is of no record" for digest in kept - digests]
    return found + [f"blobs: {digest} is missing" for digest in digests - kept]


def find_passing_files(data_dir: Path) -> list[str]:
    """Returns files on their way in or out, at a time when nothing should be."""
    folders = (data_dir / name for name in ("staging", "trash", "damaged"))
    return [str(path) for folder in folders for path in folder.glob("**/*")]


def find_stray_images(folder: Path, digests: set[str]) -> list[str]:
    files = [path for path in folder.glob("**/*") if not path.is_dir()]
    images = {path for path in files if path.suffix == ".safetensors" and path.name[0] != "."}
    beside = {path.with_name(f"{path.name}.sha256") for path in images}
    found = [f"images: {path} belongs to nothing" for path in set(files) - images - beside]
    found += [f"images: {path} is missing" for path in beside - set(files)]
    found += [f"images: {p} is of no blob" for p in images if f"sha256:{p.stem}" not in digests]
    return found


def wait_until_clean(find_orphans: Callable[[], list[str]]) -> None:
    """Gives the running collectors the time for their turns."""
    found: list[str] = []

    def is_clean() -> bool:
        found[:] = find_orphans()
        return not found

    until(is_clean, CLEAN_S, lambda: "orphans survive:\n" + "\n".join(sorted(found)))


def check_accounts(store: Store, data_dir: Path) -> None:
    """The accounts of both tiers equal what is there. Call it while nothing is held."""
    store.images.check_integrity()
    files = [path for path in (data_dir / "images").glob("*/*") if path.is_file()]
    counts = store.images.disk_counts
    assert counts.used_bytes == sum(path.stat().st_size for path in files)
    assert counts.images == len([path for path in files if path.suffix == ".safetensors"])
