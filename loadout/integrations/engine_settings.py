"""Settings that the integrations of engines read from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loadout._routing.metadata import DEFAULT_TENANT
from loadout.aio import AsyncClient
from loadout.errors import InvalidArgument
from loadout.security import TlsConfig

DEFAULT_CACHE_BYTES = 64 << 30
_OFF = frozenset({"", "0", "false", "no"})


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine's integration.

    Args:
        store: Address of the store, or addresses of its replicas, with commas.
        cache: Folder for adapters; no other process may use it.
        cache_bytes: Most bytes of the files in it.
        base_models: Names by which adapters know the engine's model. Empty: the engine's own.
        token: Token of the store; "" for none.
        tls: TLS to the store; None for none.
        allow_insecure_token: Send the token without TLS, because you trust the network.
        tenant: Tenant of names without one.
    """

    store: str
    cache: Path
    cache_bytes: int = DEFAULT_CACHE_BYTES
    base_models: tuple[str, ...] = ()
    token: str = ""
    tls: TlsConfig | None = None
    allow_insecure_token: bool = False
    tenant: str = DEFAULT_TENANT

    def client(self) -> AsyncClient:
        """Returns a client of the store. Raises InvalidArgument."""
        return AsyncClient(
            store=self.store,
            token=self.token or None,
            tls=self.tls,
            allow_insecure_token=self.allow_insecure_token,
            tenant=self.tenant,
        )


def read_settings(environment: Mapping[str, str]) -> EngineSettings:
    """Reads LOADOUT_STORE, LOADOUT_CACHE, LOADOUT_CACHE_BYTES, LOADOUT_BASE_MODEL, and the settings
    of a connection by the names that the `loadout` command knows. Raises InvalidArgument."""

    def text(name: str) -> str:
        return environment.get(name, "").strip()

    def is_on(name: str) -> bool:
        return text(name).lower() not in _OFF

    for name in ("LOADOUT_STORE", "LOADOUT_CACHE"):
        if not text(name):
            raise InvalidArgument(f"{name} is not set", subject=name)
    files = [text(f"LOADOUT_TLS_{kind}_FILE") or None for kind in ("CA", "CERT", "KEY")]
    return EngineSettings(
        text("LOADOUT_STORE"),
        Path(text("LOADOUT_CACHE")),
        _number("LOADOUT_CACHE_BYTES", text("LOADOUT_CACHE_BYTES"), DEFAULT_CACHE_BYTES),
        tuple(filter(None, (each.strip() for each in text("LOADOUT_BASE_MODEL").split(",")))),
        _token(text("LOADOUT_TOKEN_FILE"), text("LOADOUT_TOKEN")),
        TlsConfig(*files) if is_on("LOADOUT_TLS") or any(files) else None,
        is_on("LOADOUT_ALLOW_INSECURE_TOKEN"),
        text("LOADOUT_TENANT") or DEFAULT_TENANT,
    )


def _number(name: str, text: str, default: int) -> int:
    if not text:
        return default
    if not text.isdecimal() or not int(text):
        raise InvalidArgument(f"{name}: {text!r} is no number of bytes", subject=name)
    return int(text)


def _token(file: str, token: str) -> str:
    if not file:
        return token
    try:
        return Path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:  # the contents must not be quoted
        why = error.strerror if isinstance(error, OSError) else "not ASCII"
        raise InvalidArgument(f"LOADOUT_TOKEN_FILE: {file}: {why}", subject=file) from None
