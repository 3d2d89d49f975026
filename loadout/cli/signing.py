"""`loadout keygen`, `loadout digest` and `loadout sign`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from loadout.cli.failure import CommandFailed
from loadout.signing import SigningKey, format_signature

KEYGEN_EXAMPLES = """\b
Examples:
  loadout keygen release-2026.pem
  loadout keygen /keys/release-2026.pem >> policy.toml
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
    typer.Option(metavar="NAME", help="The key's name in the store's policy, if not the file's."),
]


def keygen(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where to keep the private key, named for it.")
    ],
) -> None:
    """Make a key to sign adapters with.

    Prints what the store's policy file needs in order to trust it; the private key is not shown.
    """
    try:
        key = SigningKey.create(file)
    except FileExistsError as error:
        raise CommandFailed(f"{file} exists: a key is never written over") from error
    # A name with a dot in it would be two tables of TOML.
    typer.echo(f'[keys."{key.key_id}"]')
    typer.echo(f'ed25519 = "{key.public_key}"')
    typer.echo('tenants = ["default"]  # whose adapters it may sign; "*" for all')


def digest(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder as PEFT saves one.")],
) -> None:
    """Print the digest that a store gives to an adapter.

    It is computed here, from the files, after the same checks.
    """
    typer.echo(compute_digest(folder))


def sign(
    what: Annotated[
        str, typer.Argument(metavar="DIR|DIGEST", help="A folder as PEFT saves one, or a digest.")
    ],
    key: Annotated[Path, typer.Option(metavar="FILE", help="The private key, from keygen.")],
    key_id: KeyId = "",
) -> None:
    """Sign an adapter.

    Prints one line, which `loadout register --signature` reads from a file.
    """
    signing_key = SigningKey.load(key, key_id)
    value = what if re.match(r"sha256:", what) else compute_digest(Path(what))
    typer.echo(format_signature(signing_key.sign(value)))


def compute_digest(folder: Path) -> str:
    """Asks the store's own code, in a process of its own. Raises CommandFailed."""
    done = subprocess.run(
        [sys.executable, "-m", "adapter_store", "digest", str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise CommandFailed(lines[-1])
    return done.stdout.strip()
