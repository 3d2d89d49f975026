"""How a command connects: the options for token and TLS that all of them share."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from loadout._routing import addresses
from loadout._routing.metadata import DEFAULT_TENANT
from loadout.aio import AsyncClient
from loadout.cli.config import environment_token
from loadout.cli.failure import CommandFailed
from loadout.client import Client
from loadout.security import TlsConfig


@dataclass(frozen=True, slots=True)
class Connection:
    """The options' values. TLS is used as soon as one of its options is given."""

    tenant: str = DEFAULT_TENANT
    token_file: Path | None = None
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allow_insecure_token: bool = False

    def client(self, **arguments: Any) -> Client:
        """A Client of these `arguments`, with token and TLS. Raises CommandFailed or
        LoadoutError."""
        return Client(**self._arguments(), **arguments)

    def async_client(self, **arguments: Any) -> AsyncClient:
        """The same for asyncio."""
        return AsyncClient(**self._arguments(), **arguments)

    def _arguments(self) -> dict[str, Any]:
        files = (self.tls_ca, self.tls_cert, self.tls_key)
        uses_tls = self.tls or any(files)
        return {
            "token": self._token(),
            "tls": TlsConfig(*files) if uses_tls else None,
            "allow_insecure_token": self.allow_insecure_token,
            "tenant": self.tenant,
        }

    def _token(self) -> str | None:
        if self.token_file is None:
            return environment_token() or None
        try:
            token = self.token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            # What was read must not be quoted.
            why = error.strerror if isinstance(error, OSError) else "not ASCII"
            raise CommandFailed(f"--token-file: {self.token_file}: {why}") from None
        if not token:
            raise CommandFailed(f"--token-file: {self.token_file} is empty")
        return token


def only_replica(inference: str) -> str:
    """The address of --inference, for a command that is about one replica. Raises CommandFailed if
    it stands for several, of which any might answer."""
    targets = addresses.split("inference", inference)
    if len(targets) == 1 and addresses.is_name(targets[0]):
        with contextlib.suppress(OSError, ValueError):  # which a call will tell of
            targets = [endpoint.address for endpoint in addresses.resolve(targets[0])]
    if len(targets) > 1:
        raise CommandFailed(
            f"--inference: {inference} stands for {len(targets)} replicas, and this is about one: "
            f"name one of {', '.join(targets)}"
        )
    return inference


_OPTIONS: dict[str, Any] = {
    "tenant": Annotated[
        str,
        typer.Option(
            envvar="LOADOUT_TENANT",
            metavar="TENANT",
            help="Whose an adapter's name without a tenant is, for the choice of a replica: the "
            "first tenant of the token.",
        ),
    ],
    "token_file": Annotated[
        Path | None,
        typer.Option(
            envvar="LOADOUT_TOKEN_FILE",
            metavar="FILE",
            help="File with the bearer token. Without it: LOADOUT_TOKEN, if that is set.",
        ),
    ],
    "tls": Annotated[
        bool,
        typer.Option(
            "--tls", envvar="LOADOUT_TLS", help="Connect with TLS, to public authorities."
        ),
    ],
    "tls_ca": Annotated[
        Path | None,
        typer.Option(
            envvar="LOADOUT_TLS_CA",
            metavar="FILE",
            help="Connect with TLS to services that these CA certificates vouch for, PEM.",
        ),
    ],
    "tls_cert": Annotated[
        Path | None,
        typer.Option(
            envvar="LOADOUT_TLS_CERT",
            metavar="FILE",
            help="Own certificate, for services that ask for one, PEM.",
        ),
    ],
    "tls_key": Annotated[
        Path | None,
        typer.Option(envvar="LOADOUT_TLS_KEY", metavar="FILE", help="Key of --tls-cert, PEM."),
    ],
    "allow_insecure_token": Annotated[
        bool,
        typer.Option("--allow-insecure-token", help="Send the token without TLS to any address."),
    ],
}


def connects(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of a connection; its parameter `connection` gets their values."""
    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name != "connection"
    ]
    defaults = Connection()
    shared = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(defaults, name),
            annotation=annotation,
        )
        for name, annotation in _OPTIONS.items()
    ]

    @wraps(command)
    def connected(**arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in _OPTIONS}
        command(connection=Connection(**values), **arguments)

    parameters = [*own, *shared]
    connected.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    connected.__annotations__ = {each.name: each.annotation for each in parameters}
    del connected.__wrapped__
    return connected
