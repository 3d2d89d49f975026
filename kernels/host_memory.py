"""Large memory of the host, whole from the start: a page that is first touched in a step would cost
that step a fault, and a start that succeeds must not run out of memory later."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def allocate_host(num_bytes: int) -> Tensor:
    """Zeroed, resident bytes: uint8 `[num_bytes]`, page-aligned, in huge pages where the system
    gives them to who asks (a tenth faster to read). It is freed with the last view of it."""
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # another system, or one without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()
