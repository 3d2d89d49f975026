"""The Triton operations of replaced weights as tests/support/kernels/worker.py runs them."""

from __future__ import annotations

from typing import Any

import torch

from kernels.lora import LoraPlan, LoraTable
from kernels.replaced import triton_kernels, triton_ops
from tests.support.kernels.worker import CompileOnly, NoDevice


def token_weights(*args: Any) -> torch.Tensor:
    return triton_ops.token_weights(*args)


def replace_embeddings(out: torch.Tensor, *args: Any) -> torch.Tensor:
    triton_ops.replace_embeddings(out, *args)
    return out


def replace_logits(out: torch.Tensor, *args: Any) -> torch.Tensor:
    triton_ops.replace_logits(out, *args)
    return out


def compile_ptx(capability: int, dtype: torch.dtype) -> dict[str, str]:
    """The PTX of a decode step of the Llama-3-8B shape, by name of the kernel."""
    from triton.runtime import driver

    driver.set_active(NoDevice(capability))
    kernels = {k: v for k, v in vars(triton_kernels).items() if k.endswith("_kernel")}
    launches = {name: CompileOnly(kernel) for name, kernel in kernels.items()}
    vars(triton_kernels).update(launches)
    try:
        arena = torch.zeros(1024, dtype=dtype)
        table = LoraTable.create(2, 1, arena, "cpu", num_weights=3)
        plan = LoraPlan.build([0, 1], [1, 1], table, "cpu")
        x, ids = torch.zeros(2, 4096, dtype=dtype), torch.zeros(2, dtype=torch.int64)
        triton_ops.token_weights(x[0], table, plan, 2)
        triton_ops.replace_embeddings(x, ids, table, plan, 0)
        triton_ops.replace_logits(torch.zeros(2, 128256, dtype=dtype), x, table, plan, 1, 128256)
    finally:
        vars(triton_kernels).update(kernels)
    return {name: launch.compiled[0].asm["ptx"] for name, launch in launches.items()}


OPERATIONS = {
    f.__name__: f for f in (token_weights, replace_embeddings, replace_logits, compile_ptx)
}
