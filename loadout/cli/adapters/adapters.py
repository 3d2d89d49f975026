"""`loadout register` and `loadout adapters`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TransferSpeedColumn,
)

from loadout.cli import options
from loadout.cli.adapters.signing import compute_digest
from loadout.cli.adapters.tokenizer import describe_tokenizer, has_tokenizer
from loadout.cli.adapters.verdicts import (
    check_servable,
    print_verdicts,
    short_verdicts,
    wait_for_verdicts,
)
from loadout.cli.connection import Connection, connects
from loadout.cli.local.completion import AdapterName
from loadout.cli.output import new_table, number_ranges, print_json, table_console
from loadout.signing import SigningKey, parse_signature
from loadout.types import Adapter, Registration, Signature
from loadout.upload import is_uri, open_folder

REGISTER_EXAMPLES = """\b
Examples:
  loadout register french ./out/french
  loadout register acme/support s3://adapters/support --label team=cx --pin
  loadout register french file:///srv/adapters/french --if-current-digest sha256:...
  loadout register french ./out/french --require-servable
  loadout register french ./out/french --sign-key release-2026.pem
  loadout register french ./out/checkpoint-500 --keep 5
  loadout register trial ./out/trial --ephemeral --ttl 3600
"""

LIST_EXAMPLES = """\b
Examples:
  loadout adapters
  loadout adapters --filter "tenant=acme base_model=llama label.team=cx"
  loadout adapters --json | jq -r '.[].ref'
"""

BaseModel = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Base model of the adapter. Needed only if neither its config nor the connected"
        " servers show it.",
    ),
]
RequireServable = Annotated[
    bool,
    typer.Option(
        "--require-servable",
        help="Fail unless a connected server can serve the adapter, which stays registered "
        "in any case. A server that stopped a few seconds ago (half a minute with store"
        " replicas) still counts.",
    ),
]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of the base model, to compare its tokenizer with the adapter's. "
        "Default: the folder in the adapter's config, if it is on this machine.",
    ),
]
Description = Annotated[str, typer.Option(metavar="TEXT", help="Description of the adapter.")]
Labels = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label. You can repeat this option.")
]
SignatureFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File with the output of `loadout sign`.")
]
SignKeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Private key to sign the adapter with. For a URI, also give --expected-digest.",
    ),
]

Keep = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Number of versions to keep. Older ones are deleted, except the current one and"
        " pinned ones. Default: the number in the store's policy.",
    ),
]


MAX_SIGNATURE_BYTES = 4 << 10
"""The bytes that are read of a signature's file, which has one short line, and may be a pipe."""

Ephemeral = Annotated[
    bool,
    typer.Option(
        "--ephemeral",
        help="Keep the upload only in the store's memory, until it is deleted or the store stops.",
    ),
]
Ttl = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", min=1, help="Delete this version after this time. Default: never."
    ),
]


Source = Annotated[
    str,
    typer.Argument(
        metavar="URI|DIR",
        help="s3://bucket/prefix, hf://org/name, file:///path, or a local folder to upload.",
    ),
]
ExpectedDigest = Annotated[
    str, typer.Option(metavar="DIGEST", help="Fail unless the content has this digest.")
]
CurrentDigest = Annotated[
    str, typer.Option(metavar="DIGEST", help="Fail unless the name points to this digest now.")
]
Pin = Annotated[bool, typer.Option("--pin", help="Pin the adapter in the store's memory.")]


@connects
def register(
    name: AdapterName,
    source: Source,
    base_model: BaseModel = "",
    model: ModelFolder = None,
    expected_digest: ExpectedDigest = "",
    if_current_digest: CurrentDigest = "",
    pin: Pin = False,
    description: Description = "",
    label: Labels = None,
    signature: SignatureFile = None,
    sign_key: SignKeyFile = None,
    keep: Keep = None,
    ephemeral: Ephemeral = False,
    ttl: Ttl = None,
    require_servable: RequireServable = False,
    as_json: options.Json = False,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Register an adapter with the store.

    Returns when the adapter is stored durably and the store knows which servers can serve it.
    """
    labels = dict(_label(each) for each in label or ())
    _print_tokenizer(source, name, model, base_model)
    if sign_key is not None:
        expected_digest = expected_digest or _digest_to_sign(source)
    with connection.client(store=store) as client, _upload_bar() as show:
        result = client.register(
            name,
            source,
            base_model=base_model,
            expected_digest=expected_digest,
            if_current_digest=if_current_digest,
            pinned=pin,
            labels=labels,
            description=description,
            signature=_signature(signature, sign_key, expected_digest),
            keep=keep or 0,
            ttl=ttl,
            ephemeral=ephemeral,
            progress=show,
        )
        if not as_json:
            _print_registration(result)
        adapter = wait_for_verdicts(client, result.adapter, is_required=require_servable)
    _report(replace(result, adapter=adapter), as_json=as_json, require_servable=require_servable)


def _report(result: Registration, *, as_json: bool, require_servable: bool) -> None:
    if as_json:
        print_json(result)
    elif result.base_model_reason:  # a store of an earlier release says neither
        print_verdicts(result.adapter)
    if require_servable:
        check_servable(result.adapter)


def _print_tokenizer(source: str, name: str, model: Path | None, base_model: str) -> None:
    """Prints the unused files of a local folder, to stderr and before it is sent: it tells also why
    an adapter is refused. Raises InvalidArgument for a folder that is no adapter."""
    if is_uri(source):
        if model is not None:
            raise typer.BadParameter("needs a local folder to compare", param_hint="--model")
        return
    if model is not None and not has_tokenizer(model):
        raise typer.BadParameter(f"{model} has no tokenizer", param_hint="--model")
    line = describe_tokenizer(open_folder(source, name).path, model, base_model)
    if line:
        typer.echo(line, err=True)


def _print_registration(result: Registration) -> None:
    adapter = result.adapter
    typer.echo(f"{adapter.ref} rank {adapter.rank} {adapter.digest} at revision {result.revision}")
    if result.deleted_versions:
        typer.echo(f"older versions deleted: {number_ranges(result.deleted_versions)}")
    if result.base_model_reason:
        typer.echo(f"base model {adapter.base_model}: {result.base_model_reason}")
    own = {
        "tokenizer": adapter.tokenizer_digest,
        "chat template": adapter.chat_template_digest,
        "labels": adapter.class_labels,
    }
    if any(own.values()):
        typer.echo(f"the adapter's own: {', '.join(what for what, has in own.items() if has)}")
    if result.ignored_config_keys:
        keys = ", ".join(result.ignored_config_keys)
        typer.echo(f"unknown config keys that the operator allows: {keys}")
    for warning in result.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _digest_to_sign(source: str) -> str:
    """Returns the digest of a local folder; a URI's must be given."""
    if is_uri(source):
        raise typer.BadParameter("a URI needs --expected-digest", param_hint="--sign-key")
    return compute_digest(Path(source))


def _signature(file: Path | None, sign_key: Path | None, digest: str) -> Signature | None:
    if file is not None and sign_key is not None:
        raise typer.BadParameter("cannot be combined with --sign-key", param_hint="--signature")
    if file is not None:
        with file.open("rb") as opened:
            line = opened.read(MAX_SIGNATURE_BYTES)
        return parse_signature(line.decode(errors="replace"), str(file))
    return SigningKey.load(sign_key).sign(digest) if sign_key is not None else None


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--label")
    return key, value


@contextmanager
def _upload_bar() -> Iterator[Callable[[int, int], None]]:
    """Yields the function that shows a bar on stderr from the first uploaded bytes on, on a
    terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("uploading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("upload", total=None)

    def show(sent: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=sent, total=total)

    try:
        yield show
    finally:
        bar.stop()


@connects
def list_adapters(
    filter: Annotated[  # noqa: A002  the contract's word
        str,
        typer.Option(
            metavar="TERMS",
            help="List only adapters that match all terms: tenant=T base_model=B name=PREFIX "
            "label.KEY=VALUE.",
        ),
    ] = "",
    as_json: options.Json = False,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """List the adapters, and whether servers can serve them."""
    with connection.client(store=store) as client:
        adapters = list(client.list(filter))
    if as_json:
        print_json(adapters)
        return
    if not adapters:
        typer.echo("no adapters")
        return
    columns = ("adapter", "rank", "size", "base model", "targets", "servers", "pinned")
    table = new_table(*columns, right=("rank", "size"))
    for adapter in adapters:
        table.add_row(*_cells(adapter))
    table_console().print(table)


def _cells(adapter: Adapter) -> tuple[str, ...]:
    return (
        adapter.ref,
        str(adapter.rank),
        decimal(adapter.source_bytes),
        adapter.base_model,
        " ".join(adapter.targets),
        short_verdicts(adapter),
        "yes" if adapter.pinned else "",
    )
