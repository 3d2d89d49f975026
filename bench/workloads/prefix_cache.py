"""W5: the share of a system prompt's prefill that the prefix cache saves, for each adapter version.

    python -m bench.workloads.prefix_cache [--model bench-200m] [--adapters 4] [--requests 8]
        [--out FILE]

All requests share a system prompt of 512 tokens, followed by 32 tokens of the user's own. The
engine runs in this process, and takes one request after the other: for the base model, for some
adapters, and for a second version of the last one. Different versions must share nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engine import BenchEngine
from bench.models import SHAPES, prepare, prompts
from bench.plots import plot_bars
from bench.results import FOLDER, median, show, write
from bench.workloads.many_adapters import start_engine

NUM_SHARED, NUM_OWN, NUM_OUT = 512, 32, 4


@dataclass(frozen=True, slots=True)
class Observed:
    """One version's cached tokens and seconds to the first token, request by request."""

    name: str
    cached: list[int]
    first_token_s: list[float]

    @property
    def saved_share(self) -> float:
        """The saved share of the system prompt's prefill, after the first request."""
        later = self.cached[1:]
        return sum(later) / (NUM_SHARED * len(later))


def observe(
    engine: BenchEngine, name: str, digest: str, shared: list[int], own: Sequence[list[int]]
) -> Observed:
    cached, first_token_s = [], []
    for tokens in own:
        track = engine.submit(shared + tokens, NUM_OUT, digest)
        engine.wait([track])
        if track.error is not None:
            raise track.error
        assert track.usage is not None
        cached.append(track.usage.cached_prompt_tokens)
        first_token_s.append(track.first_token_s)
    return Observed(name, cached, first_token_s)


def measure(model: str, num_adapters: int, num_requests: int) -> list[Observed]:
    prepared = prepare(model, 1)
    engine, digests = start_engine(prepared, num_adapters + 1, prefix_cache=True)
    engine.load(digests)
    (warm_up,) = prompts(1, NUM_SHARED, prepared.vocab, seed=3)
    engine.wait([engine.submit(warm_up, NUM_OUT, digest) for digest in ("", *digests)])
    (shared,) = prompts(1, NUM_SHARED, prepared.vocab)
    own = prompts(num_requests, NUM_OWN, prepared.vocab, seed=2)
    names = [f"adapter {i}" for i in range(num_adapters)] + ["its next version"]
    versions = [("base", ""), *zip(names, digests, strict=True)]
    found = [observe(engine, name, digest, shared, own) for name, digest in versions]
    engine.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="bench-200m")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--out", type=Path, default=FOLDER / "prefix_cache.json")
    options = parser.parse_args()
    found = measure(options.model, options.adapters, options.requests)
    summary: list[dict[str, Any]] = [
        {
            "version": one.name,
            "cached of the first": one.cached[0],
            "saved share": one.saved_share,
            "first token ms, first": 1e3 * one.first_token_s[0],
            "first token ms, later": 1e3 * median(one.first_token_s[1:]),
        }
        for one in found
    ]
    show(f"W5, {options.model}", list(summary[0]), [list(row.values()) for row in summary])
    across = sum(one.cached[0] for one in found)
    print(f"saved share {min(one.saved_share for one in found):.3f}, across versions {across}")
    workload = {"model": options.model, "num_shared": NUM_SHARED, "num_own": NUM_OWN}
    everything = {one.name: {"cached": one.cached, "s": one.first_token_s} for one in found}
    write(options.out, "W5", {**workload, "summary": summary, "all": everything})
    series = {
        name: [float(row[f"first token ms, {name}"]) for row in summary]
        for name in ("first", "later")
    }
    title = f"W5, {options.model}: {NUM_SHARED} shared tokens"
    groups = [str(row["version"]) for row in summary]
    plot_bars(options.out.with_suffix(".png"), title, "first token, ms", groups, series)


if __name__ == "__main__":
    main()
