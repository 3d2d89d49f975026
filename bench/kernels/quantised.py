"""Compares products with quantised weights with those in bf16, in the order of a step.

All projections of a model run one after the other, each with its own weights, so that they come
from memory as in a real step. All formats take turns. Results are medians over the rounds, and for
few tokens the share of the floor: the time to read the packed bytes at the rate of a sum over a
large buffer, which is measured in each round, too.

    python -m bench.kernels.quantised [--model bench-1b] [--threads 2] [--rounds 15]
        [--formats int4 ...] [TOKENS ...]
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
from kernels.host_memory import Slab, allocate_host
from kernels.linear import PackedLinear, linear_op
from kernels.native.library import Library, NativeOp, Program, load
from kernels.quantised import Activations, Codes, QuantisedRows, WeightFormat
from kernels.quantised.native import Int8Inputs, quantised_ops
from kernels.quantised.pack import PackedQuantised

NUM_TOKENS = (1, 4, 16, 64, 512)
FORMATS = {
    "int4": WeightFormat(Codes.INT4, 128, scales="float16"),
    "uint4": WeightFormat(Codes.UINT4, 128, has_offsets=True, scales="float16"),
    "int4-32": WeightFormat(Codes.INT4, 32, scales="float16"),
    "nf4": WeightFormat(Codes.NF4, 64),
    "fp4": WeightFormat(Codes.FP4, 32, scales="bfloat16"),
    "int8": WeightFormat(Codes.INT8),
    "fp8": WeightFormat(Codes.FP8),
    "w8a8": WeightFormat(Codes.INT8, activations=Activations.INT8),
}
BUFFER_BYTES = 512 << 20


class Step:
    """The products of a step in one form, bf16 without a format."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], form: WeightFormat | None, most: int
    ) -> None:
        self.num_bytes = 0
        self._num_tokens = torch.ones(1, dtype=torch.int32)
        self._x = {size: torch.randn(most, size).bfloat16() for size in {i for _, i in shapes}}
        self._slab = Slab()
        self._ops: list[NativeOp] = []
        for size_out, size_in in shapes:
            out = torch.empty(most, size_out, dtype=torch.bfloat16)
            self._ops.extend(self._product(self._x[size_in], out, form))

    def _product(
        self, x: torch.Tensor, out: torch.Tensor, form: WeightFormat | None
    ) -> list[NativeOp]:
        size = (out.shape[1], x.shape[1])
        if form is None:
            plain = PackedLinear.pack(torch.randn(size).bfloat16(), allocate=self._slab.take)
            self.num_bytes += plain.num_bytes
            return [linear_op(x, plain, out, self._num_tokens)]
        rows = random_rows(size, form)
        packed = PackedQuantised.pack(rows, dtype=x.dtype, allocate=self._slab.take)
        self.num_bytes += packed.num_bytes
        inputs = None
        if form.activations is Activations.INT8:
            inputs = Int8Inputs.allocate(len(x), x.shape[1], form)
        return quantised_ops(x, packed, out, self._num_tokens, inputs)

    def program(self, library: Library) -> Callable[[int], float]:
        """Returns a function that runs the step for a number of tokens, and returns its seconds."""
        program: Program = library.program(self._ops)

        def run(num_tokens: int) -> float:
            self._num_tokens.fill_(num_tokens)
            start = time.perf_counter()
            program.run()
            return time.perf_counter() - start

        return run


def random_rows(size: tuple[int, int], form: WeightFormat) -> QuantisedRows:
    """Returns rows of random codes, except NaN, with scales of one."""
    codes = torch.randint(0, 2**form.codes.num_bits - 1, size, dtype=torch.uint8)
    if form.codes is Codes.FP8:
        codes &= 0xF7
    scales = torch.ones(size[0], form.num_groups(size[1]), dtype=form.scale_dtype)
    return QuantisedRows(form, codes, scales, -scales if form.has_offsets else None)


def read_rate(buffer: torch.Tensor) -> float:
    """Returns the bytes per second of a sum over a buffer."""
    start = time.perf_counter()
    buffer.sum()
    return buffer.nbytes / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=SHAPES, default="bench-1b")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=list(FORMATS))
    parser.add_argument("num_tokens", type=int, nargs="*", default=NUM_TOKENS, metavar="TOKENS")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = load()
    assert library is not None, "there are no native kernels to measure"
    shapes, most = step_shapes(decoder(args.model)), max(args.num_tokens)
    forms = {"bf16": None, **{name: FORMATS[name] for name in args.formats}}
    steps = {name: Step(shapes, form, most) for name, form in forms.items()}
    runs = {name: step.program(library) for name, step in steps.items()}
    buffer = allocate_host(BUFFER_BYTES).view(torch.int64)
    table = Table(title=f"{args.model}, {args.threads} threads, {library.variant}")
    for column in ("tokens", "format", "ms", "speed of bf16's", "share of the floor"):
        table.add_column(column, justify="right")
    for num_tokens in args.num_tokens:
        rounds = max(3, min(args.rounds, args.rounds * 64 // num_tokens))
        taken: dict[str, list[float]] = {name: [] for name in runs}
        rates: list[float] = []
        for _ in range(rounds):
            rates.append(read_rate(buffer))
            for name, run in runs.items():
                taken[name].append(run(num_tokens))
        plain = statistics.median(taken["bf16"])
        for name, seconds in taken.items():
            median = statistics.median(seconds)
            floor = steps[name].num_bytes / statistics.median(rates)
            table.add_row(
                str(num_tokens),
                name,
                f"{median * 1e3:.1f}",
                f"{plain / median:.2f}",
                f"{floor / median:.2f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
