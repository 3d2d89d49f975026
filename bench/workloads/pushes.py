"""W6: the time from a trainer's `push` to the last replica's first token of the new version.

Replicas of the demo's model run on this machine, each with four requests in flight that use the
pushed name. The adapter has 20 MB, and is pushed as ephemeral and as durable. `push` waits for all
replicas. Then each replica gets a request for one token under the name, all at once, and the answer
must name the pushed digest.

With --flat N the benchmark pushes N times with keep=5. It reports the store's bytes on disk, the
rows of its catalog, and the memory of all services, at the start and in between.

    python -m bench.workloads.pushes [--replicas 1 2 4] [--pushes 30] [--flat 1000]
                           [--out bench/results/pushes.json]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.results import FOLDER, median, percentile, show, write
from loadout import Client
from loadout._push.result import Pushed
from loadout.demo.adapters import MODEL
from loadout.demo.jobs import BASE_MODEL
from loadout.demo.system import System, SystemSettings

NAME, KEEP, PROMPT = "live", 5, "loadout="
RANK = 384
"""Rank of all targets, which gives 20.8 MB in float32."""
IN_FLIGHT, OUT_TOKENS = 4, 32
PAUSE_S = 0.2
"""Pause between two pushes, so that the last one's background work does not slow the next."""
REPORTED = (0.1, 0.5, 1.0)
"""Shares of --flat's pushes after which the benchmark takes a footprint."""
NUM_LAYERS, HIDDEN, INNER, KEYS = 4, 192, 512, 64
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KEYS),
    "self_attn.v_proj": (HIDDEN, KEYS),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
"""Inputs and outputs of the demo's model's targets."""
CONFIG = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": RANK,
    "target_modules": sorted(name.rpartition(".")[2] for name in SHAPES),
    "base_model_name_or_path": BASE_MODEL,
}
INFERENCE_FLAGS = {
    "--max-rank": RANK,
    "--num-threads": 1,
    "--max-sequences": 16,
    "--adapter-memory": "256MiB",
    "--host-memory": "256MiB",
    "--log-level": "warning",
}

Tensors = dict[str, NDArray[np.float32]]


class Sync(NamedTuple):
    """Seconds until `push` returned, and until the last replica's first token."""

    pushed_s: float
    sampled_s: float


class Footprint(NamedTuple):
    """Bytes and rows after a number of pushes, and the memory of the store and of the largest
    replica."""

    pushes: int
    disk_bytes: int
    versions: int
    blobs: int
    images: int
    events: int
    store_rss_bytes: int
    replica_rss_bytes: int


def make_tensors(seed: int) -> Tensors:
    """Returns an adapter in a trainer's form."""
    random = np.random.default_rng(seed)
    found = {}
    for layer in range(NUM_LAYERS):
        for target, (num_in, num_out) in SHAPES.items():
            prefix = f"base_model.model.model.layers.{layer}.{target}"
            for role, shape in (("A", (RANK, num_in)), ("B", (num_out, RANK))):
                values = random.standard_normal(shape, np.float32)
                found[f"{prefix}.lora_{role}.weight"] = values * np.float32(1e-3)
    return found


def change(tensors: Tensors, step: int) -> None:
    """Changes all values a little, as a step of training does."""
    for values in tensors.values():
        values *= np.float32(1 + 1e-4 * (1 if step % 2 else -1))
    next(iter(tensors.values()))[0, 0] = step * 1e-6


class Fleet:
    """Runs a store and replicas of one inference service as processes, within the context."""

    def __init__(self, num_replicas: int, folder: Path) -> None:
        self._num_replicas = num_replicas
        self._folder = folder
        self._stack = ExitStack()
        self._systems: list[System] = []

    def __enter__(self) -> Fleet:
        flags = tuple(str(word) for flag in INFERENCE_FLAGS.items() for word in flag)
        store_flags = ("--log-level", "warning")
        for number in range(self._num_replicas):
            more = ("--store", self._systems[0].addresses.store) if number else ()
            settings = SystemSettings(
                MODEL, BASE_MODEL, store_flags=store_flags, inference_flags=(*flags, *more)
            )
            system = System(settings, self._folder / f"system-{number}")
            self._systems.append(self._stack.enter_context(system))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def store(self) -> str:
        return self._systems[0].addresses.store

    @property
    def replicas(self) -> list[str]:
        return [system.addresses.inference for system in self._systems]

    def footprint(self, num_pushes: int) -> Footprint:
        data = self._folder / "system-0" / "store"
        disk_bytes = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
        with sqlite3.connect(f"file:{data / 'catalog.sqlite3'}?mode=ro", uri=True) as catalog:
            rows = {
                table: catalog.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in ("versions", "blobs", "images", "events")
            }
        catalog.close()
        pids = [system.pids() for system in self._systems]
        store = tree_rss_bytes(pids[0]["store"])
        replicas = [tree_rss_bytes(each["inference"]) for each in pids]
        return Footprint(
            num_pushes,
            disk_bytes,
            **rows,
            store_rss_bytes=store,
            replica_rss_bytes=max(replicas),
        )


def tree_rss_bytes(pid: int) -> int:
    """Returns the resident memory of a process and its children."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:  # the process has ended in between
        return 0
    own = pages * os.sysconf("SC_PAGE_SIZE")
    return own + sum(tree_rss_bytes(int(child)) for child in children)


def generate(address: str, stopping: Any) -> None:
    """Keeps requests in flight at one replica, one after the other in each caller."""

    def call(seed: int) -> None:
        while not stopping.is_set():
            client.complete(PROMPT, adapter=NAME, max_tokens=OUT_TOKENS, ignore_eos=True, seed=seed)

    with Client(address) as client, ThreadPoolExecutor(IN_FLIGHT) as pool:
        for caller in [pool.submit(call, seed) for seed in range(IN_FLIGHT)]:
            caller.result()


@contextmanager
def traffic(addresses: Sequence[str]) -> Iterator[None]:
    """Keeps requests in flight at each replica, from another process than the trainer's."""
    context = multiprocessing.get_context("spawn")
    stopping = context.Event()
    callers = [context.Process(target=generate, args=(each, stopping)) for each in addresses]
    for caller in callers:
        caller.start()
    try:
        time.sleep(3.0)  # for imports, and for the first requests, which load the adapter
        yield
    finally:
        stopping.set()
        for caller in callers:
            caller.join()
    if any(caller.exitcode for caller in callers):
        raise RuntimeError("a caller has failed; see above")


def sample(pushed: Pushed, client: Client) -> None:
    answer = client.complete(PROMPT, adapter=NAME, max_tokens=1, temperature=0.0)
    assert answer.adapter is not None
    assert answer.adapter.digest == pushed.digest, "an older version has answered"


def measure(num_replicas: int, num_pushes: int, *, ephemeral: bool) -> list[Sync]:
    tensors, found = make_tensors(seed=1), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        fleet = stack.enter_context(Fleet(num_replicas, folder))
        trainer = stack.enter_context(Client(fleet.replicas, fleet.store))
        push = partial(
            trainer.push, NAME, tensors, CONFIG, wait="all", keep=KEEP, ephemeral=ephemeral
        )
        clients = [stack.enter_context(Client(each)) for each in fleet.replicas]
        pool = stack.enter_context(ThreadPoolExecutor(num_replicas))
        push()
        with traffic(fleet.replicas):
            for step in range(1, num_pushes + 2):
                change(tensors, step)
                began_s = time.perf_counter()
                pushed = push()
                pushed_s = time.perf_counter()
                list(pool.map(partial(sample, pushed), clients))
                found.append(Sync(pushed_s - began_s, time.perf_counter() - began_s))
                time.sleep(PAUSE_S)
    return found[1:]  # without the first of each kind, which takes longer


def measure_flat(num_pushes: int) -> list[Footprint]:
    """Returns the footprints of ephemeral pushes, at the start and after parts of them."""
    tensors = make_tensors(seed=2)
    reported = {max(1, int(part * num_pushes)) for part in REPORTED}
    with (
        tempfile.TemporaryDirectory() as name,
        Fleet(1, Path(name).resolve()) as fleet,
        Client(fleet.replicas, fleet.store) as trainer,
    ):
        found = [fleet.footprint(0)]
        for step in range(1, num_pushes + 1):
            change(tensors, step)
            trainer.push(NAME, tensors, CONFIG, wait="all", keep=KEEP)
            if step in reported:
                found.append(fleet.footprint(step))
    return found


def summarize(found: Sequence[Sync]) -> dict[str, float]:
    sampled = [each.sampled_s for each in found]
    return {
        "pushed_ms": 1e3 * median([each.pushed_s for each in found]),
        "sampled_ms": 1e3 * median(sampled),
        "sampled_p90_ms": 1e3 * percentile(sampled, 90),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--pushes", type=int, default=30)
    parser.add_argument("--flat", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER / "pushes.json")
    options = parser.parse_args()
    rows, seconds = [], {}
    for num_replicas in options.replicas:
        for kind in ("ephemeral", "durable"):
            found = measure(num_replicas, options.pushes, ephemeral=kind == "ephemeral")
            seconds[f"{num_replicas} {kind}"] = found
            rows.append({"replicas": num_replicas, "kind": kind, **summarize(found)})
    footprints = measure_flat(options.flat) if options.flat else []
    if rows:
        show("W6: pushes", tuple(rows[0]), [tuple(row.values()) for row in rows])
    if footprints:
        show("Footprint of pushes", Footprint._fields, footprints)
    left = [each._asdict() for each in footprints]
    write(options.out, "pushes", {"rows": rows, "footprints": left, "seconds": seconds})


if __name__ == "__main__":
    main()
