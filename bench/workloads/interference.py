"""W3: decoding of 16 requests while the server pulls adapters that it never had before.

    python -m bench.workloads.interference [--model bench-200m] [--rate 5] [--window 10]
        [--rounds 5] [--prefetch] [--out FILE]

Both services run as processes, with calls over gRPC. Sixteen requests, each with its own resident
adapter (--steady 0: the base model), decode throughout. Meanwhile short requests arrive, `rate` per
second, each for another adapter. In one run these adapters are compiled in the store and were never
on the inference service; in the other they are resident from the start. The runs take turns, and
take turns in going first, after one of each to warm up. The result compares the time between tokens
of the sixteen. With --prefetch, the default of the service, it also reloads adapters that were used
before and unloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.kernels.roofline import THREADS
from bench.models import RANK, SHAPES, Prepared, make_variants, prepare, prompts
from bench.plots import plot_lines
from bench.results import FOLDER, median, percentile, show, write
from bench.services import Services, Wanted
from loadout.aio import AsyncClient
from loadout.prometheus import Metrics

NUM_STEADY = 16
NUM_IN, NUM_SHORT_OUT = 32, 4
MAX_LEN = 2048
SETTLE_S = 1.0
BLOCKED = "loadout_inference_step_blocked_by_load_seconds"
STEP = "loadout_inference_step_seconds"
COMPARED = ("inter_token_p50_s", "inter_token_p99_s", "tokens")


class Steady:
    """Requests that decode until they are stopped, with the time between their tokens."""

    def __init__(self, client: AsyncClient, adapters: Sequence[str], vocab: int) -> None:
        self._client = client
        self._vocab = vocab
        self._tasks = [
            asyncio.create_task(self._decode(prompt, adapter))
            for prompt, adapter in zip(self._prompts(), adapters, strict=True)
        ]
        self.gaps_s: list[float] = []
        self.is_measured = False

    def _prompts(self) -> list[list[int]]:
        return prompts(NUM_STEADY, NUM_IN, self._vocab)

    async def _decode(self, prompt: list[int], adapter: str) -> None:
        last_s = None
        stream = self._client.generate(
            prompt,
            adapter=adapter,
            max_tokens=MAX_LEN - NUM_IN,
            temperature=0.0,
            ignore_eos=True,
        )
        async with stream:
            async for _ in stream:
                now_s = time.perf_counter()
                if last_s is not None and self.is_measured:
                    self.gaps_s.append(now_s - last_s)
                last_s = now_s

    async def stop(self) -> None:
        """Stops the requests. Raises if one has failed or run out of tokens."""
        ended = [task for task in self._tasks if task.done()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in ended:
            task.result()
        if ended:
            raise RuntimeError("a steady request ran out of tokens: take a shorter --window")


async def run(
    services: Services, prepared: Prepared, steady: Sequence[str], short: Sequence[str], rate: float
) -> tuple[list[float], list[float]]:
    """Returns the steady requests' times between tokens, and the short ones' times to the first
    token."""
    client = AsyncClient(inference=services.inference, timeout_s=None)
    decoding = Steady(client, steady, prepared.vocab)
    await asyncio.sleep(SETTLE_S)
    decoding.is_measured = True
    began_s = time.perf_counter()
    tasks = []
    prompt = prompts(1, NUM_IN, prepared.vocab, seed=2)[0]
    for index, adapter in enumerate(short):
        await asyncio.sleep(max(0.0, began_s + index / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(first_token(client, prompt, adapter)))
    first_s = await asyncio.gather(*tasks)
    decoding.is_measured = False
    await decoding.stop()
    await client.close()
    return decoding.gaps_s, list(first_s)


async def first_token(client: AsyncClient, prompt: list[int], adapter: str) -> float:
    began_s = time.perf_counter()
    stream = client.generate(
        prompt, adapter=adapter, max_tokens=NUM_SHORT_OUT, temperature=0.0, ignore_eos=True
    )
    first_s = None
    async for _ in stream:
        if first_s is None:
            first_s = time.perf_counter() - began_s
    assert first_s is not None
    return first_s


def largest_bucket_s(before: Metrics, after: Metrics, name: str) -> float | None:
    """Returns an upper bound of the largest observation between two scrapes: the smallest bucket's
    limit above all of them. None if the histogram is missing."""
    counts = {
        float(sample.labels["le"]): sample.value - before.sum(name + "_bucket", **sample.labels)
        for sample in after.select(name + "_bucket")
    }
    if not counts:
        return None
    return min(border for border, count in counts.items() if count == max(counts.values()))


def measure(prepared: Prepared, options: argparse.Namespace) -> dict[str, Any]:
    num_short = int(options.rate * options.window)
    steady = [str(i) if i < options.steady else "" for i in range(NUM_STEADY)]
    known = [f"known-{i}" for i in range(num_short)]
    rounds: dict[str, list[dict[str, Any]]] = {"resident": [], "cold": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        wanted = Wanted(
            prepared.model_dir,
            prepared.name,
            max_resident=NUM_STEADY + num_short,
            max_rank=RANK,
            max_sequences=2 * NUM_STEADY,
            max_len=MAX_LEN,
            num_threads=THREADS,
            prefix_cache=False,
            prefetch=options.prefetch,
            store_bytes=8 << 30,
            source_root=folder,
        )
        with Services(wanted, folder) as services, asyncio.Runner() as runner:
            folders = make_variants(prepared.adapters["0"], folder / "adapters")
            for adapter, source in prepared.adapters.items():
                services.register(adapter, source)
            register(services, known, folders)
            for number in range(options.rounds + 1):
                fresh = [f"fresh-{number}-{i}" for i in range(num_short)]
                register(services, fresh, folders)
                held = [adapter for adapter in steady if adapter]
                kinds = (("resident", known), ("cold", fresh))
                for kind, short in kinds[:: 1 if number % 2 else -1]:
                    services.set_resident([*held, *known] if kind == "resident" else held)
                    before = services.metrics()
                    gaps_s, first_s = runner.run(
                        run(services, prepared, steady, short, options.rate)
                    )
                    after = services.metrics()
                    if number:
                        rounds[kind].append(observe(gaps_s, first_s, before, after))
    return rounds


def register(services: Services, names: Sequence[str], folders: Iterator[Path]) -> None:
    """Registers adapters and waits until the store has compiled them and needs no sources."""
    for name in names:
        source = next(folders)
        services.register(name, source)
        (source / "adapter_model.safetensors").unlink()


def observe(
    gaps_s: list[float], first_s: list[float], before: Metrics, after: Metrics
) -> dict[str, Any]:
    return {
        "inter_token_p50_s": percentile(gaps_s, 50),
        "inter_token_p99_s": percentile(gaps_s, 99),
        "inter_token_max_s": max(gaps_s),
        "tokens": len(gaps_s),
        "short_first_token_p50_s": percentile(first_s, 50),
        "short_first_token_p99_s": percentile(first_s, 99),
        "step_blocked_by_load_below_s": largest_bucket_s(before, after, BLOCKED),
        "step_below_s": largest_bucket_s(before, after, STEP),
        "gaps_s": [round(gap, 6) for gap in sorted(gaps_s)[:: max(1, len(gaps_s) // 500)]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="bench-200m")
    parser.add_argument("--steady", type=int, default=NUM_STEADY)
    parser.add_argument("--rate", type=float, default=5.0)
    parser.add_argument("--window", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefetch", action="store_true")
    parser.add_argument("--out", type=Path, default=FOLDER / "interference.json")
    options = parser.parse_args()
    rounds = measure(prepare(options.model, NUM_STEADY), options)
    names = [name for name in rounds["cold"][0] if name != "gaps_s"]
    summary: dict[str, Any] = {}
    for kind, found in rounds.items():
        known = {n: [one[n] for one in found if one[n] is not None] for n in names}
        summary[kind] = {name: median(values) if values else None for name, values in known.items()}
    ratios = {name: summary["cold"][name] / summary["resident"][name] for name in COMPARED}
    summary["cold over resident"] = ratios
    rows = [(n, summary["resident"][n], summary["cold"][n]) for n in names]
    show(f"W3, {options.model}", ("", "resident", "cold"), rows)
    for name, ratio in ratios.items():
        print(f"{name}, cold over resident: {ratio:.2f}")
    workload = {
        "model": options.model,
        "rate": options.rate,
        "steady": options.steady,
        "prefetch": options.prefetch,
    }
    write(options.out, "W3", {**workload, "summary": summary, "rounds": rounds})
    series = {
        kind: [(100 * i / len(one), 1e3 * gap) for i, gap in enumerate(one)]
        for kind, found in rounds.items()
        for one in [sorted(gap for each in found for gap in each["gaps_s"])]
    }
    labels = ("percentile", "ms between tokens")
    title = f"W3, {options.model}: {options.rate:g} loads per second"
    plot_lines(options.out.with_suffix(".png"), title, labels, series)


if __name__ == "__main__":
    main()
