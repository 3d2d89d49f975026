"""Measures the store's memory with many adapters and many slow readers.

The benchmark registers thousands of small adapters, and a large one for each reader. Then every
reader pulls its own image and reads a message from time to time. Resident memory is sampled
throughout, and must stay within start-up + memory tier + 200 MiB. A reader that is refused for lack
of room tries again.

    python -m bench.store.memory [--adapters 10000] [--readers 64] [--memory-mib 1024]
                                 [--seconds 60] [--out bench/results/store_memory.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import torch

from bench.store.adapters import Shapes, make_adapter, make_layout
from bench.store.process import BenchStore, bench_store
from inference_svc.host.cpus import find_processor

SMALL: Shapes = {"mlp.up_proj": (64, 64)}
LARGE: Shapes = {"mlp.up_proj": (16384, 16384)}
"""One layer, which makes 1 MiB of image at rank 16 in bf16."""
LARGE_LAYERS = 16
ALLOWED_MIB = 200
SAMPLE_SECONDS = 0.05
PAUSE_SECONDS = 0.25
CALLERS = 8
MIB = 1 << 20


class Readers:
    """Readers that pull their own images slowly and repeatedly, until `stop` is set."""

    def __init__(self, store: BenchStore, keys: list[tuple[str, str]]) -> None:
        self.stop = threading.Event()
        self.reading = 0
        self.refused = 0
        self._store = store
        self._threads = [threading.Thread(target=self._read, args=(key,)) for key in keys]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join()

    def _read(self, key: tuple[str, str]) -> None:
        while not self.stop.is_set():
            call = self._store.pull(*key)
            try:
                for index, _ in enumerate(call):
                    self.reading += index == 0
                    if self.stop.wait(PAUSE_SECONDS):
                        break
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                self.refused += 1
                self.stop.wait(PAUSE_SECONDS)
            finally:
                call.cancel()


def register_all(store: BenchStore, folder: Path, num_adapters: int, num_large: int) -> list[str]:
    """Registers all adapters, and returns the digests of the large ones."""

    def register(index: int, shapes: Shapes, layers: int, base_model: str) -> str:
        path = folder / f"{base_model}-{index}"
        make_adapter(path, shapes, layers, dtype=torch.bfloat16, seed=index, base_model=base_model)
        digest = store.register(path.name, f"file://{path}")
        for file in path.iterdir():
            file.unlink()
        return digest

    with ThreadPoolExecutor(CALLERS) as pool:
        list(pool.map(lambda i: register(i, SMALL, 1, "small"), range(num_adapters - num_large)))
        return list(pool.map(lambda i: register(i, LARGE, LARGE_LAYERS, "large"), range(num_large)))


def measure(num_adapters: int, num_readers: int, memory_mib: int, seconds: float) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as name,
        bench_store(Path(name), image_memory=memory_mib * MIB) as store,
    ):
        started = store.resident_bytes()
        digests = register_all(store, Path(name), num_adapters, num_readers)
        registered = store.resident_bytes()
        layout_id = store.register_layout(make_layout(LARGE, LARGE_LAYERS, "large"))
        readers = Readers(store, [(digest, layout_id) for digest in digests])
        readers.start()
        peak = registered
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            peak = max(peak, store.resident_bytes())
            time.sleep(SAMPLE_SECONDS)
        readers.join()
    return {
        "mib": {
            "start-up": started // MIB,
            "all registered": registered // MIB,
            "peak": peak // MIB,
            "memory tier": memory_mib,
            "over start-up and tier": (peak - started) // MIB - memory_mib,
            "allowed": ALLOWED_MIB,
        },
        "pulls": readers.reading,
        "refused": readers.refused,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=64)
    parser.add_argument("--memory-mib", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("bench/results/store_memory.json"))
    arguments = parser.parse_args()
    result = measure(arguments.adapters, arguments.readers, arguments.memory_mib, arguments.seconds)
    for what, mib in result["mib"].items():
        print(f"{what:24} {mib:7} MiB")
    print(f"{result['pulls']} pulls, {result['refused']} refused for lack of room")
    machine = str(find_processor())
    asked = {"adapters": arguments.adapters, "readers": arguments.readers}
    report = {"workload": "store memory", "machine": machine, **asked}
    arguments.out.write_text(json.dumps(report | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
