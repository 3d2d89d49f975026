"""The Triton operations between projections as tests/support/kernels/worker.py runs them."""

from __future__ import annotations

from typing import Any

import torch

from kernels.elementwise import triton_kernels, triton_ops
from kernels.elementwise.addend import Addend
from tests.support.kernels.worker import CompileOnly, NoDevice


def add_rms_norm(
    hidden: torch.Tensor, *args: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and what `hidden` is afterwards."""
    return triton_ops.add_rms_norm(hidden, *args, **options), hidden


def geglu(gate: torch.Tensor, up: torch.Tensor, *addend: Addend) -> torch.Tensor:
    return triton_ops.geglu(gate, up, *addend)


def swiglu(gate: torch.Tensor, up: torch.Tensor, *addend: Addend) -> torch.Tensor:
    return triton_ops.swiglu(gate, up, *addend)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, *args: float) -> torch.Tensor:
    return triton_ops.clamped_swiglu(gate, up, *args)


def compile_ptx(capability: int, dtype: torch.dtype) -> dict[str, str]:
    """The PTX of a decode step of the Llama-3-8B shape, by name of the kernel."""
    from triton.runtime import driver

    driver.set_active(NoDevice(capability))
    kernels = {k: v for k, v in vars(triton_kernels).items() if k.endswith("_kernel")}
    launches = {name: CompileOnly(kernel) for name, kernel in kernels.items()}
    vars(triton_kernels).update(launches)
    try:
        hidden, weight = torch.zeros(3, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
        triton_ops.add_rms_norm(hidden, hidden, weight, 1e-5)
        gate_up = torch.zeros(3, 2 * 14336, dtype=dtype).chunk(2, dim=1)
        triton_ops.swiglu(*gate_up)
        triton_ops.clamped_swiglu(*gate_up, 1.7, 7.0)
    finally:
        vars(triton_kernels).update(kernels)
    return {name: launch.compiled[0].asm["ptx"] for name, launch in launches.items()}


OPERATIONS = {f.__name__: f for f in (add_rms_norm, clamped_swiglu, geglu, swiglu, compile_ptx)}
