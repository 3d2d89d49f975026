"""The Triton operations of attention as tests/support/kernels/worker.py runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from kernels import tuning
from kernels.attention import AttentionPlan, KVCache, triton_kernels, triton_ops
from tests.support.kernels.worker import CompileOnly, NoDevice


def attend(
    q: torch.Tensor, cache: KVCache, layer: int, plan: AttentionPlan, **options: Any
) -> torch.Tensor:
    """`tuned` overrides constants, by kernel."""
    with tuned(options.pop("tuned", {})):
        return triton_ops.attend(q, cache, layer, plan, **options)


def rotate_and_store(
    qkv: torch.Tensor, cache: KVCache, *args: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new qkv and the new data of the cache. `tuned` overrides constants, by kernel."""
    with tuned(options.pop("tuned", {})):
        triton_ops.rotate_and_store(qkv, cache, *args, **options)
    return qkv, cache.data


def store_fp8(
    qkv: torch.Tensor, cache: KVCache, *args: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new codes and scales of the cache."""
    triton_ops.rotate_and_store(qkv, cache, *args, **options)
    assert cache.scales is not None
    return cache.data, cache.scales


@contextmanager
def tuned(constants_of: dict[str, dict[str, int]]) -> Iterator[None]:
    with ExitStack() as stack:
        for kernel, constants in constants_of.items():
            stack.enter_context(tuning.overridden(kernel, **constants))
        yield


def rotary_angles(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return triton_ops.rotary_angles(*args)


def compile_ptx(
    capability: int,
    dtype: torch.dtype,
    rows: list[tuple[int, int]],
    stored: torch.dtype | None = None,
    mutual: Sequence[tuple[int, int]] = (),
    **options: Any,
) -> dict[str, str]:
    """The PTX of a step of `rows` (first position, queries) of a model of the Llama-3-8B shape, by
    name of the kernel; raises where a kernel does not compile. `stored` is of the cache, `mutual`
    of the plan, `options` are of `attend`."""
    from triton.runtime import driver

    driver.set_active(NoDevice(capability))
    shape = {"num_layers": 1, "num_pages": 4, "page_size": 16, "num_kv_heads": 8, "head_dim": 128}
    cache = KVCache.allocate(**shape, dtype=dtype, stored=stored)
    pages = [[0] * (1 + (first + count) // 16) for first, count in rows]
    plan = AttentionPlan.build(*zip(*rows, strict=True), pages, 16, mutual=mutual)
    names = [name for name in vars(triton_kernels) if name.endswith("_kernel")]
    kernels = {name: getattr(triton_kernels, name) for name in names}
    launches = {name: CompileOnly(kernel) for name, kernel in kernels.items()}
    vars(triton_kernels).update(launches)
    try:
        num_tokens = len(plan.cells)
        qkv = torch.zeros(num_tokens, 48 * 128, dtype=dtype)
        angles = triton_ops.rotary_angles(plan.cells, torch.zeros(64), 1.0, dtype)
        triton_ops.rotate_and_store(qkv, cache, 0, plan.cells, *angles, num_heads=32)
        q = qkv[:, : 32 * 128].view(num_tokens, 32, 128)
        triton_ops.attend(q, cache, 0, plan, scale=0.1, **options)
    finally:
        vars(triton_kernels).update(kernels)
    return {
        name: launch.compiled[0].asm["ptx"] for name, launch in launches.items() if launch.compiled
    }


OPERATIONS = {
    f.__name__: f for f in (attend, rotary_angles, rotate_and_store, store_fp8, compile_ptx)
}
