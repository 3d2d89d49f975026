"""What `loadout top` shows: bounded whatever there is, and right across restarts and deaths."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from loadout import types
from loadout.cli.output import to_json
from loadout.cli.server.top_overview import Sample, overview
from loadout.cli.server.top_view import MAX_RESIDENTS, SPARKS, View, bar, sparkline
from loadout.errors import StreamLost
from loadout.prometheus import Metrics, parse, quantile
from tests.support.loadout.server_info import SERVER

DEAD = StreamLost("Socket closed", code="UNAVAILABLE")
TIER = types.TierStatus(1, 2, 3, 3, 1, 0)
STORE = types.StoreStatus("0", 5, 100_000, 1, TIER, TIER, 7, 0)
PREFIX = "loadout_inference_"


def scraped(tokens: float, num_adapters: int = 2, observed: tuple[int, int] = (0, 0)) -> Metrics:
    """`observed`: numbers of first tokens within 10 ms and within 100 ms."""
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
        "vllm:num_requests_running 2",
        "vllm:num_requests_waiting 4",
        f"{PREFIX}requests_waiting_for_adapter 3",
    ]
    for number in range(min(num_adapters, 52)):
        labels = f'{{adapter="t/a{number}"}}'
        lines.append(f"{PREFIX}adapter_requests_total{labels} {tokens * (number + 1)}")
        lines.append(f"{PREFIX}adapter_generated_tokens_total{labels} {tokens * (number + 1)}")
    return parse("\n".join(lines) + "\n")


def resident(number: int, name: str = "") -> types.ResidentAdapter:
    name = name or f"tenant/{'long-' * 20}{number}"
    tier = types.AdapterTier.HOST
    return types.ResidentAdapter(
        f"sha256:{number:064x}", (name,), tier, 1000, 8, False, 0, None, 0.1
    )


def residents(count: int) -> tuple[types.ResidentAdapter, ...]:
    return tuple(map(resident, range(count)))


def shown(
    now: Sample, before: Sample | None = None, width: int = 160, height: int | None = None
) -> str:
    out = io.StringIO()
    screen = View("a:1").update(overview(now, before))
    console = Console(file=out, width=width, highlight=False)
    if height is not None:
        screen = dataclasses.replace(screen, fills=True)
        lines = console.render_lines(screen, console.options.update(height=height))
        return "\n".join("".join(each.text for each in line) for line in lines)
    console.print(screen)
    return out.getvalue()


def cells(text: str, first: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"│ {first} ")]
    return line.strip("│ ").split()


def test_traffic_latency_tiers_loads_replicas_and_adapters():
    before = Sample(SERVER, (), scraped(100), STORE, 10.0)
    found = (resident(1, "t/a0@2"),)
    text = shown(Sample(SERVER, found, scraped(300, observed=(50, 100)), STORE, 12.0), before)
    for part in (
        "100.0 tokens/s",
        "10.0 requests/s",
        "2 of 8",
        "4 of 16, 3 for their adapter",
        "first token  10.0 ms  98.2 ms",
        "25%  1.0 kB of 4.0 kB",
        "2 adapters",
        "50% fragmented",
        "3 pulling",
        "replicas 1 of 2 healthy; unhealthy: b:1",
        "100,000 adapters",
        "25%  50 bytes of 200 bytes",
        "20%  200 bytes of at most 1.0 kB",
        "layout not yet accepted",
    ):
        assert part in text
    assert cells(text, "t/a1")[-2:] == ["200.0", "200.0"], "busy, and no longer resident"
    assert cells(text, "t/a0@2")[-4:] == ["100.0", "100.0", "0", "s"]


def test_recurrent_states_are_shown_where_a_model_has_some():
    states = [("used", 6), ("stored", 9), ("capacity", 24)]
    lines = [f"{PREFIX}recurrent_states_{name} {value}" for name, value in states]
    now = Sample(SERVER, (), parse("\n".join(lines) + "\n"), STORE, 12.0)
    text = shown(now)
    assert cells(text, "states")[-4:] == ["6", "of", "24", "held"]
    assert "9 match a prefix" in text
    assert "states" not in shown(Sample(SERVER, (), scraped(100), STORE, 12.0))


RANK = types.RankStatus(0, 1, True, 2000, 40, 30, 20, 5, 2.0, 0.5, 60, 0, 1, (0,))


def of_ranks(num_steps: int) -> Metrics:
    """Each step has 30 ms of computing on rank 0, and on the slower rank 1 36 of the same 40."""
    lines = []
    for rank, waiting_s in ((0, 0.01), (1, 0.004)):
        lines += [
            f'{PREFIX}rank_up{{rank="{rank}"}} 1',
            f'{PREFIX}rank_steps_total{{rank="{rank}"}} {num_steps}',
            f'{PREFIX}rank_step_seconds_total{{rank="{rank}"}} {num_steps * 0.04}',
            f'{PREFIX}rank_exchange_seconds_total{{rank="{rank}"}} {num_steps * waiting_s}',
        ]
    return parse("\n".join(lines) + "\n")


def test_ranks_are_shown_where_there_are_several():
    silent = dataclasses.replace(RANK, index=1, answers=False, running_pulls=3)
    server = dataclasses.replace(SERVER, ranks=(RANK, silent))
    before = Sample(server, (), of_ranks(100), STORE, 10.0)
    text = shown(Sample(server, (), of_ranks(150), STORE, 12.0), before, width=100)
    assert "75%  2.0 kB, 30.0 ms + 10.0 ms waiting" in text
    assert "90%  does not answer, 2.0 kB, 36.0 ms + 4.0 ms waiting, 3" in text
    idle = shown(Sample(server, (), of_ranks(100), STORE, 12.0), before, width=100)
    assert "ms waiting" not in idle
    assert "rank 0" not in shown(Sample(SERVER, (), scraped(100), STORE, 12.0))


def test_superseded_versions_are_shown_as_old():
    before = Sample(SERVER, (), scraped(100), STORE, 10.0)
    old = dataclasses.replace(resident(1, "t/a0@1"), superseded=True)
    found = (old, resident(2, "t/a0"))
    text = shown(Sample(SERVER, found, scraped(300), STORE, 12.0), before)
    assert cells(text, "t/a0@1 (old)")[-4:] == ["0.0", "0.0", "0", "s"]
    assert cells(text, "t/a0")[-4:] == ["100.0", "100.0", "0", "s"], "its successor's rates"


@pytest.mark.parametrize("width", [20, 40, 100, 160])
def test_many_adapters_and_narrow_terminals_stay_bounded(width):
    metrics = scraped(9, num_adapters=100_000)
    now = Sample(SERVER, residents(MAX_RESIDENTS), metrics, STORE, 1.0)
    lines = shown(now, Sample(SERVER, (), scraped(1), STORE, 0.0), width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 120
    assert any("99980 more" in line for line in lines)


@pytest.mark.parametrize("height", [20, 24, 30, 50, 100])
@pytest.mark.parametrize("width", [80, 110, 150])
def test_a_screen_fills_the_terminal(width, height):
    now = Sample(SERVER, residents(MAX_RESIDENTS), scraped(9), STORE, 1.0)
    text = shown(now, Sample(SERVER, (), scraped(1), STORE, 0.0), width, height)
    assert height - 1 <= len(text.splitlines()) <= height
    assert "tokens/s" in text
    assert " more" in text


def test_deaths_and_restarts():
    alive = Sample(SERVER, residents(1), scraped(300), STORE, 2.0)
    dead = Sample(DEAD, DEAD, DEAD, DEAD, 3.0)
    assert shown(dead, alive).count("no answer: Socket closed") == 4
    assert "tokens/s  " not in shown(alive, dead).partition("adapters")[0]
    assert " 0.0 tokens/s" in shown(Sample(DEAD, (), scraped(5), STORE, 3.0), alive)


def test_json():
    now = Sample(DEAD, residents(1), scraped(300, observed=(50, 100)), STORE, 12.0)
    found = json.loads(
        json.dumps(to_json(overview(now, Sample(DEAD, (), scraped(100), STORE, 10.0))))
    )
    assert found["server"] == {
        "error": "Socket closed",
        "code": "UNAVAILABLE",
        "reason": "",
    }
    traffic = found["traffic"]
    assert traffic["rates"]["tokens_per_second"] == 100
    assert traffic["latencies"]["first_token_seconds"]["p50"] == pytest.approx(0.01)
    assert traffic["tiers"]["device"]["capacity_bytes"] == 4000
    assert traffic["adapters"]["t/a1"] == {"requests_per_second": 200, "tokens_per_second": 200}
    assert found["residents"][0]["tier"] == "host"
    assert found["store"]["revision"] == 5


def test_bars_and_sparklines():
    assert bar(0.5, "green", 8).plain == "████····"
    assert bar(0.001, "green", 8).plain == "▏·······"
    assert bar(7, "green", 2).plain == "██"
    assert sparkline([1, 4, 8], 2) == "▄█"
    assert sparkline([0, 0], 8) == SPARKS[0] * 2


def test_quantiles():
    before, after = scraped(0), scraped(0, observed=(50, 100))
    name = f"{PREFIX}first_token_seconds"
    assert quantile(0.25, after, before, name) == pytest.approx(0.005)
    assert quantile(0.75, after, before, name) == pytest.approx(0.055)
    assert quantile(0.5, before, before, name) is None
    assert quantile(0.5, after, before, "nonsense") is None
