"""Settings of the adapter store: environment LOADOUT_STORE_*, or the command line, which wins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ByteSize,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from servicekit.settings import check_endpoint

_LISTEN = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\s\[\]]+):([0-9]{1,5})")
_ENDPOINT = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_ORGANIZATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_BUCKET = re.compile(
    rf"([a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9](?:/[^/@]+)*)/?(@{_ENDPOINT.pattern}/?)?"
)

MIB = 1 << 20
GIB = 1 << 30

Bytes = Annotated[ByteSize, Field(gt=0)]


class StoreSettings(BaseSettings):
    """Loadout adapter store: fetches LoRA adapters, compiles each once per model layout
    into one image, and streams the images to inference services over gRPC."""

    model_config = SettingsConfigDict(
        env_prefix="LOADOUT_STORE_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_prog_name="python -m adapter_store",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    listen: str = "127.0.0.1:7070"
    """Address for gRPC, HOST:PORT. Port 0 takes a free one; see ready_file."""

    metrics_listen: str = "127.0.0.1:7071"
    """Address for Prometheus metrics over HTTP, HOST:PORT. Port 0 takes a free one."""

    policy_file: Path | None = None
    """TOML file with tokens, quotas and trusted keys; read again on SIGHUP. None: everybody who
    reaches this store may do everything."""

    allow_open_access: bool = False
    """Listen without policy_file also where other machines can connect."""

    tls_cert_file: Path | None = None
    """Certificate chain of this store, PEM. None: no TLS."""

    tls_key_file: Path | None = None
    """Private key of tls_cert_file, PEM."""

    tls_client_ca_file: Path | None = None
    """CA certificates, PEM: callers need a client certificate that one of them signed."""

    audit_file: Path | None = None
    """File to append a JSON line to for every change that is asked for; opened anew on SIGHUP."""

    data_dir: Path = Path(".loadout/store")
    """Folder for the catalog, the kept sources and compiled images. One store process at a time."""

    source_roots: Annotated[tuple[Path, ...], NoDecode] = ()
    """Folders that file:// sources may lie in, separated by commas. None: no local sources."""

    s3_buckets: Annotated[tuple[str, ...], NoDecode] = ()
    """S3 sources that may be read: BUCKET or BUCKET/PREFIX, separated by commas, each with
    @http(s)://HOST[:PORT] if it lies elsewhere than s3_endpoint_url. None: no S3."""

    s3_endpoint_url: str = ""
    """Address of an S3-compatible service, http(s)://HOST[:PORT]. Empty: Amazon S3."""

    s3_region: str = ""
    """Region for S3. Empty: as the credential chain says, else us-east-1."""

    hf_organizations: Annotated[tuple[str, ...], NoDecode] = ()
    """Organisations and users of the Hugging Face Hub whose models may be read, separated by
    commas. None: no hf:// sources. A token comes from HF_TOKEN or the hub's own login."""

    hf_endpoint: str = ""
    """Address of the hub, http(s)://HOST[:PORT]. Empty: as HF_ENDPOINT says."""

    hf_cache_dir: Path | None = None
    """Cache folder of the hub, read when HF_HUB_OFFLINE is set. None: as HF_HUB_CACHE says."""

    catalog_dsn: SecretStr | None = None
    """PostgreSQL for the catalog of several replicas: postgresql+psycopg://USER:PASSWORD@HOST/NAME.
    None: SQLite in data_dir."""

    shared_s3: str = ""
    """s3://BUCKET[/PREFIX] for what replicas share: kept sources and compiled images. Needed with
    catalog_dsn. Each replica has a data_dir of its own."""

    shared_s3_endpoint_url: str = ""
    """Address of the S3-compatible service of shared_s3. Empty: s3_endpoint_url."""

    fetched_bytes: Bytes = ByteSize(64 * GIB)
    """Space for copies of shared sources that images are compiled from, such as 64GiB."""

    lease_seconds: PositiveFloat = 15.0
    """How long a replica that died is waited for before another one takes over what it did."""

    disk_cache_bytes: Bytes = ByteSize(64 * GIB)
    """Capacity of the disk tier of compiled images, such as 64GiB."""

    memory_bytes: Bytes = ByteSize(4 * GIB)
    """Capacity of the memory tier of compiled images, such as 4GiB."""

    max_adapter_bytes: Bytes = ByteSize(16 * GIB)
    """Largest adapter taken from a source or an upload, all files together."""

    max_file_bytes: Bytes = ByteSize(16 * GIB)
    """Largest single file taken from a source or an upload."""

    max_rank: PositiveInt = 512
    """Highest rank of any target of an adapter."""

    allow_pickle_files: bool = False
    """Take adapter_model.bin where there is no safetensors file: read by torch's restricted reader
    in a process with limits, and kept as safetensors."""

    compile_workers: PositiveInt = 2
    """Images compiled at the same time. Pulls go before compiling ahead."""

    compile_ahead: bool = True
    """Compile what names point to before it is pulled: at start, at registration and for a new
    layout. Off: only pinned adapters. For replicas beside inference, where others do it."""

    pull_stall_seconds: PositiveFloat = 30.0
    """How long a pull waits for a reader that takes nothing before it is ended."""

    fetch_workers: PositiveInt = 4
    """Registrations and uploads worked on at the same time; further ones wait."""

    event_retention: Annotated[int, Field(ge=1)] = 100_000
    """Catalog events kept for watchers. A watcher further behind has to list again."""

    bookmark_seconds: PositiveFloat = 1.0
    """Longest silence on a watch before a bookmark is sent."""

    delete_grace_seconds: NonNegativeFloat = 600.0
    """How long a deleted adapter's digest can still be pulled by requests that run on it."""

    collect_seconds: PositiveFloat = 60.0
    """Time between two collections of what no record points to any more."""

    layout_ttl_seconds: NonNegativeFloat = 604800.0
    """How long a model layout that no server registers or pulls for stays in use: then nothing is
    compiled ahead for it and its images are removed, until a server comes back. 0: for ever."""

    grace_seconds: NonNegativeFloat = 30.0
    """How long calls in progress may go on after SIGTERM."""

    otlp_endpoint: str = ""
    """Where spans are sent over OTLP with gRPC, http(s)://HOST:PORT. Empty: where
    OTEL_EXPORTER_OTLP_ENDPOINT says; without that there is no tracing. Needs the extra otel."""

    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the calls that are traced, 0 to 1, of those whose callers do not say whether they
    are. None: as OTEL_TRACES_SAMPLER says, else all."""

    ready_file: Path | None = None
    """File to write once serving: JSON with the addresses "grpc" and "metrics"."""

    log_format: Literal["text", "json"] = "text"
    """One line per event, for people or for machines."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is logged."""

    @field_validator("source_roots", "s3_buckets", "hf_organizations", mode="before")
    @classmethod
    def _split_commas(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list | tuple):
            parts = (part for item in value for part in str(item).split(","))
            return tuple(part.strip() for part in parts if part.strip())
        return value

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

    @field_validator("s3_endpoint_url", "hf_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value and not _ENDPOINT.fullmatch(value.rstrip("/")):
            raise ValueError(f"{value!r} is not http(s)://HOST[:PORT]")
        return value.rstrip("/")

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_otlp(cls, value: str) -> str:
        return check_endpoint(value)

    @field_validator("catalog_dsn")
    @classmethod
    def _check_dsn(cls, value: SecretStr | None) -> SecretStr | None:
        # Files of Secrets often end in a line's end, which would be a part of the database's name.
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
            raise ValueError("shared_s3 is needed with catalog_dsn: replicas share their sources")
        return self

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _check_listen(cls, value: str) -> str:
        match = _LISTEN.fullmatch(value)
        if not match or int(match[2]) > 65535:
            raise ValueError(f"{value!r} is not HOST:PORT")
        return value


def load_settings(arguments: list[str] | None = None) -> StoreSettings:
    """Reads the environment and, if given, command line arguments.

    Raises pydantic.ValidationError; exits by itself on --help and unknown arguments.
    """
    return StoreSettings(_cli_parse_args=arguments if arguments is not None else False)  # type: ignore[call-arg]
