"""The settings that all services have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from servicekit.settings.types import Address, Endpoint, Group, Seconds, lower

BASICS = Group("Basics")
NETWORK = Group("Network")
SECURITY = Group("Security")
MEMORY = Group("Memory")
TELEMETRY = Group("Logs and traces")
PROCESS = Group("Process")


class ServiceSettings(BaseSettings):
    """What all services have. A service's class adds its own, and names itself."""

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
    """Former names of settings, which are refused, and what the settings are called now."""

    listen: Annotated[Address, BASICS]
    """Address of the gRPC server. Port 0 takes a free port: see --ready-file."""

    metrics_listen: Annotated[Address, NETWORK]
    """Address of the HTTP server for Prometheus metrics. Port 0 takes a free port."""

    policy_file: Annotated[Path | None, SECURITY] = None
    """TOML file with tokens, roles, quotas and trusted keys. Without it every caller may do
    everything."""

    allow_open_access: Annotated[bool, SECURITY] = False
    """Accept calls from other machines also without --policy-file."""

    audit_file: Annotated[Path | None, SECURITY] = None
    """File to which one JSON line is appended for every change that a caller requests; opened again
    on SIGHUP."""

    audit_required: Annotated[bool, SECURITY] = False
    """Refuse calls that change something while --audit-file cannot be written. Their first line,
    with the result "started", is written before they begin. Off: a lost line is logged as an
    error."""

    tls_cert_file: Annotated[Path | None, SECURITY] = None
    """Certificate chain of this service, PEM. Without it there is no TLS."""

    tls_key_file: Annotated[Path | None, SECURITY] = None
    """Private key of --tls-cert-file, PEM."""

    tls_client_ca_file: Annotated[Path | None, SECURITY] = None
    """CA certificates, PEM. With it every caller needs a client certificate that one of them
    signed."""

    reload_seconds: Annotated[Seconds, SECURITY] = 10.0
    """Time within which changes of the files of --policy-file, --tls-cert-file, --tls-key-file and
    --tls-client-ca-file are taken over. 0: on SIGHUP only."""

    log_format: Annotated[Literal["text", "json"], BeforeValidator(lower), TELEMETRY] = "text"
    """Form of a log line: text for people, json for machines."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], BeforeValidator(lower), TELEMETRY
    ] = "info"
    """Lowest level that is logged."""

    otlp_endpoint: Annotated[Endpoint, TELEMETRY] = ""
    """Receiver of spans over OTLP with gRPC, http(s)://HOST:PORT; needs the extra `otel`. Unset:
    OTEL_EXPORTER_OTLP_ENDPOINT, and without that there is no tracing."""

    trace_sample_ratio: Annotated[float | None, Field(ge=0, le=1), TELEMETRY] = None
    """Share of the calls that are traced, of those whose callers have not decided. Unset:
    OTEL_TRACES_SAMPLER, and without that all."""

    config: Annotated[Path | None, BASICS] = None
    """TOML file with settings, named as the flags are. Flags and the environment win over it."""

    ready_file: Annotated[Path | None, PROCESS] = None
    """File that is written once the service is ready: JSON with the address of each server, such as
    "grpc" and "metrics"."""

    grace_seconds: Annotated[Seconds, PROCESS] = 30.0
    """Time that calls in progress get to finish after SIGTERM."""

    @model_validator(mode="after")
    def _check_audit(self) -> Self:
        if self.audit_required and self.audit_file is None:
            raise ValueError("--audit-required needs --audit-file")
        return self
