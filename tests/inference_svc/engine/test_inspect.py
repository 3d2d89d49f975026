"""The engine laid open: true, and bounded, whatever it holds."""

from __future__ import annotations

import pickle
import time

from contract.images.header import ImageHeader, Segment
from contract.images.segment_kinds import SegmentKind
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.engine.control.inspect import Inspect, _memory
from tests.support.inference.world import World

NUM_IMAGES = 2_000


def test_sequences_loads_and_images() -> None:
    world = World(host_kib=0)
    for number, digest in enumerate(["a", "b", "c", ""]):
        world.submit(digest, number, 4, tenant=f"t{number}")
    for _ in range(3):
        world.step()
    details = Inspect(world.scheduler, world.residency, "cpu")(1000)
    pickle.dumps(details)
    inspected = [*details.running, *details.waiting]
    assert len(inspected) == len(world.live)
    assert {each.tenant for each in inspected} == {s.request.tenant for s in world.live.values()}
    device = details.memories["device"]
    assert len(device.images) == device.num_images == len(world.residency.device)
    held = [extent for image in device.images for extent in image.extents]
    assert sum(size for _, size in [*held, *device.free_ranges]) == device.capacity_bytes
    assert {load.digest for load in details.loads} == set(world.residency.loads.by_digest)
    bounded = Inspect(world.scheduler, world.residency, "cpu")(1)
    assert len(bounded.running) + len(bounded.waiting) <= 2
    assert bounded.num_waiting == details.num_waiting


def test_limit_keeps_the_last_used_images() -> None:
    slots = Slots(NUM_IMAGES * 256, NUM_IMAGES)
    for number in range(NUM_IMAGES):
        segments = (Segment(0, SegmentKind.A, 1, 0, 256),)
        slots.reserve(ImageHeader(f"i{number}", f"{number}", "l", 1, 256, segments))
    began_s = time.thread_time()
    inspected = _memory(slots, 1000)
    assert time.thread_time() - began_s < 2.0
    assert (inspected.num_images, len(inspected.images)) == (NUM_IMAGES, 1000)
    assert inspected.images[0].digest == f"{NUM_IMAGES - 1}"
    assert (inspected.used_bytes, inspected.free_ranges) == (NUM_IMAGES * 256, ())
