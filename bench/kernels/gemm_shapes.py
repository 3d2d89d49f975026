"""Times matrix products in the order of a step, with every kernel of this machine: oneDNN and ours.

Every product has its own weights, so that they come from memory as in a real step. Inputs, outputs
and our packed weights are in huge pages, as in the engine; oneDNN places its packed weights itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from inference_svc.model.description import Decoder
from inference_svc.model.walk import layer_projections
from kernels.host_memory import Slab, allocate_host
from kernels.linear import PackedLinear, linear_op
from kernels.native.library import Library, load


def step_shapes(decoder: Decoder) -> list[tuple[int, int]]:
    """Returns [out, in] of all products of a step except the head; q, k and v are one product, and
    gate and up are one."""
    return [
        (projection.out_features, projection.in_features)
        for projection in layer_projections(decoder)
    ]


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest kernel for a number of tokens, and its minimum seconds."""

    seconds: float
    kernel: str


class Products:
    """Products of `shapes` [out, in], in the order of their computation, in bf16; our outputs are
    in `out_dtype`."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], out_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._shapes = shapes
        self._out_dtype = out_dtype
        # Packing copies, so one source for each shape is enough.
        self._sources = {shape: random_bf16(*shape) for shape in set(shapes)}
        self._library: Library | None = load()
        self._packed: list[PackedLinear] = []
        if self._library is not None:
            slab = Slab()
            pack = PackedLinear.pack
            self._packed = [pack(self._sources[s], allocate=slab.take) for s in shapes]

    @property
    def flops_per_token(self) -> float:
        return 2.0 * sum(out * into for out, into in self._shapes)

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return 2 * sum(out * into for out, into in self._shapes)

    def bound_seconds(self, num_tokens: int, bytes_per_s: float, flops_per_s: float) -> float:
        """Returns the hardware's minimum: for each product the longer of the read of its weights
        and its arithmetic."""
        sizes = [out * into for out, into in self._shapes]
        return sum(max(2 * s / bytes_per_s, 2 * s * num_tokens / flops_per_s) for s in sizes)

    def best(self, num_tokens: int, repeats: int) -> Best:
        """Returns the fastest kernel for all products of `num_tokens` tokens."""
        inputs = {into: random_bf16(num_tokens, into) for _, into in self._shapes}
        packs_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        runs = (
            {"oneDNN": self._onednn(inputs, num_tokens)}
            if packs_bf16
            else {"torch": self._torch(inputs)}
        )
        if self._library is not None:
            runs[f"native {self._library.variant}"] = self._native(self._library, inputs)
        found = [Best(min(seconds(run, repeats)), kernel) for kernel, run in runs.items()]
        return min(found, key=lambda best: best.seconds)

    def _onednn(self, inputs: dict[int, torch.Tensor], num_tokens: int) -> Callable[[], None]:
        pack = torch.ops.mkldnn._reorder_linear_weight
        weights = [(pack(self._sources[s], num_tokens), inputs[s[1]]) for s in self._shapes]

        def run() -> None:
            for weight, x in weights:
                torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

        return run

    def _torch(self, inputs: dict[int, torch.Tensor]) -> Callable[[], None]:
        """For processors for which oneDNN packs no weights in bf16: those without AVX-512."""
        weights = [(self._sources[s], inputs[s[1]]) for s in self._shapes]

        def run() -> None:
            for weight, x in weights:
                torch.nn.functional.linear(x, weight)

        return run

    def _native(self, library: Library, inputs: dict[int, torch.Tensor]) -> Callable[[], None]:
        num_tokens = len(next(iter(inputs.values())))
        count = torch.tensor([num_tokens], dtype=torch.int32)
        outs = {out: _empty(num_tokens, out, self._out_dtype) for out, _ in self._shapes}
        ops = [
            linear_op(inputs[into], packed, outs[out], count)
            for (out, into), packed in zip(self._shapes, self._packed, strict=True)
        ]
        return library.program(ops).run


def random_bf16(num_rows: int, num_columns: int) -> torch.Tensor:
    """Returns random values in [-1, 1), in huge pages."""
    return _empty(num_rows, num_columns, torch.bfloat16).uniform_(-1, 1)


def _empty(num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
    memory = allocate_host(num_rows * num_columns * dtype.itemsize)
    return memory.view(dtype).view(num_rows, num_columns)


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Returns the times of `repeats` runs, after a first run."""
    work()
    found = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - began_s)
    return found
