"""A lane's process, its memory of masks, and the slots of rows in it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from inference_svc.grammars.lanes.memory import MaskMemory, MaskPlaces
from inference_svc.grammars.lanes.messages import Work, Written, usual_bytes
from inference_svc.grammars.vocabulary import Vocabulary
from servicekit.sandbox.process import Limits, SandboxProcess, Task

MEMORY_BYTES = 1 << 30
"""Memory of a lane, with the vocabulary's."""
WALL_SECONDS = 20.0
TASK = Task(Path(__file__).parents[1] / "task.py", Limits(MEMORY_BYTES, wall_seconds=WALL_SECONDS))
SLOW_NICENESS = 19
ANSWER_BYTES = 1 << 17
"""More than an answer has: the errors of 400 rows."""


class LaneProcess:
    """Starts when it is needed, and again after it has ended. `check_open` is called while a thread
    waits for it, and may raise."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        max_rows: int,
        check_open: Callable[[], None],
        *,
        is_nice: bool,
    ) -> None:
        """`max_rows` are open at once. `is_nice`: it has the lowest priority."""
        self._vocabulary = vocabulary
        self._usual_bytes = usual_bytes(max_rows)
        self._places = MaskPlaces(max_rows, vocabulary.mask_bytes)
        self._check_open = check_open
        self._is_nice = is_nice
        self._memory: MaskMemory | None = None
        self._process: SandboxProcess | None = None
        self._slots: dict[int, int] = {}
        self._free_slots = list(range(max_rows))

    @property
    def pid(self) -> int | None:
        """The process that computes; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    # Slots. A message that closes rows may open others in their slots.

    def give_slot(self, row_id: int) -> int:
        """Returns the slot of a row that opens."""
        slot = self._slots[row_id] = self._free_slots.pop()
        return slot

    def free_slot(self, row_id: int) -> None:
        """Takes a row's slot back, if it has one."""
        slot = self._slots.pop(row_id, None)
        if slot is not None:
            self._free_slots.append(slot)

    def mask(self, row_id: int) -> memoryview:
        """Returns the memory of a row's mask: others have it once the row's slot is free."""
        assert self._memory is not None
        return self._memory.mask(self._slots[row_id])

    # Requests. They raise SandboxFailure where the process fails, OSError where it cannot start,
    # and ValueError or struct.error where its answer is none.

    def ask(self, work: Work) -> Written:
        assert self._process is not None
        answer = self._process.ask(work.pack(), ANSWER_BYTES, self._check_open)
        return Written.unpack(answer.content)

    def send_at_once(self, work: Work) -> bool:
        """Sends work without waiting; returns whether it did."""
        return self._process is not None and self._process.send_at_once(work.pack())

    def take_answer(self, wait_s: float) -> Written | None:
        """Returns the answer to work that was sent, if it comes in time; None also for a process
        that has failed, and for an answer with more news than the engine's thread has time to read,
        which `receive` returns."""
        assert self._process is not None
        answer = self._process.take_answer(self._usual_bytes, wait_s)
        return None if answer is None else Written.unpack(answer.content)

    def receive(self) -> Written:
        """Waits for the answer to work that was sent."""
        assert self._process is not None
        answer = self._process.receive(ANSWER_BYTES, self._check_open)
        return Written.unpack(answer.content)

    def start(self) -> None:
        """Starts the process if there is none."""
        if self._process is not None:
            return
        if self._memory is None:
            self._memory = MaskMemory(self._places)
        process = SandboxProcess(TASK, ends_with_starter=True, memory=self._memory)
        try:
            if self._is_nice:
                _lower_priority(process.pid)
            memory = [self._memory.file, *self._places]
            request = {"vocabulary": self._vocabulary.packed, "memory": memory}
            process.ask(request, 0, self._check_open)
        except BaseException:
            process.end()
            raise
        self._process = process

    def end(self) -> None:
        """Ends the process, which has no rows afterwards."""
        if self._process is not None:
            self._process.end()
            self._process = None
        self._slots.clear()
        self._free_slots = list(range(self._places.num_masks))

    def close(self) -> None:
        """Ends the process, and frees its memory as soon as no mask of it is used."""
        self.end()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _lower_priority(process_id: int) -> None:
    """Lowers the priority of a process that has just started."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process_id, SLOW_NICENESS)
