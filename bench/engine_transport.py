"""Compares the engine in a thread of the gRPC server with the engine in its own process.

The model is so small that a step is nearly all host work. Both servers run at the same time and
take turns with 64 concurrent streams over gRPC. The benchmark reports tokens per second, the 99th
percentile of the time between two messages of a stream, and each step's time outside the model.

    python -m bench.engine_transport [--rounds 5] [--tokens 128] [--streams 64]
                                    [--out PATH] [FLAGS OF THE SERVICE ...]

The first round warms up, and the first stream of every round connects; neither counts.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from bench.results import FOLDER, median, percentile, show, write
from loadout.demo.process import Process
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc
from tests.support.models.zoo import make_zoo

READY_S, GRACE_S = 120.0, 30.0
KINDS = ("thread", "process")
HISTOGRAMS = ("step_host_seconds", "step_seconds")


@dataclass
class Server:
    """One inference service, and its measurements."""

    kind: str
    process: Process
    address: str
    metrics: str
    rates: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=dict)
    """Mean seconds of a step in each round, by the names of HISTOGRAMS."""

    @classmethod
    def start(cls, kind: str, model_dir: Path, folder: Path, flags: list[str]) -> Server:
        folder.mkdir()
        ready = folder / "ready.json"
        command = [
            *(sys.executable, "-m", "inference_svc", "--model", str(model_dir), "--engine", kind),
            *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
            *("--kv-memory", "64MiB", "--ready-file", str(ready), *flags),
        ]
        process = Process("inference", command, folder, ready)
        found = process.wait_ready(READY_S)
        return cls(kind, process, found["grpc"], found["metrics"])

    def scrape(self, name: str) -> tuple[float, float]:
        """Returns the sum and count of a histogram."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics") as response:
            text = response.read().decode()
        values = [
            re.search(rf"^loadout_inference_{name}_{part} (\S+)$", text, re.MULTILINE)
            for part in ("sum", "count")
        ]
        total, count = (float(value[1]) if value else 0.0 for value in values)
        return total, count

    def end_warm_up(self) -> None:
        """Discards the measurements so far."""
        self.rates.clear()
        self.gaps_s.clear()
        self.steps.clear()

    async def ask(self, num_streams: int, num_tokens: int) -> None:
        """Runs one round, every stream to its end."""
        params = pb.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        gaps_s: list[float] = []

        async def stream(stub: pb_grpc.InferenceServiceStub, index: int) -> None:
            ids = pb.TokenIds(ids=[5 + index % 100] * 8)
            last_s = None
            async for _ in stub.Generate(pb.GenerateRequest(token_ids=ids, sampling=params)):
                now_s = time.perf_counter()
                if last_s is not None:
                    gaps_s.append(now_s - last_s)
                last_s = now_s

        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            await stream(stub, 0)
            gaps_s.clear()
            before = {name: self.scrape(name) for name in HISTOGRAMS}
            began_s = time.perf_counter()
            await asyncio.gather(*(stream(stub, index) for index in range(num_streams)))
            self.rates.append(num_streams * num_tokens / (time.perf_counter() - began_s))
        self.gaps_s += gaps_s
        for name, (sum_before_s, count_before) in before.items():
            sum_s, count = self.scrape(name)
            mean_s = (sum_s - sum_before_s) / (count - count_before)
            self.steps.setdefault(name, []).append(mean_s)


def measure(
    rounds: int, num_streams: int, num_tokens: int, flags: list[str]
) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model_dir = make_zoo("llama", root / "zoo").model_dir
        servers = [Server.start(kind, model_dir, root / kind, flags) for kind in KINDS]
        try:
            for index in range(rounds + 1):
                for server in servers:
                    asyncio.run(server.ask(num_streams, num_tokens))
                    if index == 0:
                        server.end_warm_up()
            for server in servers:
                results[server.kind] = _summary(server)
        finally:
            for server in servers:
                server.process.stop(GRACE_S)
    return results


def _summary(server: Server) -> dict[str, float]:
    return {
        "tokens_per_second": median(server.rates),
        "best_tokens_per_second": max(server.rates),
        "gap_p99_ms": 1e3 * percentile(server.gaps_s, 99),
        "step_ms": 1e3 * median(server.steps["step_seconds"]),
        "step_host_ms": 1e3 * median(server.steps["step_host_seconds"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=FOLDER / "engine_transport.json")
    arguments, flags = parser.parse_known_args()
    results = measure(arguments.rounds, arguments.streams, arguments.tokens, flags)
    columns = ("engine in a", *next(iter(results.values())))
    show(
        "engine transport", columns, [(kind, *values.values()) for kind, values in results.items()]
    )
    workload = {"streams": arguments.streams, "tokens": arguments.tokens, "flags": flags}
    write(arguments.out, "engine transport", {**workload, "systems": results})


if __name__ == "__main__":
    main()
