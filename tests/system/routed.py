"""One store and three replicas of the inference service as real processes, and many adapters."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file, save_file

from bench.workloads.trace import Traffic
from loadout import AsyncClient, Client
from loadout.demo.process import Process
from loadout.prometheus import Metrics, parse, scrape
from tests.support.forks import ForkedProcess
from tests.support.models.zoo import Zoo
from tests.support.wait import TIMEOUT_S
from tests.system.services import GRACE_S, READY_S

MAX_LORAS = 32
"""What each replica holds, as in W4."""
NUM_CALLERS = 4
PROMPT = [ord(char) for char in "a prompt"]


class Routed:
    """A store, and `replicas` by address: one that was killed can be started again, on its port."""

    def __init__(
        self, zoo: Zoo, folder: Path, num_replicas: int = 3, max_loras: int = MAX_LORAS
    ) -> None:
        self._zoo = zoo
        self.folder = folder
        self._num_replicas = num_replicas
        self._max_loras = max_loras
        self._numbers: dict[str, int] = {}
        self._metrics: dict[str, str] = {}
        self.replicas: dict[str, Process] = {}

    def __enter__(self) -> Self:
        sources = self.folder / "sources"
        sources.mkdir()
        ready = self.folder / "store.json"
        command = [
            *(sys.executable, "-m", "adapter_store", "--listen", "127.0.0.1:0"),
            *("--metrics-listen", "127.0.0.1:0", "--data-dir", str(self.folder / "store")),
            *("--source-roots", str(sources), "--ready-file", str(ready)),
        ]
        self._store = ForkedProcess("store", command, self.folder, ready)
        self.store_address = self._store.wait_ready(READY_S)["grpc"]
        started = [self._start(number, "127.0.0.1:0") for number in range(self._num_replicas)]
        for number, process in enumerate(started):
            self._await(number, process)
        return self

    def __exit__(self, *exc: object) -> None:
        running = [each for each in (*self.replicas.values(), self._store) if each.is_alive]
        for process in running:  # all at once: each takes a while
            os.kill(process.pid, signal.SIGTERM)
        for process in running:
            process.stop(GRACE_S)

    def kill(self, address: str) -> None:
        os.kill(self.replicas[address].pid, signal.SIGKILL)
        self.replicas[address].stop(GRACE_S)

    def drain(self, address: str) -> None:
        """Tells a replica to finish its requests and end; `wait_ended` returns when it has."""
        os.kill(self.replicas[address].pid, signal.SIGTERM)

    def wait_ended(self, address: str) -> None:
        assert self.replicas[address].stop(GRACE_S) == 0

    def kill_store(self) -> None:
        os.kill(self._store.pid, signal.SIGKILL)
        self._store.stop(GRACE_S)

    def restart(self, address: str) -> None:
        number = self._numbers[address]
        self._await(number, self._start(number, address))

    def _start(self, number: int, listen: str) -> Process:
        name = f"inference-{number}"
        ready = self.folder / f"{name}.json"
        command = [
            *(sys.executable, "-m", "inference_svc", "--model", str(self._zoo.model_dir)),
            *("--base-model", "llama", "--store", self.store_address, "--num-threads", "1"),
            *("--listen", listen, "--metrics-listen", "127.0.0.1:0", "--engine", "thread"),
            *("--kv-memory", "8MiB", "--adapter-memory", "8MiB", "--max-model-len", "512"),
            # Hits are the routing's alone.
            *("--max-loras", str(self._max_loras), "--no-prefetch", "--ready-file", str(ready)),
        ]
        return ForkedProcess(name, command, self.folder, ready)

    def _await(self, number: int, process: Process) -> None:
        found = process.wait_ready(READY_S)
        self.replicas[found["grpc"]] = process
        self._metrics[found["grpc"]] = found["metrics"]
        self._numbers[found["grpc"]] = number

    def register(self, count: int) -> list[str]:
        """Registers adapters that differ from each other in content, and returns their names."""
        original = self._zoo.adapter_dirs["r1"]
        tensors = load_file(original / "adapter_model.safetensors")
        first = min(tensors)
        names = [f"tuned-{number}" for number in range(count)]
        with Client(store=self.store_address) as client:
            for number, name in enumerate(names):
                folder = self.folder / "sources" / name
                shutil.copytree(original, folder)
                own = tensors | {first: torch.full_like(tensors[first], 1e-3 * (number + 1))}
                save_file(own, folder / "adapter_model.safetensors")
                client.register(name, f"file://{folder}")
        return names

    def generated(self) -> Counter[str]:
        """Counts the generations that have ended so far, by replica; a dead one has none."""
        return self._counts("loadout_inference_requests_total")

    def hits(self) -> tuple[int, int]:
        """Counts the requests whose adapter was on the device, and all that had an adapter."""
        hits = self._counts("loadout_inference_tier_hits_total", tier="device").total()
        misses = self._counts("loadout_inference_tier_misses_total", tier="device").total()
        return hits, hits + misses

    def scrapes(self) -> list[Metrics]:
        return [scrape(address) for address in self._metrics.values()]

    def _counts(self, name: str, **labels: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for address, metrics_address in self._metrics.items():
            if self.replicas[address].is_alive:
                found[address] = int(_scrape_one(metrics_address, name).sum(name, **labels))
        return found


def _scrape_one(address: str, name: str) -> Metrics:
    """Returns the samples of one name: to parse all takes longer than what is measured."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines(keepends=True)
    return parse("".join(line for line in lines if line.startswith((f"{name}{{", f"{name} "))))


def ask(client: Client, name: str) -> None:
    """Makes one short generation."""
    done = client.complete(
        PROMPT, adapter=name, max_tokens=1, temperature=0.0, ignore_eos=True, timeout_s=60
    )
    assert len(done.token_ids) == 1


def adapters_of_w4(names: Sequence[str], alpha: float, num: int, seed: int = 5) -> list[str]:
    """Returns the adapters of W4's first `num` requests, one after the other."""
    arrivals = islice(Traffic(len(names), alpha).arrivals(seed), num)
    return [names[arrival.adapter] for arrival in arrivals if arrival.adapter is not None]


def hit_share(
    system: Routed, addresses: str | Sequence[str], wanted: Sequence[str], num_warm: int
) -> float:
    """The share of requests whose adapter was on the device; the first `num_warm` do not count."""
    play(addresses, wanted[:num_warm])
    counted = wanted[num_warm:]
    hits_before, total_before = system.hits()
    play(addresses, counted)
    hits, total = system.hits()
    assert total - total_before == len(counted)
    return (hits - hits_before) / len(counted)


def play(addresses: str | Sequence[str], wanted: Iterable[str]) -> None:
    """Makes short generations with these adapters: some callers, who each wait for the answer."""

    async def main() -> None:
        todo = iter(wanted)
        async with AsyncClient(inference=addresses) as client, asyncio.TaskGroup() as group:

            async def call() -> None:
                for name in todo:
                    await client.complete(
                        PROMPT, adapter=name, max_tokens=1, temperature=0.0, timeout_s=60
                    )

            for _ in range(NUM_CALLERS):
                group.create_task(call())

    asyncio.run(main())
