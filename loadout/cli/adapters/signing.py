"""`loadout keygen`, `loadout digest` and `loadout sign`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from loadout.cli.local.service_code import run_service_code
from loadout.cli.local.token import check_tenants
from loadout.cli.output import CommandFailed
from loadout.signing import SigningKey, format_signature
from loadout.upload import is_uri, open_folder

KEYGEN_EXAMPLES = """\b
Examples:
  loadout keygen release-2026.pem
  loadout keygen /keys/release-2026.pem --tenant team-a >> policy.toml
"""

DIGEST_EXAMPLES = """\b
Examples:
  loadout digest ./out/french
"""

SIGN_EXAMPLES = """\b
Examples:
  loadout sign ./out/french --key release-2026.pem > french.sig
  loadout sign sha256:... --key release-2026.pem
  loadout register french ./out/french --signature french.sig
"""

KeyId = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Name of the key in the store's policy. Default: the file's name."
    ),
]


def keygen(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="File to write the private key to. Its name is the key's name."
        ),
    ],
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TENANT",
            help='Tenant whose adapters the key may sign; "*" means all. You can repeat this '
            "option. Default: default.",
        ),
    ] = None,
) -> None:
    """Create a key to sign adapters with.

    Prints the lines for the store's policy file, without the private key.
    """
    tenants = tenant or ["default"]
    check_tenants(tenants)
    try:
        key = SigningKey.create(file)
    except FileExistsError as error:
        raise CommandFailed(f"{file} exists: keys are not overwritten") from error
    # A name with a dot in it would be two tables of TOML.
    typer.echo(f'[keys."{key.key_id}"]')
    typer.echo(f'ed25519 = "{key.public_key}"')
    typer.echo(f"tenants = {json.dumps(tenants)}  # whose adapters it may sign")


def digest(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the adapter in PEFT's format.")
    ],
) -> None:
    """Print the digest of a local adapter.

    Runs the store's checks first, except for unknown config keys, which the store's operator may
    allow.
    """
    typer.echo(compute_digest(folder))


def sign(
    what: Annotated[
        str,
        typer.Argument(
            metavar="DIR|DIGEST", help="Folder of the adapter in PEFT's format, or a digest."
        ),
    ],
    key: Annotated[Path, typer.Option(metavar="FILE", help="Private key, from `loadout keygen`.")],
    key_id: KeyId = "",
) -> None:
    """Sign an adapter.

    Prints one line; save it to a file for `loadout register --signature`.
    """
    if is_uri(what):
        raise CommandFailed(
            f"{what}: signing needs a local folder or its digest: sign the folder before you copy "
            "it there, or copy it to this machine first"
        )
    signing_key = SigningKey.load(key, key_id)
    value = what if re.match(r"sha256:", what) else compute_digest(Path(what))
    typer.echo(format_signature(signing_key.sign(value)))


def compute_digest(folder: Path) -> str:
    """Raises CommandFailed, and InvalidArgument for a folder that is no adapter."""
    return run_service_code("adapter_store", "digest", str(open_folder(folder).path))
