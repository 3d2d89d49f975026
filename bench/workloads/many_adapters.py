"""W4: many adapters. The S-LoRA generator sends more requests than the engine can serve, for n
adapters; the results are tokens in a fixed window, and the time to the first token.

    python -m bench.workloads.many_adapters [--model bench-200m] [--n 0 1 5 50 200 1000]
        [--alpha 0.3 0.6 1] [--cv 1] [--rounds 1] [--window 20]
        [--out bench/results/many_adapters.json]

The engine runs in this process. Its arena holds 32 adapters and its host tier all of them. Requests
arrive at 1.2 times the capacity measured with n = 5. Adapters are variants of one image, from a
store in memory (`bench.store.memory_store`), and the measurement begins when the host tier has them
all. Rounds take turns over n and alpha; results are medians.

Tokens count only within the window. After the window no more requests arrive, and waiting ones get
at most the same time again, so that the percentiles of the first token cover all requests. Requests
that still have no token count with their wait so far. A percentile among them is a lower bound, and
is marked so.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from bench.engine import BenchEngine, Track
from bench.kernels.roofline import THREADS
from bench.models import (
    RANK,
    SHAPES,
    Prepared,
    arena_bytes,
    image_bytes,
    kv_bytes,
    prepare,
    prompts,
)
from bench.plots import plot_lines
from bench.results import FOLDER, median, percentile, show, write
from bench.store.memory_store import MemoryStore
from bench.workloads.trace import Arrival, Traffic
from inference_svc.core import EngineConfig
from inference_svc.engine.control.status_types import EngineStatus

IN_ARENA = 32
KV_TOKENS = 1 << 14
MAX_REQUESTS = 1024
REFERENCE_N = 5
OVERLOAD = 1.2
IS_BOUND = " is a lower bound"
COUNTERS = ("pulls", "prefetch_hits", "preemptions")


def start_engine(
    prepared: Prepared,
    num_adapters: int,
    *,
    num_in_host: int = 0,
    num_threads: int = THREADS,
    prefix_cache: bool = False,
    max_added_tokens: int = 0,
    transport: str = "thread",
) -> tuple[BenchEngine, list[str]]:
    """Returns an engine, and the digests of its adapters, which are variants of the prepared ones
    in turn. The host tier holds all, or `num_in_host`."""
    store = MemoryStore()
    originals = [store.register(folder) for folder in prepared.adapters.values()]
    in_host = num_in_host or max(num_adapters, 1)
    config = EngineConfig(
        prepared.model_dir,
        prepared.name,
        dtype="bfloat16",
        max_sequences=IN_ARENA,
        max_model_len=1024,
        max_queue=1 << 20,
        max_tenant_queue=1 << 20,
        kv_bytes=kv_bytes(prepared.name, KV_TOKENS),
        arena_bytes=arena_bytes(prepared.name, IN_ARENA),
        host_bytes=arena_bytes(prepared.name, in_host),
        max_loras=IN_ARENA,
        max_lora_rank=RANK,
        adapter_wait_s=120.0,
        prefix_cache=prefix_cache,
        max_added_tokens=max_added_tokens,
        num_threads=num_threads,
    )
    engine = BenchEngine(config, store, transport)
    share = -(-num_adapters // len(originals))
    variants = [engine.add_variants(digest, share) for digest in originals]
    in_turn = [digest for each in zip(*variants, strict=True) for digest in each]
    return engine, in_turn[:num_adapters]


class Driver:
    """Sends arrivals to an engine."""

    def __init__(self, engine: BenchEngine, digests: list[str], vocab: int) -> None:
        self._engine = engine
        self._digests = digests
        (self._tokens,) = prompts(1, 4096, vocab)
        self._number = 0

    def submit(self, arrival: Arrival) -> tuple[str, Track]:
        """Sends a request, and returns its id and track. Prompts share only their length."""
        self._number += 1
        start = self._number * 31 % (len(self._tokens) - arrival.num_in)
        prompt = self._tokens[start : start + arrival.num_in]
        digest = "" if arrival.adapter is None else self._digests[arrival.adapter]
        name = f"w4-{self._number}"
        return name, self._engine.submit(prompt, arrival.num_out, digest, request_id=name)

    def play(
        self, traffic: Traffic, window_s: float, seed: int, *, drain_s: float = 0.0
    ) -> dict[str, Any]:
        """Sends the traffic, and returns the observations of the window. Then waits up to `drain_s`
        until every request has its first token, and cancels the rest."""
        before = _count(self._engine.describe())
        began_s = time.monotonic()
        sent: dict[str, Track] = {}
        arrivals = islice(traffic.arrivals(seed), MAX_REQUESTS)
        for arrival in takewhile(lambda a: a.at_s < window_s, arrivals):
            time.sleep(max(0.0, began_s + arrival.at_s - time.monotonic()))
            name, sent[name] = self.submit(arrival)
        time.sleep(max(0.0, began_s + window_s - time.monotonic()))
        end_s = began_s + window_s
        after = _count(self._engine.describe())
        self._engine.wait_first_tokens(sent.values(), drain_s)
        drained_s = time.monotonic()
        for name, track in sent.items():
            if not track.is_done:
                self._engine.cancel(name)
        self._engine.wait(sent.values())
        tracks = list(sent.values())
        for track in tracks:
            if track.error is not None:
                raise track.error
        return observe(tracks, began_s, end_s, drained_s) | {
            name: after[name] - before[name] for name in after
        }

    def capacity(self, traffic: Traffic, window_s: float, seed: int = 0) -> float:
        """Returns requests per second when MAX_REQUESTS arrive at once, from `traffic` of infinite
        rate."""
        self.play(traffic, min(window_s, 2.0), seed)  # warms up
        tokens = self.play(traffic, window_s, seed)["tokens_per_second"]
        if tokens == 0:
            raise SystemExit("there is no token within the window; use a longer --window")
        return float(tokens) / traffic.lengths.mean_out


def _count(status: EngineStatus) -> dict[str, float]:
    device, host = status.tiers["device"], status.tiers["host"]
    return {
        "slot_hits": device.hits,
        "host_hits": host.hits,
        "slot_evictions": sum(device.evictions.values()),
        **{name: status.counters[name] for name in COUNTERS},
    }


def observe(
    tracks: list[Track], began_s: float, end_s: float, drained_s: float
) -> dict[str, float | bool]:
    """Returns observations: tokens up to `end_s`, and first tokens up to `drained_s`."""
    times = [moment for track in tracks for moment in track.token_times_s if moment <= end_s]
    first = [t.first_token_s for t in tracks if t.token_times_s]
    waited = [drained_s - t.sent_s for t in tracks if not t.token_times_s]
    found: dict[str, float | bool] = {
        "tokens_per_second": len(times) / (end_s - began_s),
        "requests": float(len(tracks)),
        "waiting at the end": float(sum(_waits(track, end_s) for track in tracks)),
        "without a token": float(len(waited)),
    }
    for percent in (50, 99):
        name = f"first_token_p{percent}_s"
        value = percentile([*first, *waited], percent) if tracks else 0.0
        # A request that has waited for less may still wait longer than that.
        found |= {name: value, name + IS_BOUND: any(s <= value for s in waited)}
    return found


def _waits(track: Track, at_s: float) -> bool:
    return not track.token_times_s or track.token_times_s[0] > at_s


def measure(
    prepared: Prepared,
    numbers: list[int],
    alphas: list[float],
    cv: float,
    rounds: int,
    window_s: float,
) -> dict[str, Any]:
    """Returns the rounds' observations for each alpha and n."""
    engine, digests = start_engine(prepared, max([*numbers, REFERENCE_N]))
    driver = Driver(engine, digests, prepared.vocab)
    engine.load(digests)
    rate = OVERLOAD * driver.capacity(Traffic(REFERENCE_N), window_s)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for seed in range(rounds):
        for alpha in alphas:
            for n in numbers:
                traffic = Traffic(n, alpha, rate, cv)
                observed = driver.play(traffic, window_s, seed, drain_s=window_s)
                found.setdefault(str(alpha), {}).setdefault(str(n), []).append(observed)
                print(f"alpha {alpha}, n {n}: {observed['tokens_per_second']:.1f} tokens/s")
    engine.stop()
    return {"requests_per_second": rate, "rounds": found}


def summarize(found: dict[str, dict[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    rows = []
    for alpha, by_n in found.items():
        for n, rounds in by_n.items():
            row = {
                name: any(one[name] for one in rounds)
                if isinstance(rounds[0][name], bool)
                else median([one[name] for one in rounds])
                for name in rounds[0]
            }
            rows.append({"alpha": float(alpha), "n": int(n), **row})
    for row in rows:
        reference = [r for r in rows if r["alpha"] == row["alpha"] and r["n"] == REFERENCE_N]
        if reference:
            row["share of n=5"] = row["tokens_per_second"] / reference[0]["tokens_per_second"]
    return rows


def show_table(summary: list[dict[str, Any]], title: str) -> None:
    bounds = [name for name in summary[0] if name.endswith(IS_BOUND)]
    columns = [name for name in summary[0] if name not in ("preemptions", *bounds)]
    columns += [name for name in ("share of n=5",) if name not in columns]

    def cell(row: dict[str, Any], column: str) -> object:
        is_bound = row.get(column + IS_BOUND, False)
        return f"\u2265 {row[column]:.3g}" if is_bound else row.get(column)

    show(title, columns, [[cell(row, column) for column in columns] for row in summary])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="bench-200m")
    parser.add_argument("--n", type=int, nargs="+", default=[0, 1, 5, 50, 200, 1000])
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.3, 0.6, 1.0])
    parser.add_argument("--cv", type=float, default=1.0, help="of the time between arrivals")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--window", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=FOLDER / "many_adapters.json")
    options = parser.parse_args()
    prepared = prepare(options.model, 1)
    found = measure(prepared, options.n, options.alpha, options.cv, options.rounds, options.window)
    summary = summarize(found["rounds"])
    show_table(summary, f"W4, {options.model}")
    workload = {"model": options.model, "window_s": options.window, "in_arena": IN_ARENA}
    workload |= {"cv": options.cv}
    workload |= {"image_bytes": image_bytes(options.model)}
    write(options.out, "W4", {**workload, "summary": summary, **found})
    series = {
        f"alpha {alpha}": [
            (row["n"], row["tokens_per_second"]) for row in summary if row["alpha"] == alpha
        ]
        for alpha in options.alpha
    }
    labels = ("adapters", "tokens per second")
    title = f"W4, {options.model}: {IN_ARENA} adapters fit the arena"
    plot_lines(options.out.with_suffix(".png"), title, labels, series, log_x=True)


if __name__ == "__main__":
    main()
