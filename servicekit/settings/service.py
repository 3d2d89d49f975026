"""The settings that all services have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from servicekit.settings.types import Address, Endpoint, Group, Level, Seconds, lower

BASICS = Group("Basics")
NETWORK = Group("Network")
SECURITY = Group("Security")
MEMORY = Group("Memory")
TELEMETRY = Group("Logs and traces")
PROCESS = Group("Process")


class ServiceSettings(BaseSettings):
    """The settings of all services. A service's class adds its own, and names itself."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    command: ClassVar[str]
    """The command that starts the service, such as "loadout store"."""
    module: ClassVar[str]
    """The module that starts it, such as "adapter_store"."""
    example: ClassVar[str]
    """A command line that ends the help."""
    groups: ClassVar[tuple[Group, ...]]
    """The groups in the order in which they are shown."""
    former: ClassVar[Mapping[str, str]] = {}
    """Former names of settings, which are refused, with the settings' present names."""

    listen: Annotated[Address, Level.COMMON, BASICS]
    """Address of the gRPC server. Port 0 picks a free port; --ready-file shows which."""

    metrics_listen: Annotated[Address, Level.COMMON, NETWORK]
    """Address of the HTTP server for Prometheus metrics. Port 0 picks a free port."""

    policy_file: Annotated[Path | None, Level.COMMON, SECURITY] = None
    """TOML file with tokens, roles, quotas and trusted keys. If unset, every caller may do
    everything."""

    allow_open_access: Annotated[bool, SECURITY] = False
    """Accept calls from other machines even without --policy-file."""

    audit_file: Annotated[Path | None, SECURITY] = None
    """File that gets one JSON line for every change that a caller requests. SIGHUP reopens it."""

    audit_required: Annotated[bool, SECURITY] = False
    """Refuse changes while --audit-file cannot be written. Each change then writes a line with the
    result "started" before it begins. If off, a lost line is only logged as an error."""

    tls_cert_file: Annotated[Path | None, Level.COMMON, SECURITY] = None
    """Certificate chain of this service, PEM. If unset, the service does not use TLS."""

    tls_key_file: Annotated[Path | None, Level.COMMON, SECURITY] = None
    """Private key of --tls-cert-file, PEM."""

    tls_client_ca_file: Annotated[Path | None, SECURITY] = None
    """CA certificates, PEM. If set, every caller needs a client certificate that one of them
    signed."""

    reload_seconds: Annotated[Seconds, SECURITY] = 10.0
    """Maximum time until the service applies changes to the files of --policy-file,
    --tls-cert-file, --tls-key-file and --tls-client-ca-file. 0: only on SIGHUP."""

    log_format: Annotated[
        Literal["text", "json"], BeforeValidator(lower), Level.COMMON, TELEMETRY
    ] = "text"
    """Format of log lines: text for people, json for machines."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        BeforeValidator(lower),
        TELEMETRY,
    ] = "info"
    """Lowest level that is logged."""

    otlp_endpoint: Annotated[Endpoint, TELEMETRY] = ""
    """Receiver of traces over OTLP/gRPC, http(s)://HOST:PORT; needs the extra `otel`. Default:
    OTEL_EXPORTER_OTLP_ENDPOINT; if that is unset too, there is no tracing."""

    trace_sample_ratio: Annotated[float | None, Field(ge=0, le=1), TELEMETRY] = None
    """Share of calls to trace, when the caller has not decided. Default: OTEL_TRACES_SAMPLER; if
    that is unset too, all calls."""

    config: Annotated[Path | None, Level.COMMON, BASICS] = None
    """TOML file with settings; its keys are the names of the flags. Flags and environment variables
    override it."""

    ready_file: Annotated[Path | None, PROCESS] = None
    """File that the service writes once it is ready: JSON with the address of each server, such as
    "grpc" and "metrics", and a list of "warnings" if there are any."""

    grace_seconds: Annotated[Seconds, PROCESS] = 30.0
    """Time that running calls get to finish after SIGTERM."""

    @model_validator(mode="after")
    def _check_audit(self) -> Self:
        if self.audit_required and self.audit_file is None:
            raise ValueError("--audit-required needs --audit-file")
        return self
