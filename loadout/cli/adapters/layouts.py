"""`loadout layouts`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer
from rich.filesize import decimal

from loadout.cli import options
from loadout.cli.connection import Connection, connects
from loadout.cli.output import CommandFailed, new_table, print_json, table_console
from loadout.types import Layout

SHOWN_CHARS = 12
"""How much of an id is shown; `--forget` takes as much as tells it from others."""

EXAMPLES = """\b
Examples:
  loadout layouts
  loadout layouts --forget 4b6b58a697e1
"""


@connects
def layouts(
    forget: Annotated[
        str, typer.Option(metavar="ID", help="Forget this layout and remove its images.")
    ] = "",
    as_json: options.Json = False,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """List the layouts of base models, or forget one.

    A layout describes a base model as some servers compute it; adapters are compiled for each
    layout. A connected server registers its layout again. Needs the role admin or server; to forget
    a layout, admin for all tenants.
    """
    with connection.client(store=store) as client:
        known = list(client.layouts())
        if forget:
            layout = _find(known, forget)
            num_images = client.forget_layout(layout.layout_id)
            typer.echo(f"{layout.layout_id} forgotten, with {num_images} images")
            return
    if as_json:
        print_json(known)
        return
    if not known:
        typer.echo("no layouts")
        return
    columns = ("layout", "base model", "aliases", "servers", "images", "size", "last used")
    table = new_table(*columns, right=("images", "size"))
    for layout in known:
        table.add_row(*_cells(layout))
    table_console().print(table)


def _find(known: list[Layout], text: str) -> Layout:
    """Returns the layout with this id, or beginning of it. Raises CommandFailed."""
    start = text.removeprefix("sha256:")
    found = [each for each in known if _hex(each).startswith(start)] if start else []
    if len(found) != 1:
        what = "no layout has" if not found else f"{len(found)} layouts have ids that begin with"
        raise CommandFailed(f"{what} {text}: see `loadout layouts`")
    return found[0]


def _cells(layout: Layout) -> tuple[str, ...]:
    return (
        _hex(layout)[:SHOWN_CHARS],
        " ".join((layout.base_model, *layout.other_base_models)),
        " ".join(layout.aliases),
        ", ".join(f"ranks up to {rank}" if rank else "any rank" for rank in layout.max_ranks)
        or "none",
        str(layout.images),
        decimal(layout.image_bytes),
        _day(layout.last_use_time),
    )


def _hex(layout: Layout) -> str:
    return layout.layout_id.removeprefix("sha256:")


def _day(time: datetime | None) -> str:
    return f"{time:%Y-%m-%d %H:%M}" if time else ""
