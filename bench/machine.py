"""Describes the machine of a result, and our kernels on it."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import torch

from inference_svc.host.cpus import find_processor
from kernels.native.library import load

PROCESSOR = find_processor()
"""Found before engines bind this process's threads to a part of its processors."""


def best_kernels() -> str:
    """Returns the kernels of an engine on this machine, such as "native avx512_bf16" or "torch"."""
    library = load()
    return "torch" if library is None else f"native {library.variant}"


def machine(*, computes_on_gpu: bool = False) -> dict[str, Any]:
    """Returns the machine, the time, and the load, because other work on the machine distorts
    results. With `computes_on_gpu` the kernels for CPUs are not compiled, and not named."""
    return {
        "cpu": PROCESSOR.name,
        "cores": PROCESSOR.num_cores,
        "processors": PROCESSOR.num_processors,
        "cpu_quota": PROCESSOR.quota,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": "triton" if computes_on_gpu else best_kernels(),
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "load_average": os.getloadavg()[0],
    }
