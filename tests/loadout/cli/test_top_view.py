"""What `loadout top` shows: bounded whatever there is, and right across restarts and deaths."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from loadout import types
from loadout.cli.top_view import MAX_RESIDENTS, Look, render
from loadout.errors import StreamLost
from loadout.prometheus import Metrics, parse, quantile

DEAD = StreamLost("Socket closed", code="UNAVAILABLE")
TIER = types.TierStatus(1, 2, 3, 3, 1, 0)
STORE = types.StoreStatus("0", 5, 100_000, 1, TIER, TIER, 7, 0)
PREFIX = "loadout_inference_"


def scraped(tokens: float, num_adapters: int = 2, observed: tuple[int, int] = (0, 0)) -> Metrics:
    """`observed`: of the first token, at most 10 ms and at most 100 ms."""
    lines = [
        f"{PREFIX}sampled_tokens_total {tokens}",
        f'{PREFIX}requests_total{{finish_reason="stop"}} {tokens / 10}',
        f'{PREFIX}tier_capacity_bytes{{tier="device"}} 4000',
        f'{PREFIX}tier_used_bytes{{tier="device"}} 1000',
        f'{PREFIX}tier_largest_free_bytes{{tier="device"}} 1500',
        f'{PREFIX}tier_images{{tier="device"}} {num_adapters}',
        f'{PREFIX}loads_in_progress{{state="pulling"}} 3',
        f'{PREFIX}store_replicas_healthy{{replica="a:1"}} 1',
        f'{PREFIX}store_replicas_healthy{{replica="b:1"}} 0',
        f"{PREFIX}store_connected 1",
        f'{PREFIX}first_token_seconds_bucket{{le="0.01"}} {observed[0]}',
        f'{PREFIX}first_token_seconds_bucket{{le="0.1"}} {observed[1]}',
        f'{PREFIX}first_token_seconds_bucket{{le="+Inf"}} {observed[1]}',
    ]
    for number in range(min(num_adapters, 52)):
        labels = f'{{adapter="t/a{number}"}}'
        lines.append(f"{PREFIX}adapter_requests_total{labels} {tokens * (number + 1)}")
        lines.append(f"{PREFIX}adapter_generated_tokens_total{labels} {tokens * (number + 1)}")
    return parse("\n".join(lines) + "\n")


def residents(count: int) -> tuple[types.ResidentAdapter, ...]:
    return tuple(
        types.ResidentAdapter(
            f"sha256:{number:064x}",
            (f"tenant/{'long-' * 20}{number}",),
            types.AdapterTier.HOST,
            1000,
            8,
            False,
            0,
            None,
            0.1,
        )
        for number in range(count)
    )


def shown(now: Look, before: Look | None = None, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(render(now, before))
    return out.getvalue()


def test_rates_quantiles_tiers_loads_replicas_and_the_busiest():
    before = Look(DEAD, (), scraped(100), STORE, 10.0)
    text = shown(Look(DEAD, (), scraped(300, observed=(50, 100)), STORE, 12.0), before)
    for part in (
        "10.0 requests/s, 100.0 tokens/s",
        "first token 10.0 ms / 98.2 ms",
        "tier device  1.0 kB of 4.0 kB  2 adapters",
        "50% fragmented",
        "loads     3 pulling",
        "store replicas  1 of 2 healthy; passed over: b:1",
        "100000 adapters",
        "no answer: Socket closed",
    ):
        assert part in text
    busiest = [line.split() for line in text.splitlines() if line.startswith("t/a")]
    assert busiest == [["t/a1", "200.0", "200.0"], ["t/a0", "100.0", "100.0"]]


@pytest.mark.parametrize("width", [20, 40, 160])
def test_many_adapters_and_narrow_terminals_stay_bounded(width):
    metrics = scraped(9, num_adapters=100_000)
    look = Look(DEAD, residents(MAX_RESIDENTS), metrics, STORE, 1.0)
    lines = shown(look, Look(DEAD, (), scraped(1), STORE, 0.0), width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 120
    assert any("99980 more" in line for line in lines)


def test_what_dies_or_restarts_in_between():
    alive = Look(DEAD, residents(1), scraped(300), STORE, 2.0)
    dead = Look(DEAD, DEAD, DEAD, DEAD, 3.0)
    assert shown(dead, alive).count("no answer: Socket closed") == 4
    assert "tokens/s" not in shown(alive, dead)
    # It began to count anew.
    assert " 0.0 tokens/s" in shown(Look(DEAD, (), scraped(5), STORE, 3.0), alive)


def test_quantiles():
    before, after = scraped(0), scraped(0, observed=(50, 100))
    name = f"{PREFIX}first_token_seconds"
    assert quantile(0.25, after, before, name) == pytest.approx(0.005)
    assert quantile(0.75, after, before, name) == pytest.approx(0.055)
    assert quantile(0.5, before, before, name) is None
    assert quantile(0.5, after, before, "nonsense") is None
