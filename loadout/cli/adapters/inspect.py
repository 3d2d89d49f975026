"""`loadout inspect`: the contents of one resident adapter, and its work in a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from loadout.cli import options
from loadout.cli.adapters.residents import Targets
from loadout.cli.connection import Connection, connects
from loadout.cli.local.completion import resident_names
from loadout.cli.output import (
    new_table,
    number_ranges,
    print_json,
    split_layer,
    table_console,
    to_json,
)
from loadout.types import (
    AdapterTier,
    InspectedAdapter,
    OperationGroup,
    ResidentAdapter,
    ResidentTarget,
)

EXAMPLES = """\b
Examples:
  loadout inspect french
  loadout inspect french --json | jq '.[0].targets[] | {name, rank}'
"""

MAX_EXTENTS = 4
PLACES = {AdapterTier.DEVICE: "on the device", AdapterTier.HOST: "in host memory"}


@connects
def inspect(
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF",
            help="[tenant/]name[@version] or sha256:<hex>.",
            autocompletion=resident_names,
        ),
    ],
    every_replica: Annotated[
        bool,
        typer.Option(
            "--every-replica",
            help="Show it on every replica. Default: on the replica that gets its requests.",
        ),
    ] = False,
    as_json: options.Json = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    *,
    connection: Connection,
) -> None:
    """Show the modules of a resident adapter.

    Shows ranks and sizes of its modules, their places in the server's memory, and the operations of
    a decode step. Run `loadout load` first if the adapter is not resident. Needs the role operator.
    """
    found: list[tuple[str, InspectedAdapter]] = []
    at = Targets(inference, connection, every_replica=every_replica)
    for replica, client in at:
        with at.noting_failure(replica):
            found.append((replica, client.inspect(ref)))
    if as_json and (found or not at.failures):
        print_json([{"replica": replica, **to_json(each)} for replica, each in found])
    elif not as_json:
        for index, (replica, each) in enumerate(found):
            if index:
                typer.echo()
            _print(each, f"{replica}: " if every_replica else "")
    at.raise_failures()


def _print(inspected: InspectedAdapter, prefix: str) -> None:
    typer.echo(prefix + _summary(inspected.adapter))
    typer.echo(_place(inspected))
    console = table_console()
    if inspected.targets:
        typer.echo()
        console.print(_target_table(inspected.targets))
    if inspected.groups:
        typer.echo()
        console.print(_group_table(inspected.groups, _unit(inspected)))
    typer.echo()
    for line in _operations(inspected):
        typer.echo(line)


def _summary(adapter: ResidentAdapter) -> str:
    digest = f", {adapter.digest}" if adapter.names else ""
    return f"{adapter.label}: rank {adapter.rank}, {decimal(adapter.num_bytes)}{digest}"


def _place(inspected: InspectedAdapter) -> str:
    adapter, extents = inspected.adapter, inspected.extents
    text = f"{PLACES.get(adapter.tier, 'resident')}, slot {inspected.slot}"
    text += ", pinned" * adapter.pinned
    if not extents:
        return text
    ranges = [_range(each.offset, each.num_bytes) for each in extents[:MAX_EXTENTS]]
    more = f" and {len(extents) - MAX_EXTENTS} more" if len(extents) > MAX_EXTENTS else ""
    count = "1 extent" if len(extents) == 1 else f"{len(extents)} extents"
    return f"{text}, {count}: bytes {', '.join(ranges)}{more}"


def _range(offset: int, num_bytes: int) -> str:
    return f"{offset}-{offset + num_bytes - 1}"


def _target_table(targets: Iterable[ResidentTarget]) -> Table:
    """Returns a row for each kind of module: the layers where it has the same parts and rank, their
    bytes together, and where the first part begins. Other modules' parts lie between."""
    rows: dict[tuple[str, ...], list[ResidentTarget]] = {}
    for target in targets:
        holds = ", ".join(segment.kind.value for segment in target.segments)
        before, _, after = split_layer(target.name)
        rows.setdefault((before, after, target.kind.value, str(target.rank), holds), []).append(
            target
        )
    table = new_table(
        "layers",
        "module",
        "kind",
        "rank",
        "holds",
        "size",
        "from byte",
        right=("rank", "size", "from byte"),
    )
    for (_, module, *others), row in rows.items():
        segments = [segment for target in row for segment in target.segments]
        table.add_row(
            number_ranges([target.layer for target in row if target.layer is not None]),
            module,
            *others,
            decimal(sum(target.num_bytes for target in row)),
            str(min(each.offset for each in segments)) if segments else "",
        )
    return table


def _group_table(groups: Iterable[OperationGroup], unit: str) -> Table:
    """Returns a row for each kind of group: the layers where a step does the same for it."""
    rows: dict[tuple[Any, ...], list[tuple[int | None, OperationGroup]]] = {}
    for group in groups:
        _, layer, name = split_layer(group.name)
        modules = tuple(target.rpartition(".")[2] for target in group.targets)
        rows.setdefault((name, modules, group.launches), []).append((layer, group))
    table = new_table("layers", "group", "its modules", unit, right=(unit,))
    for (name, modules, _), row in rows.items():
        layers = [layer for layer, _ in row if layer is not None]
        launches = sum(group.launches for _, group in row)
        table.add_row(number_ranges(layers), name, ", ".join(modules) or "none", str(launches))
    return table


def _unit(inspected: InspectedAdapter) -> str:
    """Returns the counted unit: a CPU runs operations, a device launches kernels."""
    return "launches" if inspected.kernels.startswith("triton") else "operations"


def _operations(inspected: InspectedAdapter) -> Sequence[str]:
    groups, unit = inspected.groups, _unit(inspected)
    step = f"{inspected.launches} {unit} per decode step of its requests alone"
    lines = [f"{len(groups)} groups, {step} ({inspected.kernels})"]
    if inspected.adapter.tier is AdapterTier.HOST:
        lines[0] += ", once it is on the device"
    idle = [group for group in groups if not group.targets]
    if idle:
        launches = sum(group.launches for group in idle)
        lines.append(
            f"{len(idle)} of these groups, {launches} {unit}, change nothing: they run because a "
            "step serves any mix of adapters"
        )
    return lines
