"""`loadout token`: a new token, and its lines for the services' policy files."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from enum import StrEnum
from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  loadout token trainer-a --role publisher --tenant team-a >> policy.toml
  loadout token gateway --role caller --tenant team-a --tenant team-b
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
        str, typer.Argument(metavar="NAME", help="Name of the token; it appears in audit logs.")
    ],
    role: Annotated[
        list[Role] | None,
        typer.Option(metavar="|".join(Role), help="Role; may be repeated. Default: reader."),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TENANT",
            help='Tenant; may be repeated; "*" is all. The first completes names without one. '
            "Default: default.",
        ),
    ] = None,
) -> None:
    """Make a bearer token.

    The lines for the policy file go to stdout, the token to stderr. It is stored nowhere.
    """
    if not _NAME.fullmatch(name):
        raise typer.BadParameter(f"{name!r} is not of the form {_NAME.pattern}", param_hint="NAME")
    tenants = tenant or ["default"]
    for each in tenants:
        if not _TENANT.fullmatch(each):
            raise typer.BadParameter(
                f"{each!r} is not of the form {_TENANT.pattern}", param_hint="--tenant"
            )
    made = secrets.token_urlsafe(TOKEN_BYTES)
    roles = [each.value for each in role or [Role.READER]]
    typer.echo(policy_lines(name, made, roles, tenants))
    typer.echo(f"token of {name}, shown this once: {made}", err=True)


def policy_lines(name: str, token: str, roles: list[str], tenants: list[str]) -> str:
    """Returns the token's table in a policy file."""
    key = name if "." not in name else json.dumps(name)
    return (
        f"[tokens.{key}]\n"
        f'sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
        f"roles = {json.dumps(roles)}\n"
        f"tenants = {json.dumps(tenants)}\n"
    )
