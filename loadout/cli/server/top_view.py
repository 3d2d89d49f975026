"""How `loadout top` is drawn: panels with bars, as wide and as high as the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich import box
from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    JustifyMethod,
    RenderableType,
    RenderResult,
)
from rich.filesize import decimal
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from loadout.cli.output import error_text
from loadout.cli.server.info import rank_name
from loadout.cli.server.top_overview import AdapterRates, Overview, Tier, Traffic, idle_s
from loadout.errors import LoadoutError
from loadout.types import (
    AdapterTier,
    MemoryUse,
    RankStatus,
    ResidentAdapter,
    ServerInfo,
    StoreStatus,
    TierStatus,
)

T = TypeVar("T")

MAX_RESIDENTS = 500
"""Most residents to read; the metrics have their number."""
MAX_ROWS = 20
"""Most adapters to show where the height is not limited."""
MIN_ROWS = 3
MAX_REPLICAS = 16
MAX_HISTORY = 120
WIDE = 120
"""Columns from which on panels stand side by side."""
ALL_COLUMNS = 90
"""Columns from which on the table of adapters has all of its own."""
HOST_MEMORY = ("host_tier", "routed_experts", "process", "frontend")
"""Memory that lies on the host also when a GPU computes."""
FIXED_MEMORY = ("weights", "workspace", "arena", "host_tier", "process", "frontend")
"""Memory that is meant to be full."""
WIDE_BAR, NARROW_BAR = 24, 14
DISPENSABLE = ("tiers", "latency", "store", "ranks", "memory")
"""Panels in the order in which a low terminal does without them."""
EIGHTHS = " ▏▎▍▌▋▊▉"
SPARKS = "▁▂▃▄▅▆▇█"
GOOD, BUSY, BAD, FIXED, DIM = "green", "yellow", "red", "cyan", "bright_black"
TIER_STYLES = {AdapterTier.DEVICE: GOOD, AdapterTier.HOST: "blue"}


@dataclass
class View:
    """Draws overviews; keeps tokens per second of the last ones."""

    replica: str = ""
    tokens: list[float] = field(default_factory=list)

    def update(self, now: Overview) -> Screen:
        if not isinstance(now.traffic, LoadoutError) and now.traffic.rates:
            self.tokens.append(now.traffic.rates["tokens_per_second"])
            del self.tokens[:-MAX_HISTORY]
        return Screen(now, self.replica, tuple(self.tokens))


@dataclass(frozen=True)
class Screen:
    """One drawing, as wide as the console that it is printed on. `fills` limits it to the console's
    height by fewer adapters, then by fewer panels; otherwise it is as long as it needs to be."""

    now: Overview
    replica: str = ""
    tokens: Sequence[float] = ()
    fills: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or options.size.height
        panels = self._panels(width)
        if not self.fills:
            yield from self._arranged(panels, MAX_ROWS, width)
            return
        free = options.update(height=None)
        for name in (*DISPENSABLE, ""):
            parts = self._arranged(panels, 0, width)
            num_rows = height - sum(len(console.render_lines(part, free)) for part in parts) - 1
            if num_rows >= MIN_ROWS or not name:
                break
            panels.pop(name, None)
        yield from self._arranged(panels, max(MIN_ROWS, num_rows), width)

    def _arranged(
        self, panels: Mapping[str, RenderableType], num_rows: int, width: int
    ) -> Iterator[RenderableType]:
        """Yields the title and the panels, in two columns where the console is wide enough."""
        now = self.now
        yield _title(now, self.replica)
        upper = [panel for name, panel in panels.items() if name != "store"]
        if width < WIDE:
            yield from upper
        else:
            grid = Table.grid(expand=True)
            grid.add_column(ratio=1)
            grid.add_column(ratio=1)
            for index in range(0, len(upper), 2):
                grid.add_row(*upper[index : index + 2])
            yield grid
        yield _panel(
            "adapters",
            now.residents,
            lambda residents: _adapters(residents, now.traffic, num_rows, width),
        )
        if "store" in panels:
            yield panels["store"]

    def _panels(self, width: int) -> dict[str, RenderableType]:
        now = self.now
        length = WIDE_BAR if width < WIDE or width >= 140 else NARROW_BAR
        panels = {
            "traffic": _panel(
                "traffic", now.traffic, lambda each: _traffic(each, now.server, self.tokens, length)
            ),
            "latency": _panel("latency", now.traffic, _latency),
            "memory": _panel("memory", now.server, lambda server: _memory(server, length)),
            "tiers": _panel("adapter tiers", now.traffic, lambda each: _tiers(each, length)),
            "store": _panel("store", now.store, lambda store: _store(store, now.traffic)),
        }
        if isinstance(now.server, ServerInfo) and (ranks := now.server.ranks):
            panels["ranks"] = _panel("ranks", ranks, lambda each: _ranks(each, now.traffic, length))
        if isinstance(now.traffic, LoadoutError):
            del panels["latency"], panels["tiers"]  # one error of the metrics is enough
        return panels


def _panel(
    title: str, part: T | LoadoutError, draw: Callable[[T], RenderableType]
) -> RenderableType:
    body: RenderableType
    if isinstance(part, LoadoutError):
        body = Text(f"no answer: {error_text(part)}", style=f"bold {BAD}")
    else:
        body = draw(part)
    style = BAD if isinstance(part, LoadoutError) else DIM
    return Panel(
        body,
        title=f"[bold]{title}",
        title_align="left",
        border_style=style,
        box=box.ROUNDED,
        padding=(0, 1),
    )


def _title(now: Overview, replica: str) -> RenderableType:
    left = Text("loadout top", style="bold")
    if isinstance(now.server, ServerInfo):
        server = now.server
        device = " with ".join(filter(None, (server.device, server.kernels)))
        left.append(f"  {server.base_model}", style=f"bold {FIXED}")
        left.append(f"  {server.dtype} on {device}", style="default")
        if server.machine:
            left.append(f"  {server.machine}", style=DIM)
        if not server.layout_id:
            left.append("  layout not yet accepted by the store", style=f"bold {BAD}")
    right = Text("  ".join(filter(None, (replica, f"{now.time.astimezone():%H:%M:%S}"))), style=DIM)
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1, overflow="ellipsis", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True, overflow="ellipsis")
    grid.add_row(left, right)
    return grid


def bar(share: float, style: str, width: int = WIDE_BAR) -> Text:
    """Returns a bar in eighths of a column; any share above 0 is visible."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (EIGHTHS[rest] if rest else "")
    return Text.assemble((filled, style), ("·" * (width - len(filled)), DIM))


def load_style(share: float) -> str:
    return BAD if share >= 0.95 else BUSY if share >= 0.8 else GOOD


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns the last values as a line of blocks, as high as their share of the highest."""
    shown = list(values)[-width:]
    highest = max(shown, default=0.0)
    if highest <= 0:
        return SPARKS[0] * len(shown)
    return "".join(SPARKS[min(7, int(value / highest * 7.999))] for value in shown)


def _grid(*justify: JustifyMethod) -> Table:
    """Returns a grid in which only the last column gives way."""
    grid = Table.grid(padding=(0, 2), expand=True)
    for each in justify:
        grid.add_column(justify=each, no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    return grid


def _traffic(
    traffic: Traffic, server: ServerInfo | LoadoutError, tokens: Sequence[float], length: int
) -> RenderableType:
    grid = _grid("left", "left")
    limits = None if isinstance(server, LoadoutError) else server.limits
    for name, count, most in (
        ("running", traffic.running, limits.max_sequences if limits else 0),
        ("waiting", traffic.waiting, limits.max_queue if limits else 0),
    ):
        share = count / most if most else 0.0
        text = Text.assemble((f"{count}", "bold"), (f" of {most}" if most else "", DIM))
        if name == "waiting" and traffic.waiting_for_adapter:
            text.append(f", {traffic.waiting_for_adapter} for their adapter", style=BUSY)
        grid.add_row(name, bar(share, load_style(share), length), text)
    if states := traffic.states:
        share = states.used / states.capacity
        held = Text.assemble((f"{states.used}", "bold"), (f" of {states.capacity} held", DIM))
        grid.add_row("states", bar(share, load_style(share), length), held)
        grid.add_row("", "", Text(f"{states.stored} match a prefix", style=DIM))
    if traffic.rates:
        for row in _rate_rows(traffic.rates, tokens, length):
            grid.add_row(*row)
    loads = ", ".join(f"{count} {state}" for state, count in traffic.loads.items())
    grid.add_row("loads", Text(loads or "none in progress", style=BUSY if loads else DIM), "")
    return grid


def _rate_rows(
    rates: Mapping[str, float], tokens: Sequence[float], length: int
) -> Iterator[tuple[RenderableType, ...]]:
    def failures(name: str, word: str) -> Text:
        rate = rates[name]
        return Text(f"{rate:,.1f} {word}/s", style=f"bold {BAD}" if rate else DIM)

    yield (
        "tokens",
        Text(sparkline(tokens, length), style=FIXED),
        Text(f"{rates['tokens_per_second']:,.1f} tokens/s", style="bold"),
    )
    yield "", "", Text(f"{rates['prompt_tokens_per_second']:,.1f} prompt tokens/s")
    yield (
        "requests",
        Text(f"{rates['requests_per_second']:,.1f} requests/s", style="bold"),
        failures("rejections_per_second", "refused"),
    )
    pulled = decimal(int(rates["pulled_bytes_per_second"]))
    yield (
        "pulls",
        f"{rates['pulls_per_second']:,.1f}/s, {pulled}/s",
        failures("pull_failures_per_second", "failed"),
    )


def _latency(traffic: Traffic) -> RenderableType:
    if not traffic.latencies:
        return Text("no request since the last sample", style=DIM)
    longest = max(each.p99 for each in traffic.latencies.values())
    grid = _grid("left", "right", "right")
    grid.add_row("", Text("p50", style=DIM), Text("p99", style=DIM), "")
    for name, each in traffic.latencies.items():
        label = name.removesuffix("_seconds").replace("_", " ")
        share = each.p99 / longest if longest else 0.0
        p50, p99 = (Text(f"{value * 1000:,.1f} ms", style="bold") for value in (each.p50, each.p99))
        grid.add_row(label, p50, p99, bar(share, FIXED, NARROW_BAR))
    return grid


def _memory(server: ServerInfo, length: int) -> RenderableType:
    grid = _grid("left", "left", "right")
    for use in server.memory:
        share = use.used_bytes / use.capacity_bytes if use.capacity_bytes else 0.0
        style = FIXED if use.name in FIXED_MEMORY else load_style(share)
        text = f"{decimal(use.used_bytes)} of {decimal(use.capacity_bytes)}"
        grid.add_row(use.name.replace("_", " "), bar(share, style, length), f"{share:.0%}", text)
    if limit_bytes := server.limits.memory_bytes:
        total_bytes = sum(each.capacity_bytes for each in _on_device(server))
        share = total_bytes / limit_bytes
        text = f"{decimal(total_bytes)} of at most {decimal(limit_bytes)}"
        total = Text("total", style="bold")
        grid.add_row(total, bar(share, FIXED, length), f"{share:.0%}", Text(text, style="bold"))
    return grid


def _ranks(
    ranks: Sequence[RankStatus], traffic: Traffic | LoadoutError, length: int
) -> RenderableType:
    """Draws the share of a step that each rank computes; in the rest it waits for others."""
    rates = {} if isinstance(traffic, LoadoutError) else traffic.ranks
    grid = _grid("left", "left", "right")
    for each in ranks:
        found, share = rates.get(str(each.index)), 0.0
        text = Text("" if each.answers else "does not answer, ", style=f"bold {BAD}")
        text.append(decimal(each.resident_bytes), style="default")
        if found is not None:
            share = found.computing_s / ((found.computing_s + found.waiting_s) or 1.0)
            times = f"{found.computing_s * 1000:,.1f} ms + {found.waiting_s * 1000:,.1f} ms waiting"
            text.append(f", {times}", style=DIM)
        if each.running_pulls:
            text.append(f", {each.running_pulls} pulls", style=BUSY)
        grid.add_row(rank_name(each, ranks), bar(share, FIXED, length), f"{share:.0%}", text)
    return grid


def _on_device(server: ServerInfo) -> list[MemoryUse]:
    is_cpu = server.device == "cpu"
    return [each for each in server.memory if is_cpu or each.name not in HOST_MEMORY]


def _tiers(traffic: Traffic, length: int) -> RenderableType:
    grid = _grid("left", "left", "right")
    for name, tier in traffic.tiers.items():
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        used = f"{decimal(tier.used_bytes)} of {decimal(tier.capacity_bytes)}"
        grid.add_row(Text(name, style="bold"), bar(share, FIXED, length), f"{share:.0%}", used)
        for row in _tier_rows(tier):
            grid.add_row("", *row)
    return grid


def _tier_rows(tier: Tier) -> Iterator[tuple[RenderableType, ...]]:
    rate = tier.hit_rate
    style = DIM if rate is None else GOOD if rate >= 0.9 else BUSY if rate >= 0.5 else BAD
    hits = "no lookups" if rate is None else f"hit rate {rate:.0%}"
    yield Text(f"{tier.adapters} adapters"), "", Text(hits, style=style)
    pinned = f"{decimal(tier.pinned_bytes)} pinned"
    yield Text(pinned, style=DIM), "", Text(f"{tier.fragmented:.0%} fragmented", style=DIM)


def _adapters(
    residents: Sequence[ResidentAdapter],
    traffic: Traffic | LoadoutError,
    num_rows: int,
    width: int,
) -> RenderableType:
    """Draws the adapters, the busiest first."""
    rates = {} if isinstance(traffic, LoadoutError) else traffic.adapters
    rows = sorted(_join(residents, rates), key=lambda row: row.order)
    if not rows:
        return Text("no adapter is resident", style=DIM)
    numbers = ("rank", "size", "running", "requests/s", "tokens/s", "idle")
    columns: Sequence[str] = ("adapter", "tier", *numbers, "")
    if width < ALL_COLUMNS:
        columns = ("adapter", "tier", "running", "tokens/s")
    table = Table(box=None, pad_edge=False, header_style=f"bold {DIM}", expand=True)
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in numbers else "left",
            overflow="ellipsis",
            no_wrap=True,
            ratio=1 if column == "adapter" else None,
        )
    for row in rows[:num_rows]:
        cells = row.cells()
        table.add_row(*(cells[name] for name in columns), style="" if row.is_busy else DIM)
    in_tiers = 0
    if not isinstance(traffic, LoadoutError):
        in_tiers = sum(each.adapters for each in traffic.tiers.values())
    hidden = max(len(rows), in_tiers) - min(len(rows), num_rows)
    more = Text(f"and {hidden} more", style=DIM)
    return Group(table, *([more] if hidden > 0 else []))


@dataclass(frozen=True, slots=True)
class Row:
    """An adapter that is resident, or has had requests since the last sample."""

    name: str
    resident: ResidentAdapter | None
    requests: float = 0.0
    tokens: float = 0.0

    @property
    def is_busy(self) -> bool:
        return bool(self.requests or (self.resident and self.resident.running_requests))

    @property
    def order(self) -> tuple[float, ...]:
        if self.resident is None:
            return (0, -self.tokens, 0)
        return (-self.resident.running_requests, -self.tokens, idle_s(self.resident))

    def cells(self) -> dict[str, Text]:
        cells = {
            "adapter": Text(self.name),
            "tier": Text("○ none", style=DIM),
            "requests/s": Text(f"{self.requests:,.1f}"),
            "tokens/s": Text(f"{self.tokens:,.1f}", style="bold" if self.tokens else ""),
        }
        for name in ("rank", "size", "running", "idle", ""):
            cells[name] = Text("")
        if (resident := self.resident) is not None:
            running = resident.running_requests
            style = TIER_STYLES.get(resident.tier, DIM)
            cells |= {
                "tier": Text(f"● {resident.tier.value}", style=style),
                "rank": Text(str(resident.rank)),
                "size": Text(decimal(resident.num_bytes)),
                "running": Text(str(running), style=f"bold {GOOD}" if running else DIM),
                "idle": Text(f"{idle_s(resident):,.0f} s"),
                "": Text(resident.notes, style=BAD if resident.not_finite_requests else BUSY),
            }
        return cells


def _join(residents: Sequence[ResidentAdapter], rates: Mapping[str, AdapterRates]) -> Iterator[Row]:
    """Yields a row per resident, with the rates of its names, which metrics have without versions,
    and one per other adapter that has rates. A superseded one's are its successor's."""
    left = dict(rates)
    for each in residents:
        refs = () if each.superseded else each.names
        names = {name for ref in refs for name in (ref, ref.partition("@")[0])}
        found = [left.pop(name) for name in names if name in left]
        yield Row(
            each.label,
            each,
            sum(each.requests_per_second for each in found),
            sum(each.tokens_per_second for each in found),
        )
    for name, other in left.items():
        yield Row(name, None, other.requests_per_second, other.tokens_per_second)


def _store(store: StoreStatus, traffic: Traffic | LoadoutError) -> RenderableType:
    facts = (
        f"{store.adapters:,} adapters, {store.layouts} layouts, revision {store.revision}, "
        f"{store.active_pulls} pulls, blobs {decimal(store.blob_bytes)}"
    )
    grid = _grid("left", "left", "right")
    for name, tier in (("memory", store.memory), ("disk", store.disk)):
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        grid.add_row(name, bar(share, FIXED), f"{share:.0%}", _store_tier(tier))
    parts: list[RenderableType] = [Text(facts), grid]
    if not isinstance(traffic, LoadoutError) and traffic.store_replicas:
        parts.append(_store_replicas(traffic))
    return Group(*parts)


def _store_tier(tier: TierStatus) -> str:
    lookups = tier.hits + tier.misses
    hits = f"hit rate {tier.hits / lookups:.0%}" if lookups else "no lookups"
    used = f"{decimal(tier.used_bytes)} of {decimal(tier.capacity_bytes)}"
    return f"{used}, {tier.images} images, {hits}, {tier.evictions} evictions"


def _store_replicas(traffic: Traffic) -> Text:
    unhealthy = sorted(name for name, healthy in traffic.store_replicas.items() if not healthy)
    total = len(traffic.store_replicas)
    text = f"replicas {total - len(unhealthy)} of {total} healthy"
    if not traffic.is_watching:
        text += ", watch lost"
    if unhealthy:
        more = " and more" if len(unhealthy) > MAX_REPLICAS else ""
        text += f"; unhealthy: {', '.join(unhealthy[:MAX_REPLICAS])}{more}"
    is_bad = bool(unhealthy) or not traffic.is_watching
    return Text(text, style=f"bold {BAD}" if is_bad else GOOD)
