"""The host tier: verified images in one slab of host memory, one copy away from the arena."""

from __future__ import annotations

import torch

from inference_svc.adapters.slots import Slots
from kernels.host_memory import allocate_host

MAX_HOST_IMAGES = 1 << 16
STEP_COPY_BYTES = 24 << 20
"""Some 5 ms where a core copies 5 GB/s. All that a burst of requests waits for, copied before one
step, would hold up everybody who decodes in it for many times as long as the step itself."""


class HostTier:
    """A slab of `num_bytes`, allocated once, pinned when there is a CUDA device to copy to.

    `step_copy_bytes` is how much may be copied from it before one step; None where copies run
    beside the steps.
    """

    def __init__(self, num_bytes: int, pin_memory: bool) -> None:
        if pin_memory:
            self.slab = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            self.slab = allocate_host(num_bytes)
        self.step_copy_bytes = None if pin_memory else STEP_COPY_BYTES
        self.slots = Slots(num_bytes, MAX_HOST_IMAGES)
        self.memory = memoryview(self.slab.numpy().data)
