"""The host tier: verified images in one slab of host memory, one copy away from the arena."""

from __future__ import annotations

import torch

from inference_svc.adapters.slots import Slots
from kernels.host_memory import allocate_host

MAX_HOST_IMAGES = 1 << 16


class HostTier:
    """A slab of `num_bytes`, allocated once, pinned when there is a CUDA device to copy to."""

    def __init__(self, num_bytes: int, pin_memory: bool) -> None:
        if pin_memory:
            self.slab = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            self.slab = allocate_host(num_bytes)
        self.slots = Slots(num_bytes, MAX_HOST_IMAGES)
        self.memory = memoryview(self.slab.numpy().data)
