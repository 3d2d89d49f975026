"""Loadout's public face: the Python client, the `loadout` command, the contract's stubs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadout.aio import AsyncClient
    from loadout.client import Client
    from loadout.security import TlsConfig

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "TlsConfig", "__version__"]


def __getattr__(name: str) -> object:
    """Loads the clients on first use: the services import only the stubs from here."""
    if name == "Client":
        from loadout.client import Client

        return Client
    if name == "AsyncClient":
        from loadout.aio import AsyncClient

        return AsyncClient
    if name == "TlsConfig":
        from loadout.security import TlsConfig

        return TlsConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
