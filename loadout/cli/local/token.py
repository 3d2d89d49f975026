"""`loadout token`: a new token, and its lines for the services' policy files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from loadout.cli.output import CommandFailed

EXAMPLES = """\b
Examples:
  loadout token trainer-a --role publisher --tenant team-a >> policy.toml
  loadout token gateway --role caller --tenant team-a --tenant team-b
  loadout token trainer-a --role publisher --out trainer-a.token >> policy.toml
"""

TOKEN_BYTES = 32

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}|\*")


class Role(StrEnum):
    """The roles of the adapter store (reader to admin) and of the inference service."""

    READER = "reader"
    PUBLISHER = "publisher"
    SERVER = "server"
    ADMIN = "admin"
    CALLER = "caller"
    OPERATOR = "operator"


def token(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the token, which appears in audit logs.")
    ],
    role: Annotated[
        list[Role] | None,
        typer.Option(
            metavar="|".join(Role), help="Role. You can repeat this option. Default: reader."
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TENANT",
            help='Tenant; "*" means all. You can repeat this option; the first tenant is added '
            "to names without one. Default: default.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File to write the token to, for --token-file. Only its owner may read it. "
            "Default: stderr.",
        ),
    ] = None,
) -> None:
    """Create a bearer token.

    The lines for the policy file go to stdout, the token to stderr or to --out. The token is not
    stored anywhere else.
    """
    if not _NAME.fullmatch(name):
        raise typer.BadParameter(f"{name!r} is not of the form {_NAME.pattern}", param_hint="NAME")
    tenants = tenant or ["default"]
    check_tenants(tenants)
    made = secrets.token_urlsafe(TOKEN_BYTES)
    roles = [each.value for each in role or [Role.READER]]
    if out is not None:
        _write(out, made)  # first: a policy with a token that nobody has is of no use
    typer.echo(policy_lines(name, made, roles, tenants))
    said = f"token of {name}, shown this once: {made}" if out is None else f"token of {name}: {out}"
    typer.echo(said, err=True)


def check_tenants(tenants: Iterable[str]) -> None:
    """Raises BadParameter for an invalid tenant of a policy."""
    for each in tenants:
        if not _TENANT.fullmatch(each):
            raise typer.BadParameter(
                f"{each!r} is not of the form {_TENANT.pattern}", param_hint="--tenant"
            )


def _write(file: Path, token: str) -> None:
    """Writes a new file that only its owner may read."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise CommandFailed(f"--out: {file} exists: tokens are not overwritten") from error
    with open(descriptor, "w", encoding="ascii") as opened:
        opened.write(f"{token}\n")


def policy_lines(name: str, token: str, roles: list[str], tenants: list[str]) -> str:
    """Returns the token's table in a policy file."""
    key = name if "." not in name else json.dumps(name)
    return (
        f"[tokens.{key}]\n"
        f'sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
        f"roles = {json.dumps(roles)}\n"
        f"tenants = {json.dumps(tenants)}\n"
    )
