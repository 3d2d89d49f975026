"""Reports versions, and measures the device's rates, on which all other stages' shares are
based."""

from __future__ import annotations

import platform
import shutil
import sys

import numpy as np
import torch
import triton
import triton.language as tl

from bench.gpu_run.context import Context, Found
from inference_svc.host.device_info import device_facts
from inference_svc.host.memory import available_bytes
from kernels.host_memory import allocate_host, allocate_pinned

PIECE_BYTES = 4 << 20
"""Size of the pieces in which images are copied; a step's inputs wait for at most one piece."""
SANITIZER = "compute-sanitizer"
SANITIZER_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")


def run(context: Context) -> Found:
    return {
        "versions": versions(),
        "device": device_facts(str(context.device)),
        "host_free_bytes": available_bytes(),
        "compiler": shutil.which("cc"),
        "sanitizer": find_sanitizer(),
        "times": context.timer.name,
        "ceilings": ceilings(context),
    }


def versions() -> Found:
    return {
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "numpy": np.__version__,
    }


def find_sanitizer() -> str | None:
    """Returns the path of compute-sanitizer, or None if it is not installed."""
    for folder in (None, *SANITIZER_FOLDERS):
        found = shutil.which(SANITIZER, path=folder)
        if found:
            return found
    return None


def ceilings(context: Context) -> Found:
    """Returns the device's rates; a copy on the device counts bytes read and bytes written."""
    return {
        "device_read_gb_per_s": _read(context),
        "device_copy_gb_per_s": _copy(context),
        **_bus(context),
        "product_tflop_per_s": _product(context),
        "graph_node_us": _node_us(context),
    }


READ_BLOCK, READ_BLOCKS = tl.constexpr(4096), tl.constexpr(8)
"""Elements that a program loads at once, and number of such loads."""


@triton.jit
def read_kernel(source, out, num_elements):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Sums a part of `source`, int32, and writes one number."""
    program = tl.program_id(0)
    total = tl.zeros([READ_BLOCK], tl.int32)
    for index in tl.static_range(READ_BLOCKS):
        offsets = (program * READ_BLOCKS + index) * READ_BLOCK + tl.arange(0, READ_BLOCK)
        total += tl.load(source + offsets, mask=offsets < num_elements, other=0)
    tl.store(out + program, tl.sum(total, 0))


def _read(context: Context) -> float:
    """Reads with almost no writes, as decode steps do. Raises AssertionError for a wrong sum."""
    num_elements = context.sizes.copy_bytes // 4
    source = torch.ones(num_elements, dtype=torch.int32, device=context.device)
    per_program = READ_BLOCK.value * READ_BLOCKS.value
    num_programs = -(-num_elements // per_program)
    out = torch.empty(num_programs, dtype=torch.int32, device=context.device)

    def read() -> None:
        read_kernel[(num_programs,)](source, out, num_elements, num_warps=8)

    us = context.timer.time_us(read, 1).best_us
    assert int(out.sum()) == num_elements, "the reading kernel has not read everything"
    return context.sizes.copy_bytes / us / 1e3


def _copy(context: Context) -> float:
    """Reads and writes in a kernel. `copy_` would be a memcpy node of the graph, which reaches 0.65
    of a kernel's rate on an H200."""
    num_bytes = context.sizes.copy_bytes
    source = torch.ones(num_bytes // 4, dtype=torch.int32, device=context.device)
    target = torch.empty_like(source)

    def copy() -> None:
        torch.bitwise_not(source, out=target)

    return 2 * num_bytes / context.timer.time_us(copy, 1).best_us / 1e3


def _bus(context: Context) -> Found:
    """Returns rates between pinned memory and the device, the best of five."""
    num_bytes = context.sizes.host_copy_bytes
    there = torch.empty(num_bytes, dtype=torch.uint8, device=context.device)
    allocate = allocate_host if context.is_emulated else allocate_pinned
    here = allocate(num_bytes)

    def rate(target: torch.Tensor, source: torch.Tensor, piece_bytes: int) -> float:
        seconds = []
        for _ in range(5):
            context.timer.synchronize()
            begin_s = context.timer.now_s()
            for first in range(0, len(target), piece_bytes):
                part = slice(first, first + piece_bytes)
                target[part].copy_(source[part], non_blocking=True)
            context.timer.synchronize()
            seconds.append(context.timer.now_s() - begin_s)
        return len(target) / min(seconds) / 1e9

    return {
        "host_to_device_gb_per_s": rate(there, here, len(there)),
        "host_to_device_in_pieces_gb_per_s": rate(there, here, PIECE_BYTES),
        "device_to_host_gb_per_s": rate(here, there, len(there)),
    }


def _product(context: Context) -> float:
    """Returns the TFLOP/s of a large product of random matrices."""
    size = context.sizes.square
    a, b = (
        torch.randn(size, size, dtype=context.sizes.dtype, device=context.device) for _ in range(2)
    )
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    return 2 * size**3 / context.timer.time_us(multiply, 1).best_us / 1e6


@triton.jit
def empty_kernel(out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Has no annotations: where it compiles, Triton evaluates them and knows only its own names."""
    tl.store(out, 1)


def _node_us(context: Context) -> float:
    """Returns the minimum microseconds of a graph's node, from nearly empty kernels in a row."""
    out = torch.zeros(1, dtype=torch.int32, device=context.device)

    def launch() -> None:
        for _ in range(context.sizes.nodes):
            empty_kernel[(1,)](out)

    return context.timer.time_us(launch, context.sizes.nodes).best_us
