"""W3 with one adapter of 1.5 GB: sixteen requests decode while it is loaded.

    python -m bench.workloads.large_adapter [--rounds 3] [--out bench/results/large_adapter.json]

Both services run as processes, with calls over gRPC. The model is bench-moe-large; the adapter has
rank 96 on all of its experts, in PEFT's form of target_parameters. Sixteen requests, each with its
own adapter on attention, decode throughout. Each round has three parts: they decode alone; the
large adapter, which is in the store's memory, is pulled for a waiting request; another adapter of
its size is registered (read and checked), compiled, pulled and used. The result compares the time
between tokens of the sixteen until the first token of the large adapter's request. The resident
memory of both services, each with its child processes, is sampled throughout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.kernels.experts import PARAMETERS
from bench.kernels.roofline import THREADS
from bench.models import Prepared, decoder, make_variants, prepare, prepare_adapter, prompts
from bench.results import FOLDER, median, percentile, show, write
from bench.services import Services, Wanted
from bench.workloads.interference import MAX_LEN, NUM_IN, NUM_STEADY, SETTLE_S, Steady, first_token
from inference_svc.adapters.targets import build_layout
from loadout.aio import AsyncClient

NAME = "bench-moe-large"
RANK = 96
ALONE_S = 8.0
SAMPLE_S = 0.05
MB = 1e6
SERVICES = {"adapter_store": "store", "inference_svc": "inference"}


class MemoryPeaks:
    """Samples the resident memory of both services within the context: the peak of each in bytes,
    by its name, and its memory at the start."""

    def __init__(self) -> None:
        self.before = _resident()
        self.peaks = dict(self.before)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> MemoryPeaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def growth_mb(self) -> dict[str, float]:
        return {name: (peak - self.before[name]) / MB for name, peak in self.peaks.items()}

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            for name, num_bytes in _resident().items():
                self.peaks[name] = max(self.peaks[name], num_bytes)


def _resident() -> dict[str, int]:
    found = dict.fromkeys(SERVICES.values(), 0)
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            name = next((name for module, name in SERVICES.items() if module in words), None)
            if name is not None:
                everyone = [process, *process.children(recursive=True)]
                found[name] += sum(each.memory_info().rss for each in everyone)
    return found


class Round:
    """One round with both services; `steady` are the adapters of the sixteen."""

    def __init__(self, services: Services, prepared: Prepared, steady: list[str]) -> None:
        self._client = AsyncClient(
            inference=services.inference, store=services.store, timeout_s=None
        )
        self._services = services
        self._prepared = prepared
        self._steady = steady

    async def alone(self) -> dict[str, Any]:
        async with self._decoding() as found:
            await asyncio.sleep(ALONE_S)
        return found

    async def pulled(self, adapter: str) -> dict[str, Any]:
        """Measures a pull of an adapter that is not resident and whose image is in the store's
        memory."""
        async with self._decoding() as found:
            found["first_token_s"] = await self._first_token(adapter)
        return found

    async def registered(self, adapter: str, folder: Path) -> dict[str, Any]:
        async with self._decoding() as found:
            began_s = time.perf_counter()
            await self._client.register(adapter, f"file://{folder.resolve()}")
            found["register_s"] = time.perf_counter() - began_s
            await asyncio.to_thread(self._services.wait_compiled, adapter)
            found["compiled_s"] = time.perf_counter() - began_s
            await self._first_token(adapter)
            found["first_token_s"] = time.perf_counter() - began_s
        return found

    async def close(self) -> None:
        await self._client.close()

    @contextlib.asynccontextmanager
    async def _decoding(self) -> Any:
        """Decodes the sixteen within the context. Yields a dictionary that gets the times between
        their tokens, and the growth of the services' memory."""
        found: dict[str, Any] = {}
        decoding = Steady(self._client, self._steady, self._prepared.vocab)
        await asyncio.sleep(SETTLE_S)
        with MemoryPeaks() as memory:
            decoding.is_measured = True
            yield found
            decoding.is_measured = False
        await decoding.stop()
        found["inter_token_p50_s"] = percentile(decoding.gaps_s, 50)
        found["inter_token_p99_s"] = percentile(decoding.gaps_s, 99)
        found["inter_token_max_s"] = max(decoding.gaps_s)
        found["tokens"] = len(decoding.gaps_s)
        found |= {f"{name}_growth_mb": mb for name, mb in memory.growth_mb().items()}

    async def _first_token(self, adapter: str) -> float:
        return await first_token(
            self._client, prompts(1, NUM_IN, self._prepared.vocab, seed=2)[0], adapter
        )


def variants(prepared: Prepared, root: Path) -> Iterator[Path]:
    """Yields large adapters with different digests, one at a time on the disk."""
    large = prepared.model_dir.parent / "large"
    prepare_adapter(
        prepared, large, NUM_STEADY, rank=RANK, targets=(), target_parameters=PARAMETERS
    )
    for folder in make_variants(large, root):
        yield folder
        shutil.rmtree(folder)


def measure(prepared: Prepared, num_rounds: int) -> dict[str, Any]:
    layout = build_layout(decoder(NAME), NAME, torch.bfloat16)
    of_one = layout.largest_image(RANK).num_bytes
    rounds: dict[str, list[dict[str, Any]]] = {"alone": [], "pulled": [], "registered": []}
    with tempfile.TemporaryDirectory(dir=prepared.model_dir.parent) as name:
        folder = Path(name).resolve()
        wanted = Wanted(
            prepared.model_dir,
            prepared.name,
            max_resident=2 * NUM_STEADY,
            max_rank=RANK,
            max_sequences=2 * NUM_STEADY,
            max_len=MAX_LEN,
            num_threads=THREADS,
            prefix_cache=False,
            store_bytes=8 << 30,
            adapter_bytes=of_one + of_one // 8,
            source_root=folder,
        )
        with Services(wanted, folder) as services, asyncio.Runner() as runner:
            for adapter, source in prepared.adapters.items():
                services.register(adapter, source)
            steady = list(prepared.adapters)
            turn = Round(services, prepared, steady)
            fresh = variants(prepared, folder / "adapters")
            for number in range(num_rounds + 1):  # the first warms up
                services.set_resident(steady)
                found = {"alone": runner.run(turn.alone())}
                adapter = f"large-{number}"
                folder_of_it = next(fresh)
                os.sync()  # so that no write falls into the measurement
                found["registered"] = runner.run(turn.registered(adapter, folder_of_it))
                services.set_resident(steady)
                found["pulled"] = runner.run(turn.pulled(adapter))
                image_bytes = next(
                    each.num_bytes
                    for each in services.client.residents()
                    if adapter in each.names[0]
                )
                services.client.delete(adapter)
                for kind, values in found.items():
                    rounds[kind] += [values] if number else []
            runner.run(turn.close())
    return {"image_bytes": image_bytes, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=FOLDER / "large_adapter.json")
    options = parser.parse_args()
    prepared = prepare(NAME, NUM_STEADY)
    found = measure(prepared, options.rounds)
    names = list(dict.fromkeys(name for each in found["rounds"].values() for name in each[0]))
    summary: dict[str, dict[str, float]] = {
        kind: {name: median([one[name] for one in rounds]) for name in names if name in rounds[0]}
        for kind, rounds in found["rounds"].items()
    }
    for kind in ("pulled", "registered"):
        ratios = [
            one["inter_token_p99_s"] / alone["inter_token_p99_s"]
            for one, alone in zip(found["rounds"][kind], found["rounds"]["alone"], strict=True)
        ]
        summary[kind]["p99 over alone's"] = median(ratios)
    rows = [
        (name, *(summary[kind].get(name) for kind in summary))
        for name in [*names, "p99 over alone's"]
    ]
    show(f"{NAME}, an image of {found['image_bytes'] / MB:.0f} MB", ("", *summary), rows)
    write(options.out, "W3, a large adapter", {"model": NAME, "summary": summary, **found})


if __name__ == "__main__":
    main()
