"""Messages of lanes, and the memory of masks: their forms, and what the process cannot do."""

from __future__ import annotations

import math
import mmap
import os
import struct
import sys
from typing import Any

import pytest

from inference_svc.grammars.compiling import MAX_ERROR_CHARS
from inference_svc.grammars.lanes.memory import MaskMemory, MaskPlaces, WrittenMasks
from inference_svc.grammars.lanes.messages import Work, Written, usual_bytes
from inference_svc.grammars.lanes.process import ANSWER_BYTES

OPEN = {"id": 3, "slot": 0, "tenant": "t", "key": "k", "kind": "regex", "source": "é", "tokens": []}


@pytest.mark.parametrize(
    "work", [Work(), Work([(1, 2), (2**32 - 1, 0)]), Work([(1, 2)], [OPEN], [4]), Work(closes=[7])]
)
def test_work_is_read_as_it_was_written(work: Work) -> None:
    assert Work.unpack(work.pack()) == work


@pytest.mark.parametrize(
    "written",
    [
        Written(),
        Written([(1, 2, True), (3, 2**32 - 1, False)], True, True, 0.25),
        Written([(1, 0, False)], errors=[(2, "unclosed é")], slow=[1], num_hits=2, compile_s=0.5),
        Written(stuck=0),
    ],
)
def test_answers_are_read_as_they_were_written(written: Written) -> None:
    assert Written.unpack(written.pack()) == written


def test_answers_of_steps_are_small_and_have_no_json() -> None:
    data = Written([(row, 900, False) for row in range(16)], seconds=1e-3).pack()
    assert len(data) < 200
    assert b"[" not in data[-9:]


@pytest.mark.parametrize(
    "data", [b"", b"\x01" * 14, Written([(1, 2, True)]).pack()[:-1], b"x" * 99]
)
def test_bytes_that_are_no_answer_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError, struct.error)):
        Written.unpack(data)


@pytest.mark.parametrize(
    "fields",
    [
        *[{"seconds": value} for value in (math.nan, math.inf, -1e-9, 1e300)],
        *[{"compile_s": value} for value in (math.nan, math.inf, -1e-9, 1e300, 10**400, "1")],
        *[{"num_hits": value} for value in (-1, 10**400, 0.5, "1")],
        *[{"slow": [value]} for value in (-1, "1", [1])],
        {"errors": [("1", "a")]},
        {"stuck": "1"},
        {"stuck": -1},
    ],
)
def test_numbers_that_a_process_cannot_have_are_refused(fields: dict[str, Any]) -> None:
    """Its times and counts are added to metrics, which a NaN would end."""
    with pytest.raises((ValueError, TypeError)):
        Written.unpack(Written([(1, 2, True)], **fields).pack())


def test_usual_answers_are_small() -> None:
    """The engine's thread reads these alone."""
    masks = [(2**32 - 1, 2**32 - 1, False)] * 64
    usual = Written(masks, slow=[2**32 - 1] * 2, num_hits=64, compile_s=1 / 3)
    assert len(usual.pack()) <= usual_bytes(64) < 1024
    assert len(Written(errors=[(1, "a" * MAX_ERROR_CHARS)] * 400).pack()) < ANSWER_BYTES


def test_a_mask_has_the_bits_that_were_written_in_its_slot() -> None:
    places = MaskPlaces(3, 36)
    memory = MaskMemory(places)
    written = WrittenMasks(memory.file, places)
    mmap.mmap(memory.file, places.num_bytes)[places.stride + 2] = 0b101
    assert bytes(memory.mask(1)) == bytes([0, 0, 0b101, *bytes(33)])
    assert not written.pop_bit(1, 17)
    assert written.pop_bit(1, 16)
    assert bytes(memory.mask(1)) == bytes([0, 0, 0b100, *bytes(33)])
    assert not any(memory.mask(0))
    assert not any(memory.mask(2))
    memory.close()


@pytest.mark.skipif(sys.platform != "linux", reason="others cannot seal a file")
def test_a_process_cannot_cut_the_memory_under_the_engine() -> None:
    """The engine would die of a read; nor can it write."""
    memory = MaskMemory(MaskPlaces(4, 4096))
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.file, size)
    with pytest.raises(TypeError):
        memory.mask(0)[0] = 1
    kept = memory.mask(3)
    memory.close()
    assert bytes(kept) == bytes(4096)
