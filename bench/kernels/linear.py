"""Compares our base projections with oneDNN's and its packed weights.

All projections of a model run in the order of a step, each with its own weights, so that they come
from memory as in a real step. Ours and oneDNN's take turns. Results are the minimum and the median
over the rounds.

    python -m bench.kernels.linear [--model bench-200m] [--threads 2] [--rounds 30]
        [--variant avx512] [--dtype bfloat16] [TOKENS ...]

oneDNN uses all instructions of the processor, unless ONEDNN_MAX_CPU_ISA names fewer, such as
AVX512_CORE or AVX2.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table

from bench.kernels.gemm_shapes import step_shapes
from bench.models import SHAPES, decoder
from kernels.host_memory import allocate_host, row_stride
from kernels.linear import PackedLinear, linear_op
from kernels.native.build import FLAGS
from kernels.native.library import Library, NativeOp, load

NUM_TOKENS = (1, 4, 8, 16, 32, 64, 256, 1024)


Shapes = Sequence[tuple[int, int]]
"""A decoder's projections, [out, in] each."""


class Projections:
    """Projections with the same weights for our kernels and for oneDNN."""

    def __init__(
        self, shapes: Shapes, library: Library, max_tokens: int, dtype: torch.dtype
    ) -> None:
        self._num_tokens = torch.ones(1, dtype=torch.int32)
        # As in a step: layers share them, and rows are apart. oneDNN reads rows side by side, and
        # writes memory that was just freed.
        self._x = {size: torch.randn(max_tokens, size).to(dtype) for _, size in shapes}
        inputs = {size: _spaced(max_tokens, size, dtype).copy_(x) for size, x in self._x.items()}
        outs = {size: _spaced(max_tokens, size, dtype) for size, _ in shapes}
        ops: list[NativeOp] = []
        self._theirs: list[tuple[int, torch.Tensor]] = []
        for size_out, size_in in shapes:
            weight = torch.randn(size_out, size_in).to(dtype)
            packed = PackedLinear.pack(weight)
            ops.append(linear_op(inputs[size_in], packed, outs[size_out], self._num_tokens))
            theirs = torch.ops.mkldnn._reorder_linear_weight(weight)
            self._theirs.append((size_in, theirs))
        self._program = library.program(ops)

    def ours(self, num_tokens: int) -> None:
        self._num_tokens.fill_(num_tokens)
        self._program.run()

    def theirs(self, num_tokens: int) -> None:
        product = torch.ops.mkldnn._linear_pointwise
        for size_in, weight in self._theirs:
            product(self._x[size_in][:num_tokens], weight, None, "none", [], "")


def _spaced(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a matrix as a step's workspace has it."""
    stride = row_stride(width, dtype.itemsize)
    memory = allocate_host(num_rows * stride * dtype.itemsize).view(dtype)
    return memory.view(num_rows, stride)[:, :width]


def seconds(run: Callable[[int], None], num_tokens: int) -> float:
    start = time.perf_counter()
    run(num_tokens)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=SHAPES, default="bench-200m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--variant", choices=FLAGS, help="our kernels; the best by default")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("num_tokens", type=int, nargs="*", default=NUM_TOKENS, metavar="TOKENS")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = load(args.variant)
    assert library is not None, "there are no native kernels to compare"
    shapes = step_shapes(decoder(args.model))
    dtype = getattr(torch, args.dtype)
    both = Projections(shapes, library, max(args.num_tokens), dtype)
    table = Table(
        title=f"{args.model}, {args.dtype}, {args.threads} threads, {library.variant}, ms"
    )
    for column in ("tokens", "ours", "median", "oneDNN", "median", "ratio", "TFLOP/s", "GB/s"):
        table.add_column(column, justify="right")
    with torch.inference_mode():
        for num_tokens in args.num_tokens:
            table.add_row(*measure(both, shapes, num_tokens, args.rounds, dtype.itemsize))
    Console().print(table)


def measure(
    projections: Projections, shapes: Shapes, num_tokens: int, most_rounds: int, item_bytes: int
) -> tuple[str, ...]:
    """Returns a row: both times, their ratio, and our rates of arithmetic and bytes."""
    rounds = max(3, min(most_rounds, most_rounds * 64 // num_tokens))
    both = [
        (seconds(projections.ours, num_tokens), seconds(projections.theirs, num_tokens))
        for _ in range(rounds)
    ]
    ours, theirs = zip(*both, strict=True)
    best = min(ours)
    num_weights = sum(size_out * size_in for size_out, size_in in shapes)
    times = [best, statistics.median(ours), min(theirs), statistics.median(theirs)]
    return (
        str(num_tokens),
        *(f"{value * 1e3:.1f}" for value in times),
        f"{min(theirs) / best:.2f}",
        f"{2 * num_weights * num_tokens / best / 1e12:.3f}",
        f"{item_bytes * num_weights / best / 1e9:.1f}",
    )


if __name__ == "__main__":
    main()
