"""The floors of this very machine: what a step cannot be faster than, measured as ours is.

    python -m bench.floor [--model bench-200m] [--rounds 5] [--out bench/results/floor.json]

Matrix products run on weights that oneDNN has packed, one layer's after the other as in a step, so
that they come from memory. Medians.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.models import SHAPES, image_bytes, projections
from bench.results import FOLDER, median, show, write
from bench.store_process import bench_store
from bench.store_pull import read_raw

THREADS = 2
DECODE_SIZES = (1, 4, 16, 64)
PREFILL_TOKENS = 1024
BUFFER_BYTES = 512 << 20
HASH_BYTES = 64 << 20
RAW_BYTES = 256 << 20


class ModelFloor:
    """The products of one model. Shapes are [out, in]; q, k, v are one product, gate and up too."""

    def __init__(self, name: str) -> None:
        sizes = projections(name)
        hidden, mlp = sizes["down_proj"][1], sizes["down_proj"][0]
        self.num_layers = int(SHAPES[name]["num_hidden_layers"])
        self.vocab = int(SHAPES[name]["vocab_size"])
        self.hidden = hidden
        self.layer_shapes = [(hidden + 2 * sizes["k_proj"][1], hidden), (hidden, hidden)]
        self.layer_shapes += [(2 * mlp, hidden), (hidden, mlp)]
        self.adapter_bytes = image_bytes(name)
        self._weights = [
            [_random(*shape) for shape in self.layer_shapes] for _ in range(self.num_layers)
        ]
        self._head = _random(self.vocab, self.hidden)

    @property
    def flops_per_token(self) -> float:
        """Of all projections, without the head."""
        return 2.0 * self.num_layers * sum(out * into for out, into in self.layer_shapes)

    def projections_seconds(self, num_tokens: int, repeats: int) -> float:
        """All projections of one step of so many tokens."""
        inputs = {into: _random(num_tokens, into) for _, into in self.layer_shapes}
        packed = [_pack(w, num_tokens) for layer in self._weights for w in layer]
        order = [into for _, into in self.layer_shapes] * self.num_layers

        def step() -> None:
            for weight, into in zip(packed, order, strict=True):
                _multiply(inputs[into], weight)

        return _seconds(step, repeats)

    def head_seconds(self, num_tokens: int, repeats: int) -> float:
        """The output head, whose logits are fp32 sums."""
        inputs, packed = _random(num_tokens, self.hidden), _pack(self._head, num_tokens)
        return _seconds(lambda: _multiply(inputs, packed), repeats)

    def measure(self, repeats: int = 5) -> dict[str, Any]:
        """Seconds per step size, and FLOP/s of a large prefill."""
        prefill_s = self.projections_seconds(PREFILL_TOKENS, max(1, repeats // 2))
        return {
            "projections_seconds": {
                str(size): self.projections_seconds(size, repeats) for size in DECODE_SIZES
            },
            "head_seconds": {str(size): self.head_seconds(size, repeats) for size in DECODE_SIZES},
            "prefill_flops": self.flops_per_token * PREFILL_TOKENS / prefill_s,
            "read_bytes_per_second": read_rate(repeats),
        }

    def w1_rate(
        self, measured: dict[str, Any], num_requests: int, num_in: int, num_out: int, adapters: int
    ) -> float:
        """Output tokens per second of W1 if nothing but products and adapters' bytes took time."""
        size = str(num_requests)
        prefill_s = num_requests * num_in * self.flops_per_token / measured["prefill_flops"]
        step_s = measured["projections_seconds"][size] + measured["head_seconds"][size]
        lora_s = adapters * self.adapter_bytes / measured["read_bytes_per_second"]
        seconds = prefill_s + (num_out - 1) * (step_s + lora_s)
        return float(num_requests * num_out / seconds)


def read_rate(repeats: int = 5) -> float:
    """Bytes per second of reading memory, with all threads."""
    data = torch.ones(BUFFER_BYTES // 4)
    return BUFFER_BYTES / _seconds(lambda: data.amax(), repeats)


def copy_rate(repeats: int = 5) -> float:
    """Bytes copied per second, with all threads."""
    source = torch.ones(BUFFER_BYTES // 4)
    target = torch.empty_like(source)
    return BUFFER_BYTES / _seconds(lambda: target.copy_(source), repeats)


def hash_rate(repeats: int = 5) -> float:
    """Bytes per second of sha256 on one core."""
    data = bytes(HASH_BYTES)
    return HASH_BYTES / _seconds(lambda: hashlib.sha256(data), repeats)


def stream_rate(repeats: int = 5) -> float:
    """Bytes per second of a plain gRPC stream from Python to Python on this machine."""
    with tempfile.TemporaryDirectory() as folder, bench_store(Path(folder)) as store:
        return RAW_BYTES / _seconds(lambda: read_raw(store, RAW_BYTES), repeats)


def _random(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-1, 1)


def _pack(weight: torch.Tensor, num_tokens: int) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, num_tokens)
    return packed


def _multiply(inputs: torch.Tensor, packed: torch.Tensor) -> None:
    torch.ops.mkldnn._linear_pointwise(inputs, packed, None, "none", [], "")


def _seconds(work: Callable[[], object], repeats: int) -> float:
    """The median of some runs after a first."""
    work()
    found = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - began_s)
    return median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="bench-200m")
    parser.add_argument("--rounds", type=int, default=5)
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
    rows = [(f"projections, {n} tokens", 1e3 * s) for n, s in found["projections_seconds"].items()]
    rows += [(f"head, {n} tokens", 1e3 * s) for n, s in found["head_seconds"].items()]
    show(f"{options.model}: floors of a step", ("what", "ms"), rows)
    rates = [(name, found[name] / 1e9) for name in found if name.endswith("_per_second")]
    rates.append(("prefill, TFLOP/s", found["prefill_flops"] / 1e12))
    show("rates", ("what", "G per second"), rates)
    write(options.out, "floor", {"model": options.model, **found})


if __name__ == "__main__":
    main()
