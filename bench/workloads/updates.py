"""Times a trainer's update of one adapter, from `register` to the first token of the new version.

The model is the demo's, with its adapter `reverse`; versions differ in a few bits. The trainer
uploads the folder with keep=5 and requests one token with `min_revision`, first alone, then while
callers generate with the same name.

    python -m bench.workloads.updates [--updates 100] [--callers 6]
        [--out bench/results/updates.json]
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.models import make_variants
from bench.results import FOLDER, median, percentile, show, write
from loadout import Client
from loadout.demo.adapters import ADAPTERS, MODEL
from loadout.demo.jobs import BASE_MODEL
from loadout.demo.system import System, SystemSettings

NAME, KEEP, PROMPT = "live", 5, "loadout="
PAUSE_S = 0.1
"""Pause between two updates, so that the last one's background work does not slow the next."""


class Update(NamedTuple):
    """The seconds of a registration, and from its answer to the first token."""

    register_s: float
    first_token_s: float

    @property
    def total_s(self) -> float:
        return self.register_s + self.first_token_s


def update(client: Client, folder: Path) -> Update:
    began_s = time.perf_counter()
    done = client.register(NAME, folder, keep=KEEP)
    registered_s = time.perf_counter()
    answer = client.complete(
        PROMPT, adapter=NAME, min_revision=done.revision, max_tokens=1, temperature=0.0
    )
    ended_s = time.perf_counter()
    assert answer.adapter is not None
    assert answer.adapter.digest == done.adapter.digest, "an older version has answered"
    return Update(registered_s - began_s, ended_s - registered_s)


@contextmanager
def traffic(client: Client, num_callers: int) -> Iterator[None]:
    """Keeps callers generating with the name, one request after the other."""
    ended = threading.Event()

    def generate(caller: int) -> None:
        while not ended.is_set():
            client.complete(PROMPT, adapter=NAME, max_tokens=16, ignore_eos=True, seed=caller)

    with ThreadPoolExecutor(num_callers) as pool:
        callers = [pool.submit(generate, number) for number in range(num_callers)]
        try:
            yield
        finally:
            ended.set()
    for each in callers:
        each.result()


def measure(num_updates: int, num_callers: int) -> dict[str, list[Update]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folders = make_variants(ADAPTERS / "reverse", folder / "adapters")
        with (
            System(SystemSettings(MODEL, BASE_MODEL), folder / "system") as system,
            Client(system.addresses.inference, system.addresses.store) as client,
        ):
            found = {"alone": _updates(client, folders, num_updates)}
            with traffic(client, num_callers):
                found[f"{num_callers} callers"] = _updates(client, folders, num_updates)
            return found


def _updates(client: Client, folders: Iterator[Path], count: int) -> list[Update]:
    update(client, next(folders))  # not measured, because the first update takes longer
    found = []
    for _ in range(count):
        time.sleep(PAUSE_S)
        found.append(update(client, next(folders)))
    return found


def summarize(updates: list[Update]) -> dict[str, Any]:
    total = [each.total_s for each in updates]
    return {
        "register_ms": 1e3 * median([each.register_s for each in updates]),
        "first_token_ms": 1e3 * median([each.first_token_s for each in updates]),
        "total_ms": 1e3 * median(total),
        "total_p90_ms": 1e3 * percentile(total, 90),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--callers", type=int, default=6)
    parser.add_argument("--out", type=Path, default=FOLDER / "updates.json")
    options = parser.parse_args()
    found = measure(options.updates, options.callers)
    summary = {what: summarize(updates) for what, updates in found.items()}
    columns = ("", "register, ms", "then first token", "together", "together, p90")
    show("updates", columns, [(what, *medians.values()) for what, medians in summary.items()])
    write(options.out, "updates", {"summary": summary, "seconds": found})


if __name__ == "__main__":
    main()
