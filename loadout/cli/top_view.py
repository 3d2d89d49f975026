"""What `loadout top` shows of one look at the system, and of what has happened since the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from loadout.cli.top_rates import Rates
from loadout.errors import LoadoutError
from loadout.prometheus import Metrics
from loadout.types import ResidentAdapter, ServerInfo, StoreStatus, TierStatus

MAX_RESIDENTS = 500
"""Asked for; how many there are in all, the metrics say."""
MAX_ROWS = 20
MAX_BUSIEST = 10
MAX_REPLICAS = 16
HOST_MEMORY = ("host_tier", "process", "frontend")
"""What lies on the host also when a GPU computes."""
PREFIX = "loadout_inference_"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the system; what did not answer is an error in its place. `at_s` is of the
    monotonic clock."""

    server: ServerInfo | LoadoutError
    residents: tuple[ResidentAdapter, ...] | LoadoutError
    metrics: Metrics | LoadoutError
    store: StoreStatus | LoadoutError
    at_s: float

    @property
    def parts(self) -> tuple[object, ...]:
        return (self.server, self.residents, self.metrics, self.store)


def render(now: Look, before: Look | None = None) -> RenderableType:
    rates = None
    earlier = None if before is None else before.metrics
    if before is not None and isinstance(now.metrics, Metrics) and isinstance(earlier, Metrics):
        rates = Rates(now.metrics, earlier, now.at_s - before.at_s)
    return Group(
        _draw(now.server, _server),
        _draw(now.metrics, lambda metrics: _traffic(metrics, rates)),
        _draw(now.residents, lambda residents: _residents(residents, now.metrics)),
        _draw(now.store, _store),
    )


def _draw(part: T | LoadoutError, draw: Callable[[T], RenderableType]) -> RenderableType:
    if isinstance(part, LoadoutError):
        return Text(f"no answer: {part}\n", style="red")
    return draw(part)


def _plain_table() -> Table:
    return Table(box=None, pad_edge=False, show_header=False)


def _server(server: ServerInfo) -> RenderableType:
    layout = "" if server.layout_id else "  layout not yet accepted by the store"
    where = " with ".join(filter(None, (server.device, server.kernels)))
    title = Text(f"{server.base_model}  {server.dtype} on {where}{layout}", style="bold")
    table = _plain_table()
    for use in server.memory:
        share = use.used_bytes / use.capacity_bytes if use.capacity_bytes else 0.0
        table.add_row(
            use.name, f"{decimal(use.used_bytes)} of {decimal(use.capacity_bytes)}", f"{share:.0%}"
        )
    if limit_bytes := server.limits.memory_bytes:
        is_cpu = server.device == "cpu"
        counted = [use for use in server.memory if is_cpu or use.name not in HOST_MEMORY]
        total_bytes = sum(use.capacity_bytes for use in counted)
        table.add_row(
            "total",
            f"{decimal(total_bytes)} of at most {decimal(limit_bytes)}",
            f"{total_bytes / limit_bytes:.0%}",
        )
    return Group(title, table)


def _traffic(metrics: Metrics, rates: Rates | None) -> RenderableType:
    running = metrics.sum("vllm:num_requests_running")
    waiting = metrics.sum("vllm:num_requests_waiting")
    parked = metrics.sum(f"{PREFIX}requests_waiting_for_adapter")
    for_adapter = f", {parked:.0f} of them for their adapter" if parked else ""
    lines = [f"requests  {running:.0f} running, {waiting:.0f} waiting{for_adapter}"]
    if rates is not None:
        lines += rates.lines()
    loads = {
        sample.labels.get("state", ""): sample.value
        for sample in metrics.select(f"{PREFIX}loads_in_progress")
    }
    coming = ", ".join(f"{count:.0f} {state}" for state, count in loads.items() if count)
    lines.append(f"loads     {coming or 'none in progress'}")
    parts: list[RenderableType] = [Text("\n".join(lines)), _tiers(metrics)]
    if replicas := _replicas(metrics):
        parts.append(replicas)
    busiest = rates.busiest(MAX_BUSIEST) if rates is not None else []
    if busiest:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("busiest adapter", overflow="ellipsis", no_wrap=True)
        for column in ("requests/s", "tokens/s"):
            table.add_column(column, justify="right")
        for name, requests, tokens in busiest:
            table.add_row(name, f"{requests:.1f}", f"{tokens:.1f}")
        parts.append(table)
    return Group(*parts, Text(""))


def _tiers(metrics: Metrics) -> RenderableType:
    table = _plain_table()
    for sample in metrics.select(f"{PREFIX}tier_capacity_bytes"):
        tier = sample.labels.get("tier", "")

        def of(name: str, tier: str = tier) -> float:
            return metrics.sum(f"{PREFIX}tier_{name}", tier=tier)

        looked_up = of("hits_total") + of("misses_total")
        free_bytes = sample.value - of("used_bytes")
        fragmented = 1 - of("largest_free_bytes") / free_bytes if free_bytes > 0 else 0.0
        table.add_row(
            f"tier {tier}",
            f"{decimal(int(of('used_bytes')))} of {decimal(int(sample.value))}",
            f"{of('images'):.0f} adapters",
            f"{decimal(int(of('pinned_bytes')))} pinned",
            f"hit rate {of('hits_total') / looked_up:.0%}" if looked_up else "no look-ups",
            f"{of('evictions_total'):.0f} evictions",
            f"{fragmented:.0%} fragmented",
        )
    return table


def _replicas(metrics: Metrics) -> Text | None:
    found = metrics.select(f"{PREFIX}store_replicas_healthy")
    if not found:
        return None
    out = sorted(each.labels.get("replica", "") for each in found if not each.value)
    shown = ", ".join(out[:MAX_REPLICAS]) + (" and more" if len(out) > MAX_REPLICAS else "")
    watch = "" if metrics.sum(f"{PREFIX}store_connected") else ", watch lost"
    text = f"store replicas  {len(found) - len(out)} of {len(found)} healthy{watch}"
    return Text(f"{text}{f'; passed over: {shown}' if out else ''}", style="red" if out else "")


def _residents(
    residents: tuple[ResidentAdapter, ...], metrics: Metrics | LoadoutError
) -> RenderableType:
    if not residents:
        return Text("no adapter is resident\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("resident adapter", "tier", "rank", "size", "requests", "idle", "pinned"):
        right = column in ("rank", "size", "requests", "idle")
        table.add_column(
            column, justify="right" if right else "left", overflow="ellipsis", no_wrap=True
        )
    busiest = sorted(residents, key=lambda each: (-each.running_requests, _idle_s(each)))
    for each in busiest[:MAX_ROWS]:
        table.add_row(
            ", ".join(each.names) or each.digest[:19],
            each.tier.value,
            str(each.rank),
            decimal(each.num_bytes),
            str(each.running_requests),
            f"{_idle_s(each):.0f} s",
            "yes" if each.pinned else "",
        )
    in_tiers = 0 if isinstance(metrics, LoadoutError) else metrics.sum(f"{PREFIX}tier_images")
    hidden = max(len(residents), int(in_tiers)) - min(len(residents), MAX_ROWS)
    return Group(table, Text(f"and {hidden} more" if hidden > 0 else ""))


def _idle_s(resident: ResidentAdapter) -> float:
    if resident.last_used_time is None or resident.running_requests:
        return 0.0
    return max(0.0, (datetime.now(UTC) - resident.last_used_time).total_seconds())


def _store(store: StoreStatus) -> RenderableType:
    title = Text(
        f"store  {store.adapters} adapters, {store.layouts} layouts, revision {store.revision}, "
        f"{store.active_pulls} pulls, blobs {decimal(store.blob_bytes)}",
        style="bold",
    )
    table = _plain_table()
    table.add_row("memory", *_tier(store.memory))
    table.add_row("disk", *_tier(store.disk))
    return Group(title, table)


def _tier(tier: TierStatus) -> tuple[str, ...]:
    looked_up = tier.hits + tier.misses
    return (
        f"{decimal(tier.used_bytes)} of {decimal(tier.capacity_bytes)}",
        f"{tier.images} images",
        f"hit rate {tier.hits / looked_up:.0%}" if looked_up else "no look-ups",
        f"{tier.evictions} evictions",
    )
