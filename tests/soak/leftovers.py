"""What lies in the folders against what the catalog has: nothing more, nothing less."""

from __future__ import annotations

import time
from pathlib import Path

from sqlalchemy import Engine, text

from adapter_store.store import Store

CLEAN_S = 60.0


def find_orphans(data_dir: Path, catalog: Engine) -> list[str]:
    """Everything that nobody needs any more, and everything that is missing, by its path."""
    with catalog.connect() as conn:
        digests = set(conn.scalars(text("SELECT digest FROM blobs")))
        used = set(conn.scalars(text("SELECT digest FROM versions WHERE delete_time IS NULL")))
        images = set(map(tuple, conn.execute(text("SELECT digest, layout_id FROM images"))))
    found = [f"catalog: blob {digest} of no version" for digest in digests - used]
    found += [f"catalog: version of no blob {digest}" for digest in used - digests]
    found += [f"catalog: image of no blob {key}" for key in images if key[0] not in digests]
    blobs = {f"sha256:{folder.name}" for folder in (data_dir / "blobs").iterdir()}
    found += [f"blobs: {digest} is of no record" for digest in blobs - digests]
    found += [f"blobs: {digest} is missing" for digest in digests - blobs]
    for name in ("staging", "trash", "damaged"):
        found += [str(path) for path in (data_dir / name).glob("**/*")]
    return found + _find_stray_images(data_dir / "images", digests)


def _find_stray_images(folder: Path, digests: set[str]) -> list[str]:
    files = [path for path in folder.glob("**/*") if not path.is_dir()]
    images = {path for path in files if path.suffix == ".safetensors" and path.name[0] != "."}
    beside = {path.with_name(f"{path.name}.sha256") for path in images}
    found = [f"images: {path} belongs to nothing" for path in set(files) - images - beside]
    found += [f"images: {path} is missing" for path in beside - set(files)]
    found += [f"images: {p} is of no blob" for p in images if f"sha256:{p.stem}" not in digests]
    return found


def wait_until_clean(data_dir: Path, catalog: Engine) -> None:
    """Gives the running collector the time for its turns."""
    deadline = time.monotonic() + CLEAN_S
    while orphans := find_orphans(data_dir, catalog):
        assert time.monotonic() < deadline, "orphans survive:\n" + "\n".join(sorted(orphans))
        time.sleep(0.05)


def check_accounts(store: Store, data_dir: Path) -> None:
    """The accounts of both tiers equal what is there. Call it while nothing is held."""
    store.images.check_integrity()
    files = [path for path in (data_dir / "images").glob("*/*") if path.is_file()]
    counts = store.images.disk_counts
    assert counts.used_bytes == sum(path.stat().st_size for path in files)
    assert counts.images == len([path for path in files if path.suffix == ".safetensors"])
