"""Settings of the adapter store: flags, environment LOADOUT_STORE_*, or a TOML file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import ByteSize, Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from servicekit.settings.service import (
    BASICS,
    MEMORY,
    NETWORK,
    PROCESS,
    SECURITY,
    TELEMETRY,
    ServiceSettings,
)
from servicekit.settings.types import (
    Address,
    Bytes,
    Folder,
    Folders,
    Group,
    Metavar,
    Names,
    PositiveSeconds,
    Seconds,
    Size,
)

_ENDPOINT = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_ORGANIZATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_BUCKET = re.compile(
    rf"([a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9](?:/[^/@]+)*)/?(@{_ENDPOINT.pattern}/?)?"
)

MIB, GIB = 1 << 20, 1 << 30

STORAGE = Group("Storage")
SOURCES = Group("Sources")
LIMITS = Group("Limits of adapters")
SHARES = Group("Shares of tenants")
IMAGES = Group("Images")
REPLICAS = Group("Replicas")
CATALOG = Group("Catalog")


class StoreSettings(ServiceSettings):
    """Runs the adapter store: it fetches LoRA adapters, compiles each of them once per model layout
    into one image, and streams the images to inference services over gRPC."""

    model_config = SettingsConfigDict(env_prefix="LOADOUT_STORE_")

    command = "loadout store"
    module = "adapter_store"
    example = "loadout store --source-roots /srv/adapters --data-dir /var/lib/loadout"
    former: ClassVar[Mapping[str, str]] = {"memory_bytes": "image_memory"}
    groups = (
        *(BASICS, NETWORK, SECURITY, MEMORY, STORAGE, SOURCES, LIMITS, SHARES, IMAGES),
        *(CATALOG, REPLICAS, TELEMETRY, PROCESS),
    )

    listen: Annotated[Address, BASICS] = "127.0.0.1:7070"
    """Address of the gRPC server. Port 0 takes a free port: see --ready-file."""

    metrics_listen: Annotated[Address, NETWORK] = "127.0.0.1:7071"
    """Address of the HTTP server for Prometheus metrics. Port 0 takes a free port."""

    data_dir: Annotated[Folder, BASICS] = Path(".loadout/store")
    """Folder of the catalog, the stored sources and the compiled images. Only one store process may
    use it at a time."""

    image_memory: Annotated[Bytes, MEMORY] = ByteSize(4 * GIB)
    """Capacity of the memory tier of compiled images."""

    ephemeral_memory: Annotated[Bytes, MEMORY] = ByteSize(2 * GIB)
    """Memory for the sources of ephemeral adapters, those being uploaded included; further ones are
    refused until some are deleted. Their images take --image-memory besides, and no disk."""

    disk_cache_bytes: Annotated[Bytes, STORAGE] = ByteSize(64 * GIB)
    """Capacity of the disk tier of compiled images."""

    fetched_bytes: Annotated[Bytes, STORAGE] = ByteSize(64 * GIB)
    """Capacity of the local copies of sources in --shared-s3 that images are compiled from."""

    source_roots: Annotated[Folders, BASICS] = ()
    """Folders that file:// sources may lie in. Unset: no file:// sources."""

    s3_buckets: Annotated[Names, Metavar("BUCKET[/PREFIX],..."), SOURCES] = ()
    """Buckets, or prefixes in them, that s3:// sources may lie in. One that lies elsewhere than
    --s3-endpoint-url ends in @http(s)://HOST[:PORT]. Unset: no s3:// sources."""

    s3_endpoint_url: Annotated[str, Metavar("URL"), SOURCES] = ""
    """Address of an S3-compatible service, http(s)://HOST[:PORT]. Unset: Amazon S3."""

    s3_region: Annotated[str, SOURCES] = ""
    """Region of S3. Unset: from the AWS credential chain, and without that us-east-1."""

    hf_organizations: Annotated[Names, SOURCES] = ()
    """Organisations and users of the Hugging Face Hub whose repositories hf:// sources may lie in.
    A token comes from HF_TOKEN or from the Hub's own login. Unset: no hf:// sources."""

    hf_endpoint: Annotated[str, Metavar("URL"), SOURCES] = ""
    """Address of the Hub, http(s)://HOST[:PORT]. Unset: HF_ENDPOINT."""

    hf_cache_dir: Annotated[Folder | None, SOURCES] = None
    """Cache folder of the Hub, which is read when HF_HUB_OFFLINE is set. Unset: HF_HUB_CACHE."""

    fetch_workers: Annotated[int, Field(ge=1), SOURCES] = 4
    """Number of registrations and uploads processed at once; further ones wait, and tenants take
    turns."""

    max_adapter_bytes: Annotated[Bytes, LIMITS] = ByteSize(16 * GIB)
    """Size of the largest adapter that is accepted, all its files together."""

    max_file_bytes: Annotated[Bytes, LIMITS] = ByteSize(16 * GIB)
    """Size of the largest single file that is accepted."""

    max_rank: Annotated[int, Field(ge=1), LIMITS] = 512
    """Highest rank that any target of an adapter may have."""

    allow_pickle_files: Annotated[bool, LIMITS] = False
    """Accept adapter_model.bin where there is no safetensors file. It is read by torch's restricted
    reader in a process with limits, and stored as safetensors."""

    allow_config_keys: Annotated[Names, Metavar("KEY,..."), LIMITS] = ()
    """Keys of adapter_config.json that this release does not know and that may pass, because they
    change nothing that is computed. Log and audit say which registrations have some. Keys that it
    knows keep their verdict, and are refused here."""

    tenant_share: Annotated[float, Field(gt=0, le=1), SHARES] = 0.5
    """How much of each place that is finite (memory of requests, answers and pulls, uploads, staged
    bytes, fetch workers, call threads, watches) one tenant may hold, of what others leave. A token
    for several tenants counts as a tenant of its own. Without --policy-file all callers are one,
    which may hold everything."""

    request_memory: Annotated[Size, Field(ge=8 * MIB), MEMORY] = ByteSize(128 * MIB)
    """Highest sum of the bytes of requests that are received or processed at once, each at least
    16 KiB; more wait, and are refused with RESOURCE_EXHAUSTED after 10 seconds. At least 8 MiB, the
    largest request."""

    answer_memory: Annotated[Size, Field(ge=8 * MIB), MEMORY] = ByteSize(256 * MIB)
    """Highest sum of the bytes of answers that are made or that nobody has read yet: 6.3 MiB for a
    page, 1.5 MiB for a pull besides its image, 128 KiB for a record. More wait as requests do. At
    least 8 MiB."""

    max_uploads: Annotated[int, Field(ge=1), SHARES] = 64
    """Number of uploads at once."""

    max_watches: Annotated[int, Field(ge=1), SHARES] = 1024
    """Number of watches at once."""

    max_layouts: Annotated[int, Field(ge=1), SHARES] = 128
    """Number of model layouts in use for one base model."""

    max_layouts_in_all: Annotated[int, Field(ge=1), SHARES] = 512
    """Number of model layouts in use for all base models together."""

    staging_bytes: Annotated[Bytes, SHARES] = ByteSize(64 * GIB)
    """Bytes on disk of sources that are being fetched or uploaded, all together."""

    min_transfer_rate: Annotated[Bytes, SHARES] = ByteSize(64 << 10)
    """Bytes per second below which an upload, a fetch or a pull ends: once it is behind by
    --transfer-stall-seconds, a pull by --pull-stall-seconds."""

    transfer_stall_seconds: Annotated[PositiveSeconds, SHARES] = 60.0
    """Time after which an upload or a fetch ends that receives nothing."""

    compile_ahead: Annotated[bool, IMAGES] = True
    """Compile the current version of every adapter before it is pulled: at start, at registration
    and for every new layout. Off, only pinned adapters are: for a store on the same machine as an
    inference service, where other stores do it."""

    compile_workers: Annotated[int, Field(ge=1), IMAGES] = 2
    """Number of images compiled at once. Pulls take precedence over compiling ahead."""

    pull_stall_seconds: Annotated[PositiveSeconds, IMAGES] = 30.0
    """Time after which a pull, or another stream, ends whose reader takes no bytes."""

    layout_ttl_seconds: Annotated[Seconds, IMAGES] = 604800.0
    """Time that a model layout stays in use after its last server was connected, or pulled for it.
    Nothing is compiled ahead for it after an hour, and then its images are removed. 0: for ever."""

    allow_empty_catalog: Annotated[bool, CATALOG] = False
    """Start with a new catalog although sources are stored: they are removed. Without it a store
    whose catalog is missing or empty refuses to start, so that it can be restored."""

    delete_grace_seconds: Annotated[Seconds, CATALOG] = 600.0
    """Time that a deleted adapter can still be pulled by its digest, for requests that use it."""

    ephemeral_grace_seconds: Annotated[Seconds, CATALOG] = 10.0
    """The same for ephemeral adapters: time for servers whose requests have got the name's digest,
    and that have not begun to pull it. A pull that has begun is not ended, nor is a request."""

    collect_seconds: Annotated[PositiveSeconds, CATALOG] = 60.0
    """Time between two garbage collections of files that no record refers to."""

    event_retention: Annotated[int, Field(ge=1), CATALOG] = 100_000
    """Number of catalog events stored for watchers. A watcher further behind lists again."""

    bookmark_seconds: Annotated[PositiveSeconds, CATALOG] = 1.0
    """Longest time without an event on a watch before a bookmark is sent."""

    catalog_dsn: Annotated[SecretStr | None, Metavar("DSN"), REPLICAS] = None
    """PostgreSQL database of a catalog that several replicas share,
    postgresql+psycopg://USER:PASSWORD@HOST/NAME; needs --shared-s3. Unset: SQLite in --data-dir."""

    shared_s3: Annotated[str, Metavar("s3://BUCKET[/PREFIX]"), REPLICAS] = ""
    """Where replicas store sources and compiled images that they share. Each replica has a
    --data-dir of its own."""

    shared_s3_endpoint_url: Annotated[str, Metavar("URL"), REPLICAS] = ""
    """Address of the S3-compatible service of --shared-s3. Unset: --s3-endpoint-url."""

    lease_seconds: Annotated[PositiveSeconds, REPLICAS] = 15.0
    """Time after which other replicas take over the work of one that died."""

    @field_validator("s3_buckets")
    @classmethod
    def _check_buckets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        entries = []
        for entry in value:
            match = _BUCKET.fullmatch(entry)
            if not match:
                raise ValueError(f"{entry!r} is not BUCKET[/PREFIX][@http(s)://HOST[:PORT]]")
            entries.append(match[1] + (match[2] or "").rstrip("/"))
        return tuple(entries)

    @field_validator("hf_organizations")
    @classmethod
    def _check_organizations(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            if not _ORGANIZATION.fullmatch(entry):
                raise ValueError(f"{entry!r} is not the name of an organisation or user")
        return value

    @field_validator("s3_endpoint_url", "shared_s3_endpoint_url", "hf_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value and not _ENDPOINT.fullmatch(value.rstrip("/")):
            raise ValueError(f"{value!r} is not http(s)://HOST[:PORT]")
        return value.rstrip("/")

    @field_validator("catalog_dsn")
    @classmethod
    def _check_dsn(cls, value: SecretStr | None) -> SecretStr | None:
        # Files of Secrets often end in a line break, which would be a part of the database's name.
        text = "" if value is None else value.get_secret_value().strip()
        if not text:
            return None
        if not text.startswith("postgresql+psycopg://"):
            raise ValueError("is not of the form postgresql+psycopg://USER:PASSWORD@HOST/NAME")
        return SecretStr(text)

    @field_validator("shared_s3")
    @classmethod
    def _check_shared(cls, value: str) -> str:
        path = value.removeprefix("s3://")
        if value and (path == value or not _BUCKET.fullmatch(path)):
            raise ValueError(f"{value!r} is not s3://BUCKET or s3://BUCKET/PREFIX")
        return value

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.catalog_dsn is not None and not self.shared_s3:
            raise ValueError("--catalog-dsn needs --shared-s3: replicas share their sources")
        return self
