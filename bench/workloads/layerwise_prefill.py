"""Measures the maximum gain of a prefill that starts on layer 0 while later layers still arrive.

    python -m bench.workloads.layerwise_prefill [--model bench-200m] [--rounds 20] [--out FILE]

Both services run as processes, with calls over gRPC. A load of a cold adapter and a prefill of 32
tokens run one after the other, as in the product, and side by side, started at the same moment.
Side by side, neither waits for the other's layers, so no real layer-wise prefill can end before the
later of the two. The difference is the maximum gain. The prefill uses the base model; an adapter
would only add to its work.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.models import SHAPES, Prepared, image_bytes, make_variants, prepare, prompts
from bench.results import FOLDER, median, show, write
from bench.services import Services
from bench.workloads.ttft import NUM_IN, PAUSE_S, wanted_for

WORTH_IT = 0.10
"""Minimum gain of the cold first token to keep a layer-wise prefill."""


class Work:
    """Loads and prefills at both services."""

    def __init__(self, prepared: Prepared, services: Services, folders: Iterator[Path]) -> None:
        self._services = services
        self._folders = folders
        self._prompt = prompts(1, NUM_IN, prepared.vocab)[0]
        self._number = 0

    def next_cold(self) -> str:
        """Returns an adapter that is compiled in the store's memory and was never on the inference
        service."""
        self._number += 1
        name = f"cold-{self._number}"
        self._services.register(name, next(self._folders))
        self._services.pull_once(name)
        return name

    def load(self, name: str) -> None:
        self._services.client.load(name)

    def prefill(self) -> None:
        for _ in self._services.client.generate(
            self._prompt, max_tokens=1, temperature=0.0, ignore_eos=True
        ):
            pass

    def one_after_the_other(self, name: str) -> None:
        self.load(name)
        self.prefill()

    def side_by_side(self, name: str) -> None:
        beside = threading.Thread(target=self.load, args=(name,))
        beside.start()
        self.prefill()
        beside.join()


def measure(prepared: Prepared, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folders = make_variants(prepared.adapters["0"], folder / "adapters")
        with Services(wanted_for(prepared, folder, NUM_IN), folder) as services:
            work = Work(prepared, services, folders)
            kinds = {
                "load": work.load,
                "prefill": lambda name: work.prefill(),
                "one after the other": work.one_after_the_other,
                "side by side": work.side_by_side,
            }
            for round_index in range(rounds + 1):
                for kind, run in kinds.items():
                    cold = work.next_cold()
                    time.sleep(PAUSE_S)
                    began_s = time.perf_counter()
                    run(cold)
                    if round_index:
                        seconds.setdefault(kind, []).append(time.perf_counter() - began_s)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="bench-200m")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=FOLDER / "layerwise_prefill.json")
    options = parser.parse_args()
    seconds = measure(prepare(options.model, 1), options.rounds)
    medians = {kind: median(values) for kind, values in seconds.items()}
    gain = 1 - medians["side by side"] / medians["one after the other"]
    show("Layer-wise readiness", ("work", "ms"), [(k, 1e3 * s) for k, s in medians.items()])
    print(f"at most {gain:.0%} of the cold first token; worth keeping from {WORTH_IT:.0%} on")
    result: dict[str, Any] = {"model": options.model, "image_bytes": image_bytes(options.model)}
    write(options.out, "layer-wise", {**result, "gain": gain, "seconds": seconds})


if __name__ == "__main__":
    main()
