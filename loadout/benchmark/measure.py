"""Runs a workload against a server, and computes metrics from the callers' observations."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

from loadout.aio import AsyncClient
from loadout.benchmark.workload import BenchRequest, Workload, plan
from loadout.errors import NotFound, ServerError


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `tolerance` is the default share by which it may be worse than the baseline. It is
    larger for rare events, such as a 99th percentile, because they vary more."""

    name: str
    unit: str
    is_more_better: bool
    tolerance: float


METRICS = {
    metric.name: metric
    for metric in (
        Metric("tokens_per_second", "tokens/s", True, 0.10),
        Metric("first_token_p50_seconds", "s", False, 0.15),
        Metric("first_token_p99_seconds", "s", False, 0.30),
        Metric("inter_token_p50_seconds", "s", False, 0.10),
        Metric("inter_token_p99_seconds", "s", False, 0.30),
        Metric("adapter_load_p50_seconds", "s", False, 0.30),
    )
}

Figures = dict[str, float]
"""The metrics of one round, by name."""


@dataclass(slots=True)
class _Round:
    """The callers' observations: seconds, and the number of tokens."""

    first_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0


async def run(
    client: AsyncClient,
    workload: Workload,
    adapters: list[str],
    loaded: list[str],
    on_round: Callable[[int], None],
) -> list[Figures]:
    """Runs a warm-up round, then `workload.num_rounds` rounds.

    Args:
        client: Client of the inference service.
        workload: The requests of a round.
        adapters: References of the adapters that each round uses.
        loaded: References of adapters to load again in each round.
        on_round: Called with the number of each finished round, 0 for the warm-up.

    Returns:
        The metrics of each round.

    Raises:
        LoadoutError: A request failed, so that there is no measurement.
    """
    rounds = []
    for number in range(workload.num_rounds + 1):
        figures = await _round(client, workload, plan(workload, number, adapters))
        if loaded:
            loads_s = [await _load(client, ref) for ref in loaded]
            figures["adapter_load_p50_seconds"] = median(loads_s)
        if number:
            rounds.append(figures)
        on_round(number)
    return rounds


async def _round(client: AsyncClient, workload: Workload, requests: list[BenchRequest]) -> Figures:
    observed = _Round()
    left = iter(requests)
    start_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workload.num_in_flight):
                group.create_task(_work(client, workload, left, observed))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    seconds = time.perf_counter() - start_s
    if not observed.gaps_s:
        raise ServerError("no answer had two tokens: request more tokens", code="UNKNOWN")
    return {
        "tokens_per_second": observed.num_tokens / seconds,
        "first_token_p50_seconds": percentile(observed.first_token_s, 50),
        "first_token_p99_seconds": percentile(observed.first_token_s, 99),
        "inter_token_p50_seconds": percentile(observed.gaps_s, 50),
        "inter_token_p99_seconds": percentile(observed.gaps_s, 99),
    }


async def _work(
    client: AsyncClient, workload: Workload, left: Iterator[BenchRequest], observed: _Round
) -> None:
    """Sends the remaining requests, one after the other."""
    for request in left:
        await _generate(client, workload, request, observed)


async def _generate(
    client: AsyncClient, workload: Workload, request: BenchRequest, observed: _Round
) -> None:
    before_s = time.perf_counter()
    is_first = True
    stream = client.generate(
        request.prompt,
        adapter=request.adapter,
        max_tokens=workload.num_tokens,
        temperature=0,
        ignore_eos=True,
        # No prefix of an earlier round or run may be found.
        cache_salt=uuid.uuid4().hex,
    )
    async with stream:
        async for chunk in stream:
            count = len(chunk.token_ids)
            if not count:
                continue
            now_s = time.perf_counter()
            if is_first:
                observed.first_token_s.append(now_s - before_s)
                is_first = False
            else:
                # Tokens of one chunk count as many equal gaps.
                observed.gaps_s += [(now_s - before_s) / count] * count
            observed.num_tokens += count
            before_s = now_s


async def _load(client: AsyncClient, ref: str) -> float:
    """Unloads an adapter, and returns the seconds until it is resident again."""
    with contextlib.suppress(NotFound):  # it was not resident
        await client.unload(ref)
    start_s = time.perf_counter()
    await client.load(ref)
    return time.perf_counter() - start_s


def percentile(values: list[float], share: float) -> float:
    """Returns the nearest-rank percentile.

    Args:
        values: At least one value.
        share: The percentile, 0 to 100.
    """
    ordered = sorted(values)
    rank = -(-len(ordered) * share // 100)
    return ordered[max(0, int(rank) - 1)]


def medians(rounds: list[Figures]) -> Figures:
    """Returns the median of each metric.

    Args:
        rounds: Figures of rounds with the same metrics.
    """
    return {name: median(each[name] for each in rounds) for name in METRICS if name in rounds[0]}
