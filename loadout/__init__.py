"""Loadout's Python client, the `loadout` command, and the stubs of the contract.

client         Client: the blocking client, generated from aio
aio            AsyncClient: the asyncio client
types          types that both clients take and return
errors         errors that both clients raise
retry          decides when to retry a failed call
security       token and TLS of a client
signing        signatures of adapters
upload         sends an adapter's local files in chunks
prometheus     reads the metrics of a service
_client        the methods of both clients, by service
_push          sends an adapter from a trainer's memory
_rpc           how the clients call the services
_routing       which replica of the inference service a call goes to
cli            the `loadout` command
demo           the demo: a small trained model, and adapters that each do one visible job
integrations   trainers of other projects on Loadout
benchmark      measures a running server from a caller's side
verify         proves that a served adapter is the one that was trained
health         checks a service's health: `python -m loadout.health`
adapter_store  the stubs of the store's contract
inference      the stubs of the inference service's contract
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadout import errors

if TYPE_CHECKING:
    from loadout.aio import AsyncClient
    from loadout.client import Client
    from loadout.security import TlsConfig

__version__ = "0.3.0"
__all__ = ["AsyncClient", "Client", "TlsConfig", "__version__", "errors"]


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
