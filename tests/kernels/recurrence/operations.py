"""The Triton operations of recurrences as tests/support/kernels/worker.py runs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import tuning
from kernels.recurrence import DeltaHeads, DeviceSegments, Segments, triton_kernels, triton_ops
from tests.support.kernels.worker import CompileOnly, NoDevice


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """The result, and the states afterwards."""
    return triton_ops.causal_conv(x, weight, states, *args), states


def gated_conv(x: Tensor, weight: Tensor, states: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """The result, and the states afterwards."""
    return triton_ops.gated_conv(x, weight, states, *args), states


def delta_rule(*args: Any, chunk: int) -> tuple[Tensor, Tensor]:
    """The result, and the states afterwards; with so many tokens at once."""
    with tuning.overridden("delta_chunks", chunk=chunk):
        return triton_ops.delta_rule(*args), args[5]


def gated_norm(*args: Any) -> Tensor:
    return triton_ops.gated_norm(*args)


def gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    return triton_ops.gate_heads(x, gate)


def compile_ptx(capability: int, dtype: torch.dtype) -> dict[str, str]:
    """The PTX of a step with a prompt and a decode row in the shape of Qwen3.5, by kernel."""
    from triton.runtime import driver

    driver.set_active(NoDevice(capability))
    kernels = {k: v for k, v in vars(triton_kernels).items() if k.endswith("_kernel")}
    launches = {name: CompileOnly(kernel) for name, kernel in kernels.items()}
    vars(triton_kernels).update(launches)
    heads = DeltaHeads(16, 32, 128, 128)
    channels, num_tokens = 2 * 16 * 128 + 32 * 128, 71
    rows = DeviceSegments.build([[(0, 1, 1)], [(0, 2, 70)]], "cpu")
    segments = Segments((), (), (), rows)
    try:
        x = torch.zeros(num_tokens, channels, dtype=dtype)
        triton_ops.causal_conv(x, torch.zeros(channels, 4), torch.zeros(3, 3, channels), segments)
        b, a = torch.zeros(num_tokens, 64, dtype=dtype).chunk(2, dim=1)
        vector, states = torch.zeros(32), torch.zeros(3, 32, 128, 128)
        triton_ops.delta_rule(x, b, a, vector, vector, states, segments, heads)
        out = torch.zeros(num_tokens, 32, 128, dtype=dtype)
        triton_ops.gated_norm(out, out, torch.zeros(128, dtype=dtype), 1e-6)
        triton_ops.gate_heads(out.flatten(1), out.flatten(1))
    finally:
        vars(triton_kernels).update(kernels)
    return {name: each.compiled[0].asm["ptx"] for name, each in launches.items() if each.compiled}


OPERATIONS = {
    f.__name__: f
    for f in (causal_conv, gated_conv, delta_rule, gated_norm, gate_heads, compile_ptx)
}
