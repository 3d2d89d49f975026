"""How a command connects: the options for token and TLS that all commands share."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from loadout._routing import addresses
from loadout._routing.metadata import DEFAULT_TENANT
from loadout._routing.replicas import Endpoint
from loadout._rpc import threads
from loadout.aio import AsyncClient
from loadout.cli import options
from loadout.cli.config import check_environment, environment_store, environment_token
from loadout.cli.help import CONNECTION, SECURITY
from loadout.cli.output import CommandFailed, error_text
from loadout.cli.suggestions import suggest
from loadout.client import Client
from loadout.errors import NotFound
from loadout.retry import RetryPolicy
from loadout.security import ChannelOptions, TlsConfig

QUICK_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Connection:
    """The values of the options. Any option of TLS turns TLS on."""

    tenant: str = DEFAULT_TENANT
    token_file: Path | None = None
    tls: bool = False
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    allow_insecure_token: bool = False

    def client(self, **arguments: Any) -> Client:
        """Returns a Client of these `arguments`, with token and TLS. Raises CommandFailed or
        LoadoutError."""
        return Client(**self._arguments(), **arguments)

    def quick_client(self, **arguments: Any) -> Client:
        """Returns a client that waits for no service that does not answer at once."""
        retry = RetryPolicy(max_attempts=1)
        return self.client(**arguments, timeout_s=QUICK_TIMEOUT_S, retry=retry)

    def replica_client(self, replica: Endpoint, **arguments: Any) -> Client:
        """Returns a client of one replica, which is known by an IP address where several share a
        name."""

        def open_channel(address: str, credentials: Any, options: ChannelOptions) -> Any:
            if credentials is not None and replica.server_name:
                options = (*options, ("grpc.ssl_target_name_override", replica.server_name))
            return threads.open_channel(address, credentials, options)

        return self.client(inference=replica.address, channel_factory=open_channel, **arguments)

    def async_client(self, **arguments: Any) -> AsyncClient:
        """Returns the same for asyncio."""
        return AsyncClient(**self._arguments(), **arguments)

    def _arguments(self) -> dict[str, Any]:
        files = (self.tls_ca_file, self.tls_cert_file, self.tls_key_file)
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
            # The contents must not be quoted.
            why = error.strerror if isinstance(error, OSError) else "not ASCII"
            raise CommandFailed(f"--token-file: {self.token_file}: {why}") from None
        if not token:
            raise CommandFailed(f"--token-file: {self.token_file} is empty")
        return token


def replicas_of(inference: str) -> list[Endpoint]:
    """Returns the replicas that --inference stands for. Raises CommandFailed."""
    targets = addresses.split("inference", inference)
    if len(targets) == 1 and addresses.is_name(targets[0]):
        with contextlib.suppress(OSError, ValueError):  # which the call will report
            return addresses.resolve(targets[0])
    return [Endpoint(target) for target in targets]


def only_replica(inference: str) -> str:
    """Returns the address of --inference, for a command that is about one replica. Raises
    CommandFailed if it stands for several, of which any might answer."""
    found = [each.address for each in replicas_of(inference)]
    if len(found) > 1:
        raise CommandFailed(
            f"--inference: {inference} has {len(found)} replicas, but this command needs one: "
            f"choose one of {', '.join(found)}"
        )
    return inference


_OPTIONS: dict[str, Any] = {
    "tenant": Annotated[
        str,
        typer.Option(
            envvar="LOADOUT_TENANT",
            metavar="TENANT",
            help="Tenant for adapter names without one. It only helps to choose a replica: give "
            "the token's first tenant.",
            rich_help_panel=CONNECTION,
        ),
    ],
    "token_file": Annotated[
        Path | None,
        typer.Option(
            envvar="LOADOUT_TOKEN_FILE",
            metavar="FILE",
            help="File with the bearer token. Default: the token in LOADOUT_TOKEN.",
            rich_help_panel=SECURITY,
        ),
    ],
    "tls": Annotated[
        bool,
        typer.Option(
            "--tls",
            envvar="LOADOUT_TLS",
            help="Use TLS and trust public certificate authorities.",
            rich_help_panel=SECURITY,
        ),
    ],
    "tls_ca_file": Annotated[
        Path | None,
        typer.Option(
            envvar="LOADOUT_TLS_CA_FILE",
            metavar="FILE",
            help="Use TLS and trust these CA certificates, PEM.",
            rich_help_panel=SECURITY,
        ),
    ],
    "tls_cert_file": Annotated[
        Path | None,
        typer.Option(
            envvar="LOADOUT_TLS_CERT_FILE",
            metavar="FILE",
            help="Client certificate, PEM, for services that require one.",
            rich_help_panel=SECURITY,
        ),
    ],
    "tls_key_file": Annotated[
        Path | None,
        typer.Option(
            envvar="LOADOUT_TLS_KEY_FILE",
            metavar="FILE",
            help="Private key of --tls-cert-file, PEM.",
            rich_help_panel=SECURITY,
        ),
    ],
    "allow_insecure_token": Annotated[
        bool,
        typer.Option(
            "--allow-insecure-token",
            help="Allow the token to be sent without TLS to any address.",
            rich_help_panel=SECURITY,
        ),
    ],
}


def _known_store(arguments: dict[str, Any]) -> str:
    """Returns the store that the command has called, or else the store that the user has named; ""
    for none: the default's address may be anybody's, who would get the token."""
    store: str = arguments.get("store", "")
    if "inference" in arguments and store == options.DEFAULT_STORE:
        store = ""
    return store or environment_store()


def connects(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a connection to a command, which gets their values as `connection`."""
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
        check_environment()
        values = {name: arguments.pop(name) for name in _OPTIONS}
        connection = Connection(**values)
        try:
            command(connection=connection, **arguments)
        except NotFound as error:
            store = _known_store(arguments)
            hint = suggest(error, partial(connection.quick_client, store=store)) if store else ""
            if not hint:
                raise
            raise CommandFailed(error_text(error, f"; {hint}")) from error

    parameters = [*own, *shared]
    connected.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    connected.__annotations__ = {each.name: each.annotation for each in parameters}
    del connected.__wrapped__
    return connected
