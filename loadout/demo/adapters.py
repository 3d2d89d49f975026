"""Which adapter of the demo comes from where, and its registration."""

from __future__ import annotations

import enum
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadout.client import Client
from loadout.demo.jobs import ADAPTER_JOBS, BASE_MODEL, Job
from loadout.demo.system import S3_ACCESS_KEY, S3_BUCKET, S3_REGION, S3_SECRET_KEY

ASSETS = Path(__file__).parent / "assets"
MODEL = ASSETS / "model"
ADAPTERS = ASSETS / "adapters"

FROM_FOLDER = 3
FROM_S3 = 3


class Source(enum.Enum):
    FOLDER = "folder"
    S3 = "s3"
    UPLOAD = "upload"


def source_of(job: Job) -> Source:
    """The first three adapters come from a folder, the next three from S3, the others by upload."""
    position = ADAPTER_JOBS.index(job)
    if position < FROM_FOLDER:
        return Source.FOLDER
    return Source.S3 if position < FROM_FOLDER + FROM_S3 else Source.UPLOAD


def register_all(
    client: Client, folder: Path, s3_url: str, done: Callable[[Job], None]
) -> dict[str, int]:
    """Registers all adapters and calls `done` for each; returns the revision of each job's name.

    `folder` is a source root of the store; adapters that are to come from a folder are copied
    there.
    """
    buckets = _open_s3(s3_url)
    revisions = {}
    for job in ADAPTER_JOBS:
        source = _place(job, folder, buckets)
        registration = client.register(job.name, source, base_model=BASE_MODEL)
        revisions[job.name] = registration.revision
        done(job)
    return revisions


def _place(job: Job, folder: Path, buckets: Any) -> str | Path:
    """Puts the adapter where it is registered from; returns that source."""
    files = ADAPTERS / job.name
    match source_of(job):
        case Source.FOLDER:
            shutil.copytree(files, folder / job.name, dirs_exist_ok=True)
            return (folder / job.name).resolve().as_uri()
        case Source.S3:
            for path in files.iterdir():
                buckets.upload_file(str(path), S3_BUCKET, f"{job.name}/{path.name}")
            return f"s3://{S3_BUCKET}/{job.name}"
        case Source.UPLOAD:
            return files


def _open_s3(url: str) -> Any:
    """Returns a client of the S3 server at `url`, after creating the bucket."""
    import boto3  # only the demo needs it, and it takes a while to import
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=S3_ACCESS_KEY,
        aws_secret_access_key=S3_SECRET_KEY,
        region_name=S3_REGION,
        config=Config(proxies={}, s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket=S3_BUCKET)
    return client
