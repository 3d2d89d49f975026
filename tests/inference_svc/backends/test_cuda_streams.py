"""On a device that runs its work as late, and in as bad an order, as events allow, no step sees
inputs, pages or images of another, and every single wait is needed for that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.gpu_run.model import image_header
from contract.images.header import ImageHeader
from contract.images.segment_kinds import SegmentKind
from inference_svc import core
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.load_metrics import LoadTimes
from inference_svc.adapters.memory.eviction import EvictionReason
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.tiers import HostTier, MemoryTiers
from inference_svc.adapters.pulls.registration import RegisteredImage
from inference_svc.adapters.targets import applied_targets, build_layout
from inference_svc.backends import arena as arena_module
from inference_svc.backends.arena import Arena
from inference_svc.backends.cuda.backend import CudaBackend
from inference_svc.backends.cuda.steps import StepLimits
from inference_svc.model.description import Decoder, KVPlace
from inference_svc.model.kv_caches import KVCaches
from kernels.attention import KVCache
from kernels.lora.rows import GRANULE_BYTES
from tests.support.gpu.late_streams import LateDevice
from tests.support.gpu.models import Eager, make_decoder
from tests.support.inference.memory_store import MemoryMapping

PAGE_SIZE, MAX_PAGES, NUM_PAGES, MAX_ROWS, MAX_TOKENS = 2, 8, 40, 3, 40
NUM_IMAGES, NUM_SLOTS, RANK = 5, 3, 1
ARENA_IMAGES, HOST_IMAGES = 2, 3
PIECE_BYTES = 1 << 10
NUM_TURNS, NUM_EXAMPLES = 30, 100
CPU, DTYPE = torch.device("cpu"), torch.float16

SITES = {
    "StepBlock.send: record",
    "StepBlock.wait: synchronize",
    "PageTable.send: record",
    "PageTable._assign: synchronize",
    "Arena._start_copy: wait_stream",
    "Arena._start_copy: record",
    "Arena.pop_completed_copies: query",
}
"""All that records or waits."""


class Row(NamedTuple):
    """What a step must see of one sequence."""

    start: int
    token_ids: list[int]
    pages: list[int]
    slot: int
    image: bytes


class Reader:
    """Stands for the decoder: compares what a step reads, when it runs, with what it was made of.
    Computes no logits."""

    def __init__(self, description: Decoder, arena: Arena, headers: list[ImageHeader]) -> None:
        self.description = description
        self.rows: list[Row] = []
        self.num_steps = 0
        self._arena = arena
        self._segments = headers[0].segments
        self._bytes = arena.flat.view(torch.uint8).numpy()

    def forward(self, inputs: Any, kv_caches: KVCaches, lora: Any, choices: Any) -> Tensor:
        attention, rows = inputs.attention, self.rows
        starts = attention.query_starts.tolist()
        table_rows, contexts = attention.table_rows.tolist(), attention.context_lengths.tolist()
        for index, row in enumerate(rows):
            tokens = slice(starts[index], starts[index + 1])
            length = row.start + len(row.token_ids)
            count = -(-length // PAGE_SIZE)
            positions = range(row.start, length)
            cells = [row.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in positions]
            assert inputs.token_ids[tokens].tolist() == row.token_ids
            assert inputs.positions[tokens].tolist() == list(positions)
            assert attention.cells[tokens].tolist() == cells
            assert contexts[index] == length
            seen = attention.page_table[table_rows[index], :count].tolist()
            assert seen == row.pages[:count], "pages"
        for padding in table_rows[len(rows) :]:
            assert attention.page_table[padding, 0] == NUM_PAGES
        if lora is not None:
            self._check_adapters(lora, starts)
        self.num_steps += 1
        return torch.zeros(len(inputs.logit_rows), self.description.vocab_size)

    def _check_adapters(self, lora: Any, starts: list[int]) -> None:
        slots = [row.slot for row in self.rows for _ in row.token_ids]
        found = lora.plan.token_slots.tolist()
        assert found == slots + [core.BASE_SLOT] * (len(found) - len(slots))
        items = [item for item in lora.plan.items.tolist() if item[3]]
        computed = {s + i: slot for s, count, slot, _ in items for i in range(count)}
        assert computed == {i: s for i, s in enumerate(slots) if s != core.BASE_SLOT}
        for row in {row.slot: row for row in self.rows if row.slot != core.BASE_SLOT}.values():
            places = self._arena.table.rows[row.slot].tolist()
            for segment in self._segments:
                at = places[segment.kind is SegmentKind.B][segment.target] * GRANULE_BYTES
                seen = self._bytes[at : at + segment.length_bytes].tobytes()
                end = segment.offset + segment.length_bytes
                assert seen == row.image[segment.offset : end], "an image"


class LateBackend(CudaBackend):
    """Queues every step."""

    device: LateDevice
    reader: Reader
    rows: list[Row]
    is_failing = False

    def _compute(self, *args: Any, **options: Any) -> None:
        if self.is_failing:  # after the first of what it launches
            self.device.compute.launch(args[0].inputs.write_pages)
            raise torch.OutOfMemoryError

        def run(rows: list[Row] = self.rows) -> None:
            self.reader.rows = rows
            CudaBackend._compute(self, *args, **options)

        self.device.compute.launch(run)


@dataclass
class World:
    """Sequences that come, grow and go, and images that replace each other, on a late device."""

    device: LateDevice
    description: Decoder
    layout: ModelLayout
    running: list[core.Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = self.random = self.device.random
        self.headers = [image_header(self.layout, str(i), RANK) for i in range(NUM_IMAGES)]
        size = self.headers[0].total_bytes
        # By the host: the content is no choice of the search.
        self.images = {h.digest: Random(h.digest).randbytes(size) for h in self.headers}
        host_bytes = HOST_IMAGES * size
        self.host = HostTier(host_bytes)
        arena_bytes = ARENA_IMAGES * size
        self.arena = Arena(
            self.layout, arena_bytes, NUM_SLOTS, RANK, CPU, host_bytes, self.device.streams
        )
        self.tiers = MemoryTiers(Slots(arena_bytes, NUM_SLOTS), self.host, LoadTimes())
        cache = KVCache.allocate(
            num_layers=1, num_pages=NUM_PAGES + 1, page_size=PAGE_SIZE, num_kv_heads=1, head_dim=2,
            dtype=DTYPE,
        )  # fmt: skip
        caches = KVCaches((cache,), (KVPlace(0, 0),), NUM_PAGES + 1, PAGE_SIZE)
        self.reader: Any = Reader(self.description, self.arena, self.headers)
        limits = StepLimits(MAX_TOKENS, MAX_ROWS, MAX_PAGES)
        targets = applied_targets(self.layout)
        self.backend = LateBackend(self.reader, caches, self.arena, targets, limits, Eager)
        self.backend.device, self.backend.reader = self.device, self.reader
        self.free_pages = list(range(NUM_PAGES))
        random.shuffle(self.free_pages)

    def run(self) -> None:
        for _ in range(NUM_TURNS):
            for digest in self.arena.pop_completed_copies():
                self.tiers.end_copy(digest)
            self.load()
            self.leave()
            self.enter()
            self.arena.apply(self.tiers.changes.pop())
            if self.running:
                self.step()
            if self.random.random() < 0.05:
                self.device.finish()  # somebody waited for the tokens
        self.device.finish()

    def load(self) -> None:
        """Starts to bring an image closer, and puts others out."""
        header = self.random.choice(self.headers)
        if header.digest in self.tiers.device:
            return
        hosted = self.tiers.host_resident(header.digest)
        if hosted is None:
            reserved = self.host.slots.reserve(header)
            if reserved is not None:
                self._write(reserved.resident.extents, self.images[header.digest])
                reserved.resident.ready = True
            return
        reservation = self.tiers.reserve_on_device(header, (), (), EvictionReason.REQUEST)
        if reservation is not None:
            self.tiers.pin_on_host(header.digest)
            if self.random.random() < 0.5:
                self.tiers.start_copy(hosted, reservation.resident, 0.0, None)
                return
            # It is mapped: its source is gone once its copies are done.
            mapping = MemoryMapping(self.images[header.digest])
            mapped = RegisteredImage(mapping, lambda each: each.image.release())
            mapping.release()
            self.tiers.begin_filling(header.digest, mapped)
            self.tiers.start_copy(hosted, reservation.resident, 0.0, None)
            mapped.release()
            self.tiers.end_filling(header.digest)

    def _write(self, extents: Any, image: bytes) -> None:
        for e in extents:
            part = image[e.image_offset : e.image_offset + e.num_bytes]
            self.arena.pull_memory[e.start : e.start + len(part)] = part

    def enter(self) -> None:
        if len(self.running) == MAX_ROWS or self.random.random() < 0.3:
            return
        length = self.random.randint(1, 12)
        ready = [r.digest for r in self.tiers.device.residents() if r.ready]
        digest = self.random.choice(["", *ready])
        prompt = tuple(self.random.randrange(1000) for _ in range(length))
        sequence = core.Sequence(core.Request("", prompt, core.SamplingParams(), digest))
        if digest:
            sequence.slot = self.tiers.device.acquire(digest, 0.0).slot
        # All but the last token may have been computed for others.
        sequence.num_computed = self.random.choice([0, length - 1, length - 1])
        self.running.append(sequence)

    def leave(self) -> None:
        for sequence in list(self.running):
            is_full = len(sequence.token_ids) == PAGE_SIZE * MAX_PAGES
            if is_full or self.random.random() < 0.3:
                self.running.remove(sequence)
                self.free_pages = sequence.page_ids + self.free_pages
                if sequence.request.key:
                    self.tiers.device.release(sequence.request.key)

    def step(self) -> None:
        chosen = self.running
        if self.random.random() < 0.3:
            chosen = self.random.sample(chosen, self.random.randint(1, len(chosen)))
        chosen = sorted(chosen, key=lambda s: s.slot)
        rows = []
        for s in chosen:
            while len(s.page_ids) * PAGE_SIZE < len(s.token_ids):
                s.page_ids.append(self.free_pages.pop(0))
            rows.append(core.BatchRow(s, s.num_computed, s.num_uncomputed, samples=True))
        prepared = self.backend.prepare(core.Batch(tuple(rows)))
        if self.random.random() < 0.1:
            return  # given up: the next step computes the same
        self.backend.rows = [
            Row(
                row.start,
                s.token_ids[row.start :],
                list(s.page_ids),
                s.slot,
                self.images.get(s.request.key, b""),
            )
            for row, s in zip(rows, chosen, strict=True)
        ]
        self.backend.is_failing = self.random.random() < 0.1
        if self.backend.is_failing:
            with pytest.raises(torch.OutOfMemoryError):
                self.backend.forward(prepared)
            return
        self.backend.forward(prepared)
        for s in chosen:
            s.num_computed = len(s.token_ids)
            s.token_ids.append(self.random.randrange(1000))


@pytest.fixture(scope="module", autouse=True)
def _small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena_module, "COPY_BYTES", PIECE_BYTES)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Decoder, ModelLayout]:
    folder: Path = tmp_path_factory.mktemp("model")
    description = make_decoder("llama", folder, num_hidden_layers=1)
    return description, build_layout(description, "m", DTYPE)


def search(
    model: tuple[Decoder, ModelLayout], ignored: str | None, num_examples: int = NUM_EXAMPLES
) -> set[str]:
    """Runs many schedules, the same ones every time; returns where was recorded and waited."""
    sites: set[str] = set()

    @settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(seed=st.integers(0, 2**32))
    def run(seed: int) -> None:
        device = LateDevice(Random(seed), ignored)
        World(device, *model).run()
        sites.update(device.sites)

    run()
    return sites


@pytest.mark.slow
def test_no_step_sees_what_is_not_its_own(model):
    assert search(model, None) == SITES


@pytest.mark.long
def test_no_step_of_many_sees_what_is_not_its_own(model):
    search(model, None, num_examples=3000)


@pytest.mark.slow
@pytest.mark.parametrize("ignored", sorted(SITES))
def test_every_wait_is_needed(model, ignored):
    with pytest.raises(AssertionError):
        search(model, ignored)
