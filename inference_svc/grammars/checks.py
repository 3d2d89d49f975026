"""Compiles a request's grammar once before it runs, and remembers the verdict.

A check takes a process, which is started by the first one and ended if a grammar takes too much.
Verdicts are kept by content: of each tenant, so that none finds out what others use.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from inference_svc.errors import GrammarRefused
from inference_svc.grammars.grammar import Grammar
from inference_svc.grammars.vocabulary import Vocabulary
from servicekit.errors import Unavailable
from servicekit.sandbox.pool import CannotStart, SandboxPool
from servicekit.sandbox.process import Limits, SandboxFailure, SandboxProcess, Task
from servicekit.telemetry.metrics import Sample
from servicekit.work_budget import WorkBudget

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("task.py")
MAX_SECONDS = 1.0
"""Processor time that a grammar may take to compile."""
MEMORY_BYTES = 512 << 20
"""Memory of a check, with the vocabulary's."""
TASK = Task(PROGRAM, Limits(MEMORY_BYTES, wall_seconds=20.0))
MAX_ANSWER_BYTES = 1 << 16
NUM_PROCESSES = 2
MAX_VERDICTS, TENANT_VERDICTS = 4096, 512
RESULTS = ("accepted", "refused")


class Verdict(NamedTuple):
    """`error` "": the grammar can be used. One that is not final is this machine's fault: it is not
    remembered. `part`: the part of the grammar that the error is about; see Grammar."""

    error: str
    is_slow: bool = False
    is_final: bool = True
    part: int | None = None


UNCHECKED = Verdict(
    "this server cannot check the form of the answer now: try again later, or another server",
    is_final=False,
)
RETRY_SECONDS = 1.0


@dataclass
class GrammarChecks:
    """Lives on one event loop. `make_vocabulary` is called once, in a thread. `work` is charged
    with the time of checks."""

    make_vocabulary: Callable[[], Vocabulary]
    work: WorkBudget

    def __post_init__(self) -> None:
        self._processes = CheckProcesses(self.make_vocabulary)
        self._verdicts: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._num_of: Counter[str] = Counter()
        self._checking: dict[tuple[str, str], asyncio.Task[Verdict]] = {}
        self._results: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))
        self._num_hits = 0
        self._seconds = 0.0

    def close(self) -> None:
        """Ends the processes."""
        self._processes.close()

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary that grammars were checked with."""
        return self._processes.vocabulary

    @property
    def process_ids(self) -> list[int]:
        """The processes that wait for a check."""
        return [process.pid for process in self._processes.pool.idle]

    def num_verdicts(self, tenant: str) -> int:
        """Returns how many verdicts are remembered for a tenant."""
        return self._num_of[tenant]

    async def check(
        self, grammar: Grammar, tenant: str, account: str, threads: Executor
    ) -> Grammar:
        """Returns the grammar with what the check found. A new one is checked in one of the
        account's `threads`, once its work allows that. Raises GrammarRefused, naming the field;
        ShareExceeded where the account's earlier checks took too much work; and Unavailable where
        this machine cannot check it."""
        key = tenant, grammar.key
        verdict = self._remembered(key)
        if verdict is None and key in self._checking:
            verdict = await asyncio.shield(self._checking[key])
        elif verdict is None:
            async with self.work.turn(account):
                # Others may have checked it, or begun to, while this caller waited for its turn.
                verdict = self._remembered(key) or await self._checked(
                    key, grammar, account, threads
                )
        if not verdict.is_final:
            raise Unavailable(
                f"{grammar.field}: {verdict.error}",
                subject=grammar.field,
                retry_after_s=RETRY_SECONDS,
            )
        self._results["refused" if verdict.error else "accepted"] += 1
        if verdict.error:
            field = grammar.field if verdict.part is None else grammar.part_fields[verdict.part]
            raise GrammarRefused(f"{field}: {verdict.error}", subject=field)
        return replace(grammar, is_slow=verdict.is_slow)

    def samples(self) -> Iterator[Sample]:
        """Returns the metrics, in any thread."""
        for result in RESULTS:
            yield Sample("structured_requests", self._results[result], (result,))
        yield Sample("grammar_check_hits", self._num_hits)
        yield Sample("grammar_check_seconds", self._seconds)

    def _remembered(self, key: tuple[str, str]) -> Verdict | None:
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
            self._num_hits += 1
        return verdict

    async def _checked(
        self, key: tuple[str, str], grammar: Grammar, account: str, threads: Executor
    ) -> Verdict:
        checking = self._checking.get(key) or self._start(key, grammar, account, threads)
        try:
            # A caller that is cancelled must not cancel the others'.
            return await asyncio.shield(checking)
        finally:
            # Nor end its account's turn before its work is charged.
            await asyncio.wait({checking})

    def _start(
        self, key: tuple[str, str], grammar: Grammar, account: str, threads: Executor
    ) -> asyncio.Task[Verdict]:
        def done(task: asyncio.Task[Verdict]) -> None:
            self._checking.pop(key, None)
            if not task.cancelled():
                task.exception()  # each caller has it

        task = asyncio.create_task(self._check(key, grammar, account, threads))
        self._checking[key] = task
        task.add_done_callback(done)
        return task

    async def _check(
        self, key: tuple[str, str], grammar: Grammar, account: str, threads: Executor
    ) -> Verdict:
        loop = asyncio.get_running_loop()
        verdict, seconds = await loop.run_in_executor(threads, self._processes.check, grammar)
        self._seconds += seconds
        self.work.charge(account, seconds)
        if not verdict.is_final:
            return verdict
        tenant = key[0]
        self._num_of[tenant] += key not in self._verdicts
        self._verdicts[key] = verdict
        if self._num_of[tenant] > TENANT_VERDICTS:
            self._drop(tenant)
        elif len(self._verdicts) > MAX_VERDICTS:
            [(most, _)] = self._num_of.most_common(1)
            self._drop(most)
        return verdict

    def _drop(self, tenant: str) -> None:
        del self._verdicts[next(key for key in self._verdicts if key[0] == tenant)]
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]


TOO_COSTLY = (
    f"it takes more than {MAX_SECONDS:g} s of a processor to compile, or more than "
    f"{MEMORY_BYTES >> 20} MiB of memory: simplify it"
)


class CheckProcesses:
    """Processes, each of which checks one grammar at a time. Blocking and thread-safe."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._making = threading.Lock()
        self.pool = SandboxPool(TASK, NUM_PROCESSES, self._prepare)

    @property
    def vocabulary(self) -> Vocabulary:
        """Makes the vocabulary if nobody has yet."""
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def _prepare(self, process: SandboxProcess) -> None:
        process.ask({"vocabulary": self.vocabulary.packed}, 0)

    def close(self) -> None:
        """Ends processes that are idle, and others once they have answered."""
        self.pool.close()

    def check(self, grammar: Grammar) -> tuple[Verdict, float]:
        """Returns the verdict, and the seconds that it took."""
        request = {
            "kind": grammar.kind.value,
            "source": grammar.source,
            "max_seconds": MAX_SECONDS,
        }
        start_s = time.monotonic()
        try:
            with self.pool.process() as process:
                start_s = time.monotonic()
                answer = process.ask(request, MAX_ANSWER_BYTES)
        except CannotStart:
            logger.exception("a process that checks grammars cannot start")
            return UNCHECKED, 0.0
        except SandboxFailure as error:
            seconds = time.monotonic() - start_s
            if error.is_timeout or error.is_killed:
                # Its own limits end it earlier, and otherwise.
                logger.warning("a check of a grammar ended: %s", error)
                return UNCHECKED, seconds
            return Verdict(TOO_COSTLY), seconds
        seconds = time.monotonic() - start_s
        found = json.loads(answer.content)
        if "error" in found:
            reason = f"this server cannot enforce it: {found['error']}"
            return Verdict(reason, part=found["part"]), seconds
        return Verdict("", bool(found["is_slow"])), seconds
