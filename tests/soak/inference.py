"""The endurance test of the engine: W4 for minutes, with random cancels and deadlines, adapters of
every kind and sums of some.

    python -m tests.soak.inference [--seconds 600] [--model bench-200m] [--adapters 200]
                                   [--transport process] [--seed N]

More adapters than the host tier holds, and more there than the arena holds, so that pulls, copies
and evictions never stop. In the end nothing is held, `check_integrity` is clean, no request has
ended in a way that nobody asked for, and the memory of the process and its children, after a
warm-up, has stayed where it was, all the time, within one per cent (or 8 MiB, what an allocator may
keep back in a small process). The engine is in a process of its own, as shipped, or in a thread.
The seed is printed: with it, the same requests are drawn again, though not how the threads take
turns.
"""

from __future__ import annotations

import argparse
import heapq
import random
import secrets
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.engine import TRANSPORTS, BenchEngine, Track
from bench.models import ROOT, SHAPES, Prepared, prepare, prompts
from bench.workloads.many_adapters import start_engine
from bench.workloads.trace import Arrival, Traffic
from inference_svc.core import FinishReason
from inference_svc.errors import QueueFull
from tests.soak.kinds import NUM_ADDED, Asked, Kinds, with_kinds
from tests.support.wait import until

IN_FLIGHT = 48
CANCELLED, WITH_DEADLINE = 0.15, 0.15
ALPHA = 0.6
WARM_UP_SHARE = 0.3
MAX_GROWTH = 0.01
MAX_GROWTH_BYTES = 8 << 20
NUM_SAMPLES = 60
SMOOTHED = 5
"""Samples whose median stands for the middle one: a single reading may fall on a passing peak."""
PLACES = 256
"""Tokens between places at which prompts begin."""
MIN_SECONDS = 60.0
"""A shorter run does not get past its warm-up: its memory is not judged."""


@dataclass(slots=True)
class SoakRequest:
    """A request, and what its caller decided about it."""

    track: Track
    num_out: int
    has_deadline: bool
    is_cancelled: bool = False
    kind: str = ""

    def check(self) -> None:
        """Raises AssertionError if it ended in a way that its caller did not ask for."""
        track = self.track
        if track.error is not None:
            # Who cannot be served in time is told so at once.
            asked_for = self.has_deadline and isinstance(track.error, QueueFull)
            assert asked_for, f"ended with {track.error!r}"
        elif track.finish_reason is FinishReason.ABORTED:
            assert self.has_deadline or self.is_cancelled, "aborted, and nobody asked for it"
        else:
            assert track.finish_reason is FinishReason.LENGTH
            assert track.num_tokens == self.num_out


@dataclass
class Soak:
    """One run; `run` raises AssertionError for what must not be."""

    engine: BenchEngine
    kinds: Kinds
    seed: int
    num_ended: int = 0
    num_cancelled: int = 0
    num_refused: int = 0
    samples: list[int] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    """Requests that got all of their tokens, by kind."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._requests: dict[str, SoakRequest] = {}
        self._cancels: list[tuple[float, str]] = []
        self._number = 0
        (self._tokens,) = prompts(1, 4096, self.kinds.vocab)

    def run(self, seconds: float) -> None:
        """Always IN_FLIGHT requests, over some adapters and the base model."""
        arrivals = Traffic(len(self.kinds.digests), ALPHA).arrivals(self.seed)
        began_s = time.monotonic()
        while (spent_s := time.monotonic() - began_s) < seconds:
            while len(self._requests) < IN_FLIGHT:
                self._submit(next(arrivals))
            self._cancel_due()
            self.engine.wait_any(asked.track for asked in self._requests.values())
            self._collect()
            if spent_s >= seconds * (len(self.samples) + 1) / (NUM_SAMPLES + 1):
                self.samples.append(self.engine.resident_bytes)
        self.engine.wait(asked.track for asked in self._requests.values())
        self._collect()
        self.check_nothing_held()

    def _submit(self, arrival: Arrival) -> None:
        name = f"soak-{self._number}"
        asked, is_first = self._draw(arrival)
        fate, now_s = (1.0 if is_first else self._random.random()), time.monotonic()
        deadline_s = None
        if fate < WITH_DEADLINE:
            deadline_s = now_s + self._random.uniform(0.01, 2.0)
        elif fate < WITH_DEADLINE + CANCELLED:
            heapq.heappush(self._cancels, (now_s + self._random.expovariate(2.0), name))
        track = self.engine.submit(
            asked.prompt,
            arrival.num_out,
            asked.key,
            request_id=name,
            deadline_s=deadline_s,
            activation=asked.activation,
        )
        self._requests[name] = SoakRequest(
            track, arrival.num_out, deadline_s is not None, kind=asked.kind
        )
        self._number += 1

    def _draw(self, arrival: Arrival) -> tuple[Asked, bool]:
        """Returns what is asked for, and whether it is among the first: one of each kind. Prompts
        begin at a few places, so that some begin alike."""
        start = self._random.randrange(0, len(self._tokens) - arrival.num_in, PLACES)
        prompt = self._tokens[start : start + arrival.num_in]
        if self._number < len(self.kinds.names):
            return self.kinds.of(self._random, self._number, prompt), True
        return self.kinds.draw(self._random, arrival.adapter or 0, prompt), False

    def _cancel_due(self) -> None:
        while self._cancels and self._cancels[0][0] <= time.monotonic():
            _, name = heapq.heappop(self._cancels)
            if name in self._requests:
                self._requests[name].is_cancelled = True
                self.engine.cancel(name)
                self.num_cancelled += 1

    def _collect(self) -> None:
        for name, asked in list(self._requests.items()):
            if asked.track.is_done:
                asked.check()
                self.num_ended += 1
                self.served[asked.kind] += asked.track.finish_reason is FinishReason.LENGTH
                self.num_refused += asked.track.error is not None
                del self._requests[name]

    def check_nothing_held(self) -> None:
        until(lambda: not any(self.engine.describe().loads.values()))  # whose callers have gone
        status = self.engine.describe()
        assert status.num_running == status.num_waiting == 0
        self.engine.check_idle()

    def check_memory(self) -> None:
        """After the warm-up every sample lies at their median, and the last quarter where the
        first was."""
        flat = smooth(self.samples[int(len(self.samples) * WARM_UP_SHARE) :])
        middle, quarter = statistics.median(flat), len(flat) // 4
        first, last = statistics.median(flat[:quarter]), statistics.median(flat[-quarter:])
        allowed = max(middle * MAX_GROWTH, MAX_GROWTH_BYTES)
        what = (
            f"resident memory went from {first / 2**20:.1f} to {last / 2**20:.1f} MiB, "
            f"between {min(flat) / 2**20:.1f} and {max(flat) / 2**20:.1f}"
        )
        print(what, *(f"{sample / 2**20:.0f}" for sample in self.samples), flush=True)
        assert abs(last - first) <= allowed, what
        assert max(abs(sample - middle) for sample in flat) <= allowed, what


def smooth(samples: list[int]) -> list[float]:
    """Returns each sample's median with its neighbours, SMOOTHED in all; fewer at the ends."""
    reach = SMOOTHED // 2
    around = (samples[max(0, i - reach) : i + reach + 1] for i in range(len(samples)))
    return [statistics.median(window) for window in around]


def soak(
    prepared: Prepared, num_adapters: int, seconds: float, seed: int, threads: int, transport: str
) -> str:
    """Gives a line about what was done. Raises AssertionError for what must not be."""
    prepared = with_kinds(prepared)
    engine, digests = start_engine(
        prepared,
        num_adapters,
        num_in_host=max(num_adapters // 2, 40),
        num_threads=threads,
        prefix_cache=True,
        max_added_tokens=NUM_ADDED,
        transport=transport,
    )
    try:
        kinds = Kinds([*prepared.adapters], digests, prepared.vocab)
        run = Soak(engine, kinds, seed)
        run.run(seconds)
        missing = [each for each in kinds.names if not run.served[each]]
        assert not missing, f"no request was served for {missing}"
        if seconds >= MIN_SECONDS:
            run.check_memory()
        status = engine.describe()
    finally:
        engine.stop()
    return (
        f"{run.num_ended} requests ({', '.join(f'{n} {kind}' for kind, n in run.served.items())}), "
        f"{run.num_cancelled} cancelled, {run.num_refused} refused for "
        f"their deadline, {status.counters['pulls']:.0f} pulls, "
        f"{sum(status.tiers['device'].evictions.values())} evictions"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--model", choices=SHAPES, default="bench-200m")
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--models-dir", type=Path, default=ROOT)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--transport", choices=TRANSPORTS, default="process")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    prepared = prepare(options.model, 1, options.models_dir)
    done = soak(
        prepared,
        options.adapters,
        options.seconds,
        options.seed,
        options.threads,
        options.transport,
    )
    print(f"{done}, in {options.seconds:.0f} s: nothing was lost, nothing is held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
