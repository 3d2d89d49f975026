"""W2: time to the first token of one request: base, resident adapter, cold adapter.

    python -m bench.workloads.ttft [--model bench-200m] [--rank 16] [--peers vllm] [--rounds 10]
        [--num-in 32] [--out FILE]

Over gRPC, both services run as processes. A cold adapter is compiled in the store's memory and was
never on this inference service, which maps it; "registered and cold" begins with RegisterAdapter
from a local folder. With peers our engine also runs in a process without gRPC, like vLLM, whose
cold adapters come from a local folder. All take turns within a round. The same run measures the
rate of sha256 on one core, for this limit:

    cold <= base + 1.2 * image / hash rate + 3 ms
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.kernels.roofline import THREADS, copy_rate, hash_rate
from bench.machine import best_kernels
from bench.models import RANK, SHAPES, Prepared, image_bytes, make_variants, prepare, prompts
from bench.plots import plot_bars
from bench.results import FOLDER, median, show, write
from bench.services import Services, Wanted
from bench.systems.child import KINDS, Child
from bench.systems.protocol import Ask, Job
from bench.workloads.throughput import check_comparable, make_spec

NUM_IN = 32
MAX_LEN = 512
MAX_RESIDENT = 16
ALLOWED_S = 0.003
"""Time that a cold load may take in addition to its bytes' time."""
OF_HASH = 1.2
"""The time of its bytes, as a multiple of one core's time for their hashes."""

PAUSE_S = 0.3
"""Pause after which idle threads no longer spin, and the store's writes are on its disk."""

Times = dict[str, list[float]]
Works = dict[str, Callable[[], float]]


class OverGrpc:
    """Measures both services over gRPC, in seconds."""

    def __init__(
        self, prepared: Prepared, services: Services, folders: Iterator[Path], num_in: int
    ) -> None:
        self._services = services
        self._folders = folders
        self._prompt = prompts(1, num_in, prepared.vocab)[0]
        self._number = 0
        services.register("resident", prepared.adapters["0"])
        services.client.load("resident")

    def base(self) -> float:
        self._settle()
        return self._first_token()

    def resident(self) -> float:
        self._settle()
        return self._first_token("resident")

    def cold(self) -> float:
        name = self._name()
        self._services.register(name, next(self._folders))
        self._services.pull_once(name)
        self._settle()
        return self._first_token(name)

    def registered_and_cold(self) -> float:
        name, folder = self._name(), next(self._folders)
        self._settle()
        began_s = time.perf_counter()
        registration = self._services.register(name, folder, compiled=False)
        self._first_token(name, registration.revision)
        return time.perf_counter() - began_s

    def _settle(self) -> None:
        """Serves one request and pauses, so that all measurements start from the same state."""
        time.sleep(PAUSE_S)
        self._first_token()
        time.sleep(PAUSE_S)

    def _name(self) -> str:
        self._number += 1
        return f"cold-{self._number}"

    def _first_token(self, adapter: str = "", min_revision: int = 0) -> float:
        began_s = time.perf_counter()
        chunks = self._services.client.generate(
            self._prompt,
            adapter=adapter,
            min_revision=min_revision,
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
        )
        next(chunk for chunk in chunks if chunk.token_ids)
        return time.perf_counter() - began_s


class InChild:
    """Measures one token of a system in its process, by the system's own clock."""

    def __init__(
        self, prepared: Prepared, child: Child, folders: Iterator[Path], num_in: int
    ) -> None:
        self._child = child
        self._folders = folders
        self._prompt = prompts(1, num_in, prepared.vocab)[0]
        self._number = 0
        child.set_resident(["0"])

    def base(self) -> float:
        self._settle()
        return self._first_token("")

    def resident(self) -> float:
        self._settle()
        return self._first_token("0")

    def cold(self) -> float:
        """Times the first token of an adapter from a local folder."""
        self._number += 1
        name = f"cold-{self._number}"
        self._child.register(name, next(self._folders))
        self._settle()
        return self._first_token(name)

    def _settle(self) -> None:
        self._first_token("")
        self._child.wait_for_rest()

    def _first_token(self, adapter: str) -> float:
        return self._child.run(Job([Ask(self._prompt, 1, adapter)])).seconds


def wanted_for(prepared: Prepared, source_root: Path, num_in: int, rank: int = RANK) -> Wanted:
    """Returns limits of services for one request at a time, with adapters under `source_root`."""
    return Wanted(
        prepared.model_dir,
        prepared.name,
        max_resident=MAX_RESIDENT,
        max_rank=rank,
        max_sequences=MAX_RESIDENT,
        max_len=MAX_LEN + num_in,
        num_threads=THREADS,
        prefix_cache=False,
        source_root=source_root,
    )


def measure(
    prepared: Prepared, peers: list[str], rounds: int, num_in: int, rank: int = RANK
) -> dict[str, Any]:
    times: Times = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        folders = make_variants(prepared.adapters["0"], folder / "adapters")
        wanted = wanted_for(prepared, folder, num_in, rank)
        services = stack.enter_context(Services(wanted, folder))
        grpc = OverGrpc(prepared, services, folders, num_in)
        works: Works = {
            "gRPC base": grpc.base,
            "gRPC resident": grpc.resident,
            "gRPC cold": grpc.cold,
            "gRPC registered and cold": grpc.registered_and_cold,
        }
        spec = replace(make_spec(prepared, MAX_RESIDENT), max_len=wanted.max_len, max_rank=rank)
        for peer in ["ours", *peers] if peers else []:
            child = stack.enter_context(Child(peer, spec, folder / peer))
            system = InChild(prepared, child, folders, num_in)
            works |= {f"{peer} base": system.base, f"{peer} resident": system.resident}
            if peer != "ours":  # without gRPC our engine has no store, and no cold adapter
                works[f"{peer} cold"] = system.cold
        for round_index in range(rounds + 1):
            for what, work in _rotated(works, round_index):
                found = work()
                if round_index:
                    times.setdefault(what, []).append(found)
    rates = {"hash_rate": hash_rate(), "hash_rate_of_two": hash_rate(threads=2)}
    return {"seconds": times, **rates, "copy_rate": copy_rate()}


def _rotated(works: Works, by: int) -> list[tuple[str, Callable[[], float]]]:
    """Rotates the works, so that each round begins with the next."""
    items = list(works.items())
    by %= len(items)
    return items[by:] + items[:by]


def summarize(found: dict[str, Any], num_bytes: int) -> dict[str, Any]:
    medians = {what: median(times) for what, times in found["seconds"].items()}
    base = medians["gRPC base"]
    ratios = {
        what: seconds / medians[what.partition(" ")[0] + " base"]
        for what, seconds in medians.items()
        if not what.endswith(" base")
    }
    cold_limit_s = base + OF_HASH * num_bytes / found["hash_rate"] + ALLOWED_S
    return {
        "seconds": medians,
        "over base": ratios,
        "cold_limit_s": cold_limit_s,
        "gRPC cold over base, s": medians["gRPC cold"] - base,
        "gRPC cold / its limit": medians["gRPC cold"] / cold_limit_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="bench-200m")
    parser.add_argument("--rank", type=int, default=RANK, help="of the adapters")
    parser.add_argument("--peers", default="", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--num-in", type=int, default=NUM_IN, help="tokens of the prompt")
    parser.add_argument("--allow-torch", action="store_true")
    parser.add_argument("--out", type=Path, default=FOLDER / "ttft.json")
    options = parser.parse_args()
    peers = [peer for peer in options.peers.split(",") if peer]
    check_comparable(best_kernels(), ["ours", *peers], options.allow_torch)
    prepared = prepare(options.model, MAX_RESIDENT if peers else 1, rank=options.rank)
    found = measure(prepared, peers, options.rounds, options.num_in, options.rank)
    num_bytes = image_bytes(options.model, options.rank)
    summary = summarize(found, num_bytes)
    ratios = summary["over base"]
    rows = [(what, 1e3 * s, ratios.get(what)) for what, s in summary["seconds"].items()]
    show(f"W2, {options.model}", ("first token", "ms", "over base"), rows)
    cold = summary["gRPC cold / its limit"]
    print(f"cold: {cold:.2f} of the limit of {1e3 * summary['cold_limit_s']:.1f} ms")
    print({name: f"{found[name] / 1e9:.2f} GB/s" for name in found if "rate" in name})
    workload = {"model": options.model, "num_in": options.num_in, "rank": options.rank}
    workload["image_bytes"] = num_bytes
    write(options.out, "W2", {**workload, "summary": summary, **found})
    systems = {what.partition(" ")[0] for what in summary["seconds"]}
    kinds = ("base", "resident", "cold", "registered and cold")
    series = {
        system: [1e3 * summary["seconds"].get(f"{system} {kind}", float("nan")) for kind in kinds]
        for system in sorted(systems)
    }
    plot = options.out.with_suffix(".png")
    plot_bars(plot, f"W2, {options.model}", "first token, ms", kinds, series)


if __name__ == "__main__":
    main()
