"""Compares the store's stream of an image with a plain gRPC stream between the same two processes.

The image has about 100 MB: a rank-16 adapter of an 8B-shaped model with 38 layers. The streams are
a raw one, a pull from memory without and with checked hashes, a pull from the disk tier (of a file
that this process has read before), and sixteen pulls at once. Then the same image is pulled as an
inference service does, by its threads and to its memory, streamed and as a shared file, once and
sixteen times at once. Results are medians of interleaved rounds, and ratios within the same run.

    python -m bench.store.pull [--rounds 5] [--layers 38] [--out bench/results/store_pull.json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bench.store.adapters import LLAMA_8B, make_adapter, make_layout
from bench.store.process import RAW_BYTES, BenchStore, bench_store
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.pulls.pull import (
    ImageSink,
    PullDone,
    PullEvent,
    PullFailed,
    PullJob,
    PullOpened,
)
from inference_svc.adapters.pulls.threads import Puller
from inference_svc.host.cpus import find_processor
from inference_svc.store.client import ImageClient
from inference_svc.store.replicas import Replicas

RANK = 16
PART_BYTES = sum(RANK * 2 * (num_in + num_out) for num_in, num_out in LLAMA_8B.values())
CONCURRENT = 16
WORKERS = 4
"""Pull threads of an inference service, by default."""
GOALS = {
    "pull / raw": 0.6,
    "pull, hashes checked / raw": 0.4,
    "pull from disk / pull": 0.8,
    "16 pulls at once / pull": 0.9,
    "to memory, shared / hash": 0.8,
    "16 to memory, shared / hash": 0.83,
}
"""The last two compare with two threads that only hash: 0.8 of their rate, and 1.2 times the bytes
at it."""


def read_raw(store: BenchStore, num_bytes: int) -> int:
    return sum(map(len, store.raw(str(num_bytes // RAW_BYTES).encode())))


def read_pull(store: BenchStore, key: tuple[str, str]) -> int:
    """Reads every chunk's bytes, and returns their number."""
    num_bytes = 0
    for response in store.pull(*key):
        if response.WhichOneof("part") == "chunk":
            num_bytes += len(response.chunk.data)
    return num_bytes


def read_pulls(pool: ThreadPoolExecutor, store: BenchStore, key: tuple[str, str]) -> int:
    """Reads sixteen pulls at once."""
    return sum(pool.map(lambda _: read_pull(store, key), range(CONCURRENT)))


def check_pull(store: BenchStore, key: tuple[str, str]) -> int:
    """Reads every chunk, checks every part's hash and the total's, and returns the bytes."""
    num_bytes = 0
    sha256, parts = hashlib.sha256(), hashlib.sha256()
    for response in store.pull(*key):
        kind = response.WhichOneof("part")
        if kind == "chunk":
            data = response.chunk.data
            sha256.update(data)
            num_bytes += len(data)
        elif kind == "layer_end":
            assert sha256.digest() == response.layer_end.sha256
            parts.update(response.layer_end.sha256)
            sha256 = hashlib.sha256()
        elif kind == "trailer":
            assert parts.digest() == response.trailer.sha256
    return num_bytes


class Receiver:
    """The pull threads of an inference service, which write to memory of their own. With a socket
    images are shared."""

    def __init__(self, store: BenchStore, key: tuple[str, str], socket: Path | None) -> None:
        self._key = key
        self._replicas = Replicas.at(store.address)
        self._client = ImageClient(self._replicas, share_socket=socket)
        self._events: queue.SimpleQueue[PullEvent] = queue.SimpleQueue()
        self._puller = Puller(
            self._client, WORKERS, self._events.put, lambda header: header, lambda *_: None
        )
        self._is_shared = socket is not None
        self._free: list[bytearray] = []

    def pull(self, number: int) -> int:
        """Pulls the image so many times at once, and returns the bytes."""
        num_bytes, used = 0, {}
        for _ in range(number):
            self._puller.start(PullJob(*self._key))
        while number:
            event = self._events.get()
            if isinstance(event, PullOpened):
                size = event.header.total_bytes
                used[event.job] = self._free.pop() if self._free else bytearray(size)
                sink = ImageSink(memoryview(used[event.job]), [Extent(0, 0, size)])
                if event.job.grant(sink):
                    self._puller.start(event.job)
            elif isinstance(event, PullDone):
                self._free.append(used.pop(event.job))
                num_bytes += len(self._free[-1])
                number -= 1
            elif isinstance(event, PullFailed):
                raise RuntimeError(f"a pull failed: {event.error}")
        return num_bytes

    def close(self) -> None:
        """Ends the threads. Raises RuntimeError if images were streamed that should be shared."""
        self._puller.close()
        self._client.close()
        shares = self._replicas.shares()
        if self._is_shared and shares.get("shared", 0) < 0.9 * sum(shares.values()):
            raise RuntimeError(f"images were streamed: {shares}")


def hash_in_two(pool: ThreadPoolExecutor, data: bytearray) -> int:
    """Hashes the halves at once, as fast as two threads can."""
    half = len(data) // 2
    parts = memoryview(data)[:half], memoryview(data)[half:]
    list(pool.map(lambda part: hashlib.sha256(part).digest(), parts))
    return len(data)


def rate(work: Callable[[], int]) -> float:
    """Returns the MB per second of `work`."""
    began = time.perf_counter()
    num_bytes = work()
    return num_bytes / (time.perf_counter() - began) / 1e6


def register(store: BenchStore, folder: Path, layers: int) -> list[tuple[str, str]]:
    """Registers both adapters, and returns the keys of their images, which are compiled."""
    layout_id = store.register_layout(make_layout(LLAMA_8B, layers))
    keys = []
    for name in ("a0", "a1"):
        keys.append((store.register(name, f"file://{folder}/{name}"), layout_id))
        store.wait_ready(name)
    return keys


def measure(rounds: int, layers: int) -> dict[str, list[float]]:
    """Measures two stores. One's memory holds everything; the other's holds one image, so that two
    images pulled in turn always come from the disk tier."""
    image_bytes = layers * PART_BYTES
    rates: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as name,
        ThreadPoolExecutor(CONCURRENT) as pool,
        ExitStack() as stack,
    ):
        folder = Path(name)
        socket = folder / "share.sock"
        data = bytearray(b"x" * image_bytes)
        for index in range(2):
            adapter = folder / f"a{index}"
            make_adapter(adapter, LLAMA_8B, layers, dtype=torch.bfloat16, seed=index)
        with (
            bench_store(
                folder, data_dir=str(folder / "memory"), share_socket=str(socket)
            ) as memory,
            bench_store(
                folder, data_dir=str(folder / "disk"), image_memory=image_bytes * 5 // 4
            ) as disk,
        ):
            key, other = register(memory, folder, layers)
            register(disk, folder, layers)
            streamed, shared = Receiver(memory, key, None), Receiver(memory, key, socket)
            for receiver in (streamed, shared):
                stack.callback(receiver.close)
            works: dict[str, Callable[[], int]] = {
                "raw": lambda: read_raw(memory, image_bytes),
                "pull": lambda: read_pull(memory, key),
                "pull, hashes checked": lambda: check_pull(memory, key),
                "pull from disk": lambda: read_pull(disk, key),
                "16 pulls at once": lambda: read_pulls(pool, memory, key),
                "hash": lambda: hash_in_two(pool, data),
                "to memory": lambda: streamed.pull(1),
                "to memory, shared": lambda: shared.pull(1),
                "16 to memory": lambda: streamed.pull(CONCURRENT),
                "16 to memory, shared": lambda: shared.pull(CONCURRENT),
            }
            for index in range(rounds + 1):
                for what, work in works.items():
                    read_pull(disk, other)  # evicts the first image from this store's memory
                    found = rate(work)
                    if index:
                        rates.setdefault(what, []).append(found)
    return rates


def summarize(rates: dict[str, list[float]]) -> dict[str, Any]:
    medians = {what: statistics.median(found) for what, found in rates.items()}
    ratios = {}
    for goal in GOALS:
        over, under = goal.rsplit(" / ", 1)
        ratios[goal] = medians[over] / medians[under]
    return {"mb_per_second": medians, "ratios": ratios, "goals": GOALS, "all": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=38)
    parser.add_argument("--out", type=Path, default=Path("bench/results/store_pull.json"))
    arguments = parser.parse_args()
    result = summarize(measure(arguments.rounds, arguments.layers))
    for what, found in result["mb_per_second"].items():
        print(f"{what:24} {found:7.0f} MB/s")
    for what, found in result["ratios"].items():
        print(f"{what:32} {found:5.2f}  (goal {GOALS[what]:.2f})")
    machine = str(find_processor())
    report = {"workload": "store pull", "machine": machine, "layers": arguments.layers}
    arguments.out.write_text(json.dumps(report | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
