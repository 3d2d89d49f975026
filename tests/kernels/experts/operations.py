"""The Triton operations of mixtures as tests/support/kernels/worker.py runs them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from kernels import tuning
from kernels.experts import Choice, Pairs, Routing, triton_kernels, triton_ops
from tests.support.kernels.worker import CompileOnly, NoDevice

Constants = dict[str, dict[str, int]]
"""Of kernels, those that are other than in the table."""


def overridden(constants: Constants) -> ExitStack:
    stack = ExitStack()
    for kernel, changed in constants.items():
        stack.enter_context(tuning.overridden(kernel, **changed))
    return stack


def route(*args: Any) -> Routing:
    return triton_ops.route(*args)


def sort_pairs(*args: Any, **constants: int) -> Pairs:
    with overridden({"sort_pairs": constants}):
        return triton_ops.sort_pairs(*args)


def own_pairs(*args: Any) -> Pairs:
    return triton_ops.own_pairs(*args)


def experts_linear(
    *args: torch.Tensor | Pairs | None, constants: Constants | None = None
) -> torch.Tensor:
    with overridden(constants or {}):
        return triton_ops.experts_linear(*args)


def strided_experts_linear(
    x: torch.Tensor, slab: torch.Tensor, num_out: int, pairs: Pairs
) -> torch.Tensor:
    """Weights are the first rows of each expert's, and no copy."""
    return triton_ops.experts_linear(x, slab[:, :num_out], pairs)


def combine(*args: Any) -> torch.Tensor:
    return triton_ops.combine(*args)


def compile_launches(
    capability: int, dtype: torch.dtype, num_tokens: int, num_in: int = 2048, num_out: int = 1536
) -> dict[str, Any]:
    """What a layer with 128 experts, of which each token has 8, launches on sm_`capability`,
    compiled, without biases."""
    from triton.runtime import driver

    driver.set_active(NoDevice(capability))
    kernels = {k: v for k, v in vars(triton_kernels).items() if k.endswith("_kernel")}
    launches = {name: CompileOnly(kernel) for name, kernel in kernels.items()}
    vars(triton_kernels).update(launches)
    try:
        routing = triton_ops.route(torch.zeros(num_tokens, 128), Choice(8))
        pairs = triton_ops.sort_pairs(routing.experts, 128)
        x, weight = (torch.zeros(n, num_in, dtype=dtype) for n in (num_tokens, num_out))
        weight = weight.expand(128, num_out, num_in)
        made = triton_ops.experts_linear(x, weight, pairs, None, pairs.tokens)
        triton_ops.combine(made, pairs, routing.weights, made[:num_tokens])
    finally:
        vars(triton_kernels).update(kernels)
    found = {name: launch.compiled[0] for name, launch in launches.items() if launch.compiled}
    return {name.removesuffix("_kernel"): kernel for name, kernel in found.items()}


def compile_ptx(*args: Any) -> dict[str, str]:
    return {name: kernel.asm["ptx"] for name, kernel in compile_launches(*args).items()}


def count_compilations(capability: int, steps: list[int]) -> dict[str, int]:
    """Different kernels over steps of so many tokens, by name."""
    found: dict[str, set[int]] = {}
    for num_tokens in steps:
        for name, kernel in compile_launches(capability, torch.bfloat16, num_tokens).items():
            found.setdefault(name, set()).add(id(kernel))
    return {name: len(each) for name, each in found.items()}


def sizes_to_warm_up(*args: int) -> list[int]:
    return triton_ops.sizes_to_warm_up(*args)


OPERATIONS = {
    f.__name__: f
    for f in (
        *(route, sort_pairs, own_pairs, experts_linear, strided_experts_linear, combine),
        *(compile_ptx, count_compilations, sizes_to_warm_up),
    )
}
