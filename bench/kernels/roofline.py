"""Measures the floors of a step's time on this machine, with the methods of our benchmarks.

    python -m bench.kernels.roofline [--model bench-200m] [--rounds 10]
        [--out bench/results/floor.json]

There are two for each number of tokens:

* the floor, in `projections_seconds` and `head_seconds`, is the best time of a kernel here: the
  faster of oneDNN and ours, on a step's exact products one after the other
  (`bench.kernels.gemm_shapes`);
* the bound, in `projections_bound_seconds` and `head_bound_seconds`, is arithmetic: for each
  product max(bytes / read rate, flops / peak), at the best rates measured.

The read rate is the better of two: a read of a large buffer, and the reads of a decode step's
products. The peak is the best rate of all measured products, a goal for a prefill of 1024 tokens.
Floors are the best of the rounds, because they show the hardware's limits. The rates of copies,
hashes and streams, with which other results are compared, are medians.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.kernels.gemm_shapes import Products, seconds, step_shapes
from bench.models import SHAPES, decoder, image_bytes
from bench.results import FOLDER, median, show, write
from bench.store.process import bench_store
from bench.store.pull import read_raw
from inference_svc.model.description import ExpertsProjection, Projection
from inference_svc.model.recurrent_states import slot_bytes
from inference_svc.model.walk import weights_of
from kernels.host_memory import allocate_host

THREADS = 2
DECODE_SIZES = (1, 4, 16, 64)
PREFILL_TOKENS = 1024
MIN_REPEATS = 5
HEAD_BYTES = 256 << 20
BUFFER_BYTES = 512 << 20
HASH_BYTES = 64 << 20
RAW_BYTES = 256 << 20


class ModelFloor:
    """The products of one model."""

    def __init__(self, name: str) -> None:
        described = decoder(name)
        vocab, hidden = described.vocab_size, described.hidden_size
        self.adapter_bytes = image_bytes(name)
        self.state_bytes = slot_bytes(described)
        self.projections = Products(step_shapes(described))
        attention, last = described.attentions[-1], described.num_layers - 1
        whole = sum(
            spec.out_features * spec.in_features
            for spec, layer in weights_of(described)
            if layer == last and isinstance(spec, Projection | ExpertsProjection)
        )
        heads_size = attention.q_size * (1 + attention.has_gate)
        keys_and_values = attention.qkv.out_features - heads_size
        self._last_flops = 2.0 * (whole - keys_and_values * attention.qkv.in_features)
        # Logits are sums in fp32. There are several copies, so that each comes from memory.
        self._num_heads = -(-HEAD_BYTES // (2 * vocab * hidden))
        self.head = Products([(vocab, hidden)] * self._num_heads, torch.float32)

    @property
    def flops_per_token(self) -> float:
        """Operations of all projections, without the head."""
        return self.projections.flops_per_token

    def prefill_flops(self, num_tokens: int, num_sampled: int) -> float:
        """Returns the operations. In the last layer, tokens that do not sample need only keys and
        values."""
        return num_tokens * self.flops_per_token - (num_tokens - num_sampled) * self._last_flops

    def measure(self, repeats: int = 5) -> dict[str, Any]:
        """Returns floors and bounds in seconds for each number of tokens, and their rates. A
        prefill takes seconds, so it is measured half as often."""
        repeats = max(repeats, MIN_REPEATS)
        layers = {n: self.projections.best(n, repeats) for n in DECODE_SIZES}
        layers[PREFILL_TOKENS] = self.projections.best(PREFILL_TOKENS, repeats // 2)
        heads = {n: self.head.best(n, repeats) for n in DECODE_SIZES}
        rates = {n: n * self.flops_per_token / best.seconds for n, best in layers.items()}
        peak, read = max(rates.values()), read_rate(repeats)
        for products, found in ((self.projections, layers), (self.head, heads)):
            for n in DECODE_SIZES:
                peak = max(peak, n * products.flops_per_token / found[n].seconds)
                read = max(read, products.num_bytes / found[n].seconds)
        copies = self._num_heads
        return {
            "projections_seconds": {str(n): layers[n].seconds for n in DECODE_SIZES},
            "projections_bound_seconds": {
                str(n): self.projections.bound_seconds(n, read, peak) for n in DECODE_SIZES
            },
            "projections_kernel": {str(n): best.kernel for n, best in layers.items()},
            "head_seconds": {str(n): best.seconds / copies for n, best in heads.items()},
            "head_bound_seconds": {
                str(n): self.head.bound_seconds(n, read, peak) / copies for n in DECODE_SIZES
            },
            "head_kernel": {str(n): best.kernel for n, best in heads.items()},
            "prefill_flops_per_second": rates[PREFILL_TOKENS],
            "peak_flops_per_second": peak,
            "read_bytes_per_second": read,
        }

    def throughput_rate(
        self,
        measured: dict[str, Any],
        num_requests: int,
        num_in: int,
        num_out: int,
        adapters: int,
        *,
        is_bound: bool = False,
    ) -> float:
        """Returns W1's output tokens per second if only products, adapters' bytes and recurrent
        states took time: at the best kernel's speed, or for the bound at the hardware's. A step
        reads and writes each state once."""
        kind, rate = ("bound_seconds", "peak") if is_bound else ("seconds", "prefill")
        size = str(num_requests)
        flops = self.prefill_flops(num_requests * num_in, num_requests)
        prefill_s = flops / measured[f"{rate}_flops_per_second"]
        step_s: float = measured[f"projections_{kind}"][size] + measured[f"head_{kind}"][size]
        moved_bytes = adapters * self.adapter_bytes + 2 * num_requests * self.state_bytes
        moved_s = moved_bytes / measured["read_bytes_per_second"]
        whole_s = prefill_s + (num_out - 1) * (step_s + moved_s)
        return float(num_requests * num_out / whole_s)


def read_rate(repeats: int = 5) -> float:
    """Returns the best bytes per second of reads from memory in huge pages, with all threads."""
    data = allocate_host(BUFFER_BYTES).view(torch.float32)
    return BUFFER_BYTES / min(seconds(lambda: data.amax(), repeats))


def copy_rate(repeats: int = 5) -> float:
    """Returns the bytes copied per second, with all threads."""
    source, target = (allocate_host(BUFFER_BYTES).view(torch.float32) for _ in range(2))
    return BUFFER_BYTES / median(seconds(lambda: target.copy_(source), repeats))


def hash_rate(repeats: int = 5, threads: int = 1) -> float:
    """Returns the bytes per second of sha256 in so many threads, each with a core of its own."""
    data = bytes(HASH_BYTES)
    with ThreadPoolExecutor(threads) as pool:

        def hash_all() -> None:
            for done in [pool.submit(hashlib.sha256, data) for _ in range(threads)]:
                done.result()

        return threads * HASH_BYTES / median(seconds(hash_all, repeats))


def stream_rate(repeats: int = 5) -> float:
    """Returns the bytes per second of a plain gRPC stream from Python to Python on this machine."""
    with tempfile.TemporaryDirectory() as folder, bench_store(Path(folder)) as store:
        return RAW_BYTES / median(seconds(lambda: read_raw(store, RAW_BYTES), repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="bench-200m")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=FOLDER / "floor.json")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    floor = ModelFloor(options.model)
    found = floor.measure(options.rounds)
    found |= {
        "copy_bytes_per_second": copy_rate(options.rounds),
        "hash_bytes_per_second": hash_rate(options.rounds),
        "stream_bytes_per_second": stream_rate(options.rounds),
        "adapter_bytes": floor.adapter_bytes,
    }
    rows = []
    for what in ("projections", "head"):
        for n, floor_s in found[f"{what}_seconds"].items():
            bound_s, kernel = found[f"{what}_bound_seconds"][n], found[f"{what}_kernel"][n]
            rows.append((f"{what}, {n} tokens", 1e3 * floor_s, kernel, 1e3 * bound_s))
    columns = ("what", "floor, ms", "of", "bound, ms")
    show(f"{options.model}: floors of a step", columns, rows)
    rates = [(name, found[name] / 1e9) for name in found if name.endswith("_per_second")]
    show("rates", ("rate", "G per second"), rates)
    write(options.out, "floor", {"model": options.model, **found})


if __name__ == "__main__":
    main()
