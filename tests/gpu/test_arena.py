"""Images copied from pinned memory arrive whole, also into what others have left."""

from __future__ import annotations

import time

import pytest
import torch

from bench.gpu_run.model import image_header
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.memory.tiers import HostCopy, HostTier, TableClear, TableWrite
from inference_svc.adapters.targets import build_layout
from inference_svc.backends.arena import Arena
from tests.support.gpu.models import MAX_RANK, make_decoder

ARENA_BYTES, HOST_BYTES, NUM_IMAGES = 1 << 15, 1 << 18, 12
COPY_TIMEOUT_S = 60.0


@pytest.fixture
def layout(tmp_path):
    return build_layout(make_decoder("llama", tmp_path), "m", torch.float16)


class Loads:
    """A host tier full of random images, and an arena that holds few of them."""

    def __init__(self, layout, device: torch.device) -> None:
        self.host = HostTier(HOST_BYTES)
        self.arena = Arena(layout, ARENA_BYTES, 4, MAX_RANK, device, HOST_BYTES)
        assert self.arena.slab is not None
        self.arena.slab.copy_(torch.randint(0, 256, (HOST_BYTES,), dtype=torch.uint8))
        self.slots = Slots(ARENA_BYTES, 4)
        self.images: list[Resident] = []
        for index in range(NUM_IMAGES):
            header = image_header(layout, str(index), 1 + index % MAX_RANK)
            reserved = self.host.slots.reserve(header)
            assert reserved is not None
            self.images.append(reserved.resident)

    def load(self, image: Resident) -> Resident:
        """Reserves extents of what was used least, and starts the copy."""
        reserved = self.slots.reserve(image.header)
        assert reserved is not None
        changes = [TableClear(evicted.slot) for evicted in reserved.evicted]
        self.arena.apply([*changes, HostCopy(image, reserved.resident)])
        return reserved.resident

    def wait(self, num_copies: int) -> None:
        deadline_s = time.monotonic() + COPY_TIMEOUT_S
        done: list[str] = []
        while len(done) < num_copies:
            assert time.monotonic() < deadline_s, "a copy does not end"
            done += self.arena.pop_completed_copies()

    def bytes_of(self, memory: torch.Tensor, resident: Resident) -> bytes:
        extents = sorted(resident.extents, key=lambda extent: extent.image_offset)
        parts = [memory[e.start : e.start + e.num_bytes] for e in extents]
        return bytes(torch.cat(parts).cpu().numpy().data)

    def check(self, image: Resident, resident: Resident) -> None:
        there = self.arena.flat.view(torch.uint8)
        assert self.bytes_of(there, resident) == self.bytes_of(self.arena.slab, image)


@pytest.mark.smoke
def test_images_replace_each_other_whole(layout, device):
    loads = Loads(layout, device)
    for _ in range(3):
        for image in loads.images:
            resident = loads.load(image)
            loads.wait(1)
            loads.arena.apply([TableWrite(resident)])
            resident.ready = True
            loads.check(image, resident)


def test_copies_side_by_side(layout, device):
    loads = Loads(layout, device)
    chosen = loads.images[:2]
    residents = [loads.load(image) for image in chosen]
    loads.wait(2)
    for image, resident in zip(chosen, residents, strict=True):
        loads.check(image, resident)


@pytest.mark.real
def test_a_copy_waits_for_earlier_steps(layout, device):
    """A step may still read an extent whose bytes have been reserved for another image."""
    loads = Loads(layout, device)
    before = loads.arena.flat.view(torch.uint8).clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    seen = loads.arena.flat.view(torch.uint8).clone()
    resident = loads.load(loads.images[0])
    torch.cuda.synchronize()
    assert torch.equal(seen, before)
    loads.check(loads.images[0], resident)
