"""Measures a scrape of /metrics with many adapters, from both services as real processes.

    python -m bench.scrape [--adapters 10000] [--scrapes 20] [--out bench/results/scrape.json]

Every adapter is registered, pulled by a request of one token, and then resident in the host tier,
which holds all of them, or on the device. A scrape is timed from its request to its last byte,
plain and compressed as Prometheus requests it, while the service is idle and while eight callers
keep it busy with short requests. The results also have the listening process's processor time for
each scrape; on an idle service this is the scrape's own time, whatever else the machine does. The
goal is 50 ms idle and fewer than 5,000 series; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench.models import make_adapter, make_variants, prepare
from bench.results import FOLDER, median, show, write
from loadout import Client
from loadout.demo.system import System, SystemSettings
from loadout.prometheus import parse

MODEL = "bench-tiny"
GOAL_S = 0.05
GOAL_SERIES = 5_000
NUM_CALLERS = 8
HEADERS: dict[str, dict[str, str]] = {"plain": {}, "compressed": {"Accept-Encoding": "gzip"}}
CPU = "process_cpu_seconds_total"
INFERENCE_FLAGS = {
    "--device": "cpu",
    "--num-threads": 1,
    "--kv-memory": "64MiB",
    "--adapter-memory": "64MiB",
    "--host-memory": "1GiB",
    "--max-rank": 16,
    "--log-level": "warning",
}


def fill(client: Client, folder: Path, model_dir: Path, num_adapters: int) -> None:
    """Registers `num_adapters` adapters of one rank, and uses each."""
    original = folder / "original"
    make_adapter(model_dir, original, seed=0, rank=1, name=MODEL)
    variants = list(islice(make_variants(original, folder), num_adapters))

    def register(number: int) -> None:
        client.register(f"a{number}", f"file://{variants[number]}")

    def use(number: int) -> None:
        client.complete([3, 4, 5], adapter=f"a{number}", max_tokens=1)

    _each(register, num_adapters, "registered")
    _each(use, num_adapters, "used")


def _each(work: Callable[[int], None], count: int, done: str) -> None:
    began_s = time.monotonic()
    with ThreadPoolExecutor(NUM_CALLERS) as callers:
        for _ in callers.map(work, range(count)):
            pass
    print(f"{count} adapters {done} in {time.monotonic() - began_s:.0f} s", flush=True)


def scrape(address: str, headers: Mapping[str, str]) -> tuple[float, bytes]:
    """Returns a scrape's seconds and its answer."""
    request = urllib.request.Request(f"http://{address}/metrics", headers=dict(headers))
    began_s = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        data: bytes = response.read()
    return time.perf_counter() - began_s, data


def size_up(address: str) -> dict[str, Any]:
    _, data = scrape(address, {})
    families = text_string_to_metric_families(data.decode())
    return {"series": sum(len(family.samples) for family in families), "bytes": len(data)}


def measure(address: str, num_scrapes: int) -> dict[str, dict[str, float]]:
    found = {}
    for how, headers in HEADERS.items():
        began_s = cpu_seconds(address)
        times_s = [scrape(address, headers)[0] for _ in range(num_scrapes)]
        # Of the two scrapes that read the processor time, the later counts too.
        cpu_s = (cpu_seconds(address) - began_s) / (num_scrapes + 1)
        found[how] = {
            "median_ms": 1e3 * median(times_s),
            "max_ms": 1e3 * max(times_s),
            "cpu_ms": 1e3 * cpu_s,
        }
    return found


def cpu_seconds(address: str) -> float:
    return parse(scrape(address, {})[1].decode()).one(CPU)


@contextmanager
def traffic(client: Client, num_adapters: int) -> Iterator[None]:
    """Keeps callers busy with the most recently used adapters."""
    ended = threading.Event()

    def generate(caller: int) -> None:
        number = num_adapters - 1 - caller
        while not ended.is_set():
            client.complete([3, 4, 5], adapter=f"a{number}", max_tokens=16, ignore_eos=True)

    with ThreadPoolExecutor(NUM_CALLERS) as callers:
        calls = [callers.submit(generate, caller) for caller in range(NUM_CALLERS)]
        try:
            yield
        finally:
            ended.set()
    for call in calls:
        call.result()


def run(folder: Path, num_adapters: int, num_scrapes: int) -> dict[str, dict[str, Any]]:
    prepared = prepare(MODEL, 0)
    settings = SystemSettings(
        prepared.model_dir,
        MODEL,
        source_roots=(folder,),
        store_flags=("--log-level", "warning"),
        inference_flags=tuple(str(word) for flag in INFERENCE_FLAGS.items() for word in flag),
    )
    with System(settings, folder / "system") as system:
        addresses = system.addresses
        scraped = {"store": addresses.store_metrics, "inference": addresses.inference_metrics}
        with Client(inference=addresses.inference, store=addresses.store, timeout_s=None) as client:
            fill(client, folder, prepared.model_dir, num_adapters)
            found = {name: size_up(address) for name, address in scraped.items()}
            for name, address in scraped.items():
                found[name]["idle"] = measure(address, num_scrapes)
            with traffic(client, num_adapters):
                for name, address in scraped.items():
                    found[name]["under requests"] = measure(address, num_scrapes)
    return found


def table(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[object, ...]]:
    return [
        (service, values["series"], when, how, *times.values())
        for service, values in found.items()
        for when in ("idle", "under requests")
        for how, times in values[when].items()
    ]


def beyond_goal(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the numbers of series and the idle scrapes that miss the goal. During requests, a
    scrape's time includes its wait for a processor, and so does not count."""
    missed = []
    for service, values in found.items():
        if values["series"] >= GOAL_SERIES:
            missed.append(f"{service}: {values['series']} series")
        for how, times in values["idle"].items():
            if times["median_ms"] > 1e3 * GOAL_S:
                missed.append(f"{service}, {how}: {times['median_ms']:.1f} ms")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--scrapes", type=int, default=20)
    parser.add_argument("--out", type=Path, default=FOLDER / "scrape.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = run(Path(name).resolve(), options.adapters, options.scrapes)
    columns = ("service", "series", "", "", "median ms", "max ms", "CPU ms")
    title = f"/metrics with {options.adapters} adapters; the goal is {1e3 * GOAL_S:.0f} ms"
    show(title, columns, table(found))
    write(options.out, "scrape", {"adapters": options.adapters, "services": found})
    missed = beyond_goal(found)
    for what in missed:
        print(f"misses the goal: {what}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
