"""Describes the machine of a result, and our kernels on it."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from kernels.native.library import load


def best_kernels() -> str:
    """Returns the kernels of an engine on this machine, such as "native avx512_bf16" or "torch"."""
    library = load()
    return "torch" if library is None else f"native {library.variant}"


def machine(*, computes_on_gpu: bool = False) -> dict[str, Any]:
    """Returns the machine, the time, and the load, because other work on the machine distorts
    results. With `computes_on_gpu` the kernels for CPUs are not compiled, and not named."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": "triton" if computes_on_gpu else best_kernels(),
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "load_average": os.getloadavg()[0],
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
