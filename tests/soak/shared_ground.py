"""Two replicas over one PostgreSQL and one S3 bucket, each a real server process."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import boto3
from sqlalchemy import create_engine, text

from loadout.demo.process import Process
from tests.soak.leftovers import (
    compare_blobs,
    find_orphan_records,
    find_passing_files,
    find_stray_images,
)
from tests.soak.replicas import BURIAL_S
from tests.support.servers.postgres import PostgresServer
from tests.support.wait import until

BUCKET, PREFIX = "soak", "store"
START_S = 60.0
LEASE_SECONDS = 2
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "soak",
    "AWS_SECRET_ACCESS_KEY": "soak",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class SharedGround:
    """Credentials are put into the environment: the replicas find them as they would elsewhere."""

    num_replicas = 2

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            os.environ.update(CREDENTIALS)
            postgres = stack.enter_context(PostgresServer())
            self._dsn = postgres.create_database()
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ready = folder / "s3.ready.json"
            s3 = Process("s3", [sys.executable, "-m", "loadout.demo.s3", str(ready)], folder, ready)
            stack.callback(s3.stop, START_S)
            self._url = s3.wait_ready(START_S)["url"]
            self._s3 = boto3.client("s3", endpoint_url=self._url, region_name="us-east-1")
            stack.callback(self._s3.close)
            self._s3.create_bucket(Bucket=BUCKET)
            self._engine = create_engine(self._dsn)
            stack.callback(self._engine.dispose)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def settings(self, index: int, data_dir: Path) -> dict[str, Any]:
        return {
            "data_dir": data_dir,
            "catalog_dsn": f"{self._dsn}&application_name={_session_name(index)}",
            "shared_s3": f"s3://{BUCKET}/{PREFIX}",
            "shared_s3_endpoint_url": self._url,
            "lease_seconds": LEASE_SECONDS,
        }

    def settle(self, index: int) -> None:
        """A commit that was sent is carried out although its sender is gone: the database's own
        processes for this replica have to end first."""
        query = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name")

        def has_ended() -> bool:
            with self._engine.connect() as conn:
                return conn.scalar(query, {"name": _session_name(index)}) == 0

        until(has_ended, BURIAL_S, "the database still works for a killed replica")

    def find_orphans(self, data_dirs: Sequence[Path]) -> list[str]:
        found, digests = find_orphan_records(self._engine)
        with self._engine.connect() as conn:
            wanted = {
                f"{row.digest}/{row.place}"
                for row in conn.execute(text("SELECT digest, place FROM blobs"))
            }
        blobs, images = self._objects("blobs"), self._objects("compiled")
        found += compare_blobs({f"sha256:{key.rpartition('/')[0]}" for key in blobs}, wanted)
        found += [
            f"compiled: {key} is of no blob"
            for key in images
            if f"sha256:{Path(key).stem}" not in digests
        ]
        for data_dir in data_dirs:
            found += find_passing_files(data_dir)
            found += find_stray_images(data_dir / "images", digests)
        return found

    def _objects(self, folder: str) -> list[str]:
        """Keys under a folder of the shared prefix, without it."""
        under = f"{PREFIX}/{folder}/"
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=under)
        return [
            item["Key"].removeprefix(under) for page in pages for item in page.get("Contents", ())
        ]


def _session_name(index: int) -> str:
    return f"replica-{index}"
