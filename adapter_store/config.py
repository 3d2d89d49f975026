"""Settings of the adapter store: flags, environment LOADOUT_STORE_*, or a TOML file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ByteSize, Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from servicekit.hub_client import REDIRECT_HOSTS
from servicekit.settings.addresses import shown
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
    Level,
    Metavar,
    Names,
    PositiveSeconds,
    Seconds,
    Size,
)

_ENDPOINT = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_ORGANIZATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")
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

    listen: Annotated[Address, Level.COMMON, BASICS] = "127.0.0.1:7070"
    """Address of the gRPC server. Port 0 picks a free port; --ready-file shows which."""

    metrics_listen: Annotated[Address, Level.COMMON, NETWORK] = "127.0.0.1:7071"
    """Address of the HTTP server for Prometheus metrics. Port 0 picks a free port."""

    data_dir: Annotated[Folder, Level.COMMON, BASICS] = Path(".loadout/store")
    """Folder for the catalog, the stored sources and the compiled images. Only one store process
    may use it at a time."""

    image_memory: Annotated[Bytes, Level.COMMON, MEMORY] = ByteSize(4 * GIB)
    """Maximum memory for compiled images."""

    ephemeral_memory: Annotated[Bytes, MEMORY] = ByteSize(2 * GIB)
    """Maximum memory for the sources of ephemeral adapters, including uploads in progress; when it
    is full, the store refuses further ones. Their images count towards --image-memory and use no
    disk."""

    lock_images: Annotated[Literal["auto", "on", "off"], MEMORY] = "auto"
    """Lock the memory of images, so that the system never swaps it out. auto: if the limit of
    locked memory allows it; loadout info shows whether it does, and why not. on: refuse to start
    otherwise."""

    disk_cache_bytes: Annotated[Bytes, Level.COMMON, STORAGE] = ByteSize(64 * GIB)
    """Maximum disk space for compiled images."""

    fetched_bytes: Annotated[Bytes, STORAGE] = ByteSize(64 * GIB)
    """Maximum disk space for local copies of sources in --shared-s3, from which images are
    compiled."""

    source_roots: Annotated[Folders, Level.COMMON, BASICS] = ()
    """Folders that file:// sources may be in. If unset, file:// sources are refused."""

    s3_buckets: Annotated[Names, Metavar("BUCKET[/PREFIX],..."), Level.COMMON, SOURCES] = ()
    """Buckets, or prefixes in them, that s3:// sources may be in. Append @http(s)://HOST[:PORT] to
    a bucket that is not at --s3-endpoint-url. If unset, s3:// sources are refused."""

    s3_endpoint_url: Annotated[str, Metavar("URL"), Level.COMMON, SOURCES] = ""
    """Address of an S3-compatible service, http(s)://HOST[:PORT]. If unset, Amazon S3."""

    s3_region: Annotated[str, SOURCES] = ""
    """S3 region. Default: the region of the AWS credential chain, or us-east-1."""

    hf_organizations: Annotated[Names, Level.COMMON, SOURCES] = ()
    """Organisations and users on the Hugging Face Hub whose repositories hf:// sources may be in.
    The token comes from HF_TOKEN or from the Hub's login. If unset, hf:// sources are refused."""

    hf_endpoint: Annotated[str, Metavar("URL"), SOURCES] = ""
    """Address of the Hub, http(s)://HOST[:PORT]. Default: HF_ENDPOINT."""

    hf_redirect_hosts: Annotated[Names, Metavar("HOST,..."), SOURCES] = REDIRECT_HOSTS
    """Hosts to which the Hub may redirect downloads, each including its subdomains. The token is
    sent to the Hub's own host only."""

    hf_cache_dir: Annotated[Folder | None, Level.FILE, SOURCES] = None
    """Cache folder of the Hub, used when HF_HUB_OFFLINE is set. Default: HF_HUB_CACHE."""

    fetch_workers: Annotated[int, Field(ge=1), SOURCES] = 4
    """Number of registrations and uploads processed at once. Others wait; tenants take turns."""

    max_adapter_bytes: Annotated[Bytes, LIMITS] = ByteSize(16 * GIB)
    """Maximum total size of an adapter's files."""

    max_file_bytes: Annotated[Bytes, Level.FILE, LIMITS] = ByteSize(16 * GIB)
    """Maximum size of one file of an adapter."""

    max_rank: Annotated[int, Field(ge=1), Level.COMMON, LIMITS] = 512
    """Maximum rank of any target of an adapter."""

    allow_pickle_files: Annotated[bool, LIMITS] = False
    """Accept adapter_model.bin when there is no safetensors file. A process with limits reads it
    with torch's restricted unpickler and stores it as safetensors."""

    allow_config_keys: Annotated[Names, Metavar("KEY,..."), LIMITS] = ()
    """Keys of adapter_config.json that this release does not know, and that you know to change
    nothing that is computed. Registrations with such a key are accepted and noted in the log and
    audit file. Keys that this release knows are refused here."""

    tenant_share: Annotated[float, Field(gt=0, le=1), SHARES] = 0.5
    """Maximum share of each limited resource that one tenant may use, of the part that others leave
    free. The resources are memory of requests, responses and pulls; uploads; staged bytes; fetch
    workers; call threads; watches. A token for several tenants counts as one more tenant. Without
    --policy-file all callers are one tenant with no such limit."""

    request_memory: Annotated[Size, Field(ge=8 * MIB), MEMORY] = ByteSize(128 * MIB)
    """Maximum memory for requests that are being received or processed; each counts at least 16
    KiB. Further requests wait up to 10 seconds, then fail with RESOURCE_EXHAUSTED. At least 8 MiB,
    the largest request."""

    answer_memory: Annotated[Size, Field(ge=8 * MIB), MEMORY] = ByteSize(256 * MIB)
    """Maximum memory for responses until their callers have read them: 6.3 MiB per page of a list,
    1.5 MiB per pull in addition to its image, 128 KiB per record. Further requests wait as for
    --request-memory. At least 8 MiB."""

    max_uploads: Annotated[int, Field(ge=1), SHARES] = 64
    """Maximum number of concurrent uploads."""

    max_watches: Annotated[int, Field(ge=1), Level.FILE, SHARES] = 1024
    """Maximum number of concurrent watches."""

    max_layouts: Annotated[int, Field(ge=1), Level.FILE, SHARES] = 128
    """Maximum number of model layouts in use per base model."""

    max_layouts_in_all: Annotated[int, Field(ge=1), Level.FILE, SHARES] = 512
    """Maximum number of model layouts in use for all base models together."""

    staging_bytes: Annotated[Bytes, Level.FILE, SHARES] = ByteSize(64 * GIB)
    """Maximum disk space for sources that are being fetched or uploaded."""

    min_transfer_rate: Annotated[Bytes, Level.FILE, SHARES] = ByteSize(64 << 10)
    """Minimum speed of an upload, a fetch or a pull, in bytes per second. The store ends a transfer
    that falls behind this speed by transfer-stall-seconds (a pull: by pull-stall-seconds)."""

    transfer_stall_seconds: Annotated[PositiveSeconds, Level.FILE, SHARES] = 60.0
    """Time without any data after which the store ends an upload or a fetch."""

    compile_ahead: Annotated[bool, IMAGES] = True
    """Compile the current version of every adapter in advance: at start, at registration and for
    each new layout. If off, only pinned adapters are compiled in advance. Turn it off for a store
    on a server's own machine if other stores compile in advance."""

    compile_workers: Annotated[int, Field(ge=1), IMAGES] = 2
    """Number of images compiled at once. Images that a pull waits for come first."""

    pull_stall_seconds: Annotated[PositiveSeconds, Level.FILE, IMAGES] = 30.0
    """Time after which the store ends a pull or another stream whose reader takes no data."""

    share_socket: Annotated[Path | None, IMAGES] = None
    """Unix socket over which inference services on the same machine get images as files that they
    map, in place of a stream. Linux only. They need --store-share-socket, and their calls are
    authorised in the same way. Only this process's user can connect, or also share-users."""

    share_users: Annotated[Names, Metavar("UID,..."), Level.FILE, IMAGES] = ()
    """Ids of further users whose processes may connect to --share-socket."""

    layout_ttl_seconds: Annotated[Seconds, IMAGES] = 604800.0
    """Time that a model layout stays in use after a server last connected or pulled for it; then
    its images are removed. One hour after its last server has left, nothing more is compiled in
    advance for it. 0: no limit."""

    allow_empty_catalog: Annotated[bool, CATALOG] = False
    """Start with a new catalog and remove the sources that are stored. If off, a store that has
    sources but no catalog refuses to start, so that you can restore the catalog."""

    delete_grace_seconds: Annotated[Seconds, CATALOG] = 600.0
    """Time during which a deleted adapter can still be pulled by digest, for requests that use
    it."""

    ephemeral_grace_seconds: Annotated[Seconds, Level.FILE, CATALOG] = 10.0
    """The same as --delete-grace-seconds, for ephemeral adapters. It covers servers that have
    resolved the name but not started to pull. Pulls that have begun, and requests, always
    finish."""

    collect_seconds: Annotated[PositiveSeconds, Level.FILE, CATALOG] = 60.0
    """Time between two garbage collections of files that no record refers to."""

    event_retention: Annotated[int, Field(ge=1), Level.FILE, CATALOG] = 100_000
    """Number of catalog events kept for watchers. A watcher that is further behind has to list
    again."""

    bookmark_seconds: Annotated[PositiveSeconds, Level.FILE, CATALOG] = 1.0
    """Maximum time without an event before a watch sends a bookmark."""

    catalog_dsn: Annotated[SecretStr | None, Metavar("DSN"), Level.COMMON, REPLICAS] = None
    """PostgreSQL database for a catalog that several replicas share,
    postgresql+psycopg://USER:PASSWORD@HOST/NAME; needs --shared-s3. If unset, SQLite in
    --data-dir."""

    shared_s3: Annotated[str, Metavar("s3://BUCKET[/PREFIX]"), Level.COMMON, REPLICAS] = ""
    """Location of the sources and compiled images that replicas share. Each replica also needs its
    own --data-dir."""

    shared_s3_endpoint_url: Annotated[str, Metavar("URL"), Level.FILE, REPLICAS] = ""
    """Address of the S3-compatible service of --shared-s3. Default: --s3-endpoint-url."""

    lease_seconds: Annotated[PositiveSeconds, Level.FILE, REPLICAS] = 15.0
    """Time after which other replicas take over the work of a replica that died."""

    @field_validator("s3_buckets")
    @classmethod
    def _check_buckets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        entries = []
        for entry in value:
            match = _BUCKET.fullmatch(entry)
            if not match:
                raise ValueError(f"{shown(entry)} is not BUCKET[/PREFIX][@http(s)://HOST[:PORT]]")
            entries.append(match[1] + (match[2] or "").rstrip("/"))
        return tuple(entries)

    @field_validator("hf_organizations")
    @classmethod
    def _check_organizations(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            if not _ORGANIZATION.fullmatch(entry):
                raise ValueError(f"{shown(entry)} is not the name of an organisation or user")
        return value

    @field_validator("hf_redirect_hosts")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            if not _HOST.fullmatch(entry):
                raise ValueError(
                    f"{shown(entry)} is not the name of a host, without a scheme or a port"
                )
        return value

    @field_validator("s3_endpoint_url", "shared_s3_endpoint_url", "hf_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value and not _ENDPOINT.fullmatch(value.rstrip("/")):
            raise ValueError(f"{shown(value)} is not http(s)://HOST[:PORT]")
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
            raise ValueError(f"{shown(value)} is not s3://BUCKET or s3://BUCKET/PREFIX")
        return value

    @field_validator("share_users")
    @classmethod
    def _check_users(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            if not entry.isascii() or not entry.isdigit():
                raise ValueError(f"{shown(entry)} is not the number of a user")
        return value

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.catalog_dsn is not None and not self.shared_s3:
            raise ValueError("--catalog-dsn needs --shared-s3: replicas share their sources")
        return self
