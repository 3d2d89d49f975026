"""The engine's step: take messages, then schedule (decide), run (compute), settle (account).

It never reads a file, waits on a socket or parses.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace

from inference_svc.adapters.pulls.pull import (
    PullDone,
    PullEvent,
    PullFailed,
    PullFilled,
    PullOpened,
)
from inference_svc.adapters.residency import Residency
from inference_svc.adapters.sums import SumChecks
from inference_svc.core import FinishReason, Request, Sequence, SequenceState, Sum
from inference_svc.engine.compute.losses import Loss, Losses
from inference_svc.engine.compute.runner import Runner
from inference_svc.engine.compute.step_times import StepPhases, StepTimes
from inference_svc.engine.control.commands import Commands
from inference_svc.engine.control.life_cycle import LifeCycle
from inference_svc.engine.policy.admission import Admission
from inference_svc.engine.policy.expiries import AdapterWaits, Expiries
from inference_svc.engine.policy.scheduler import Scheduler
from inference_svc.engine.policy.settle import Settler
from inference_svc.engine.policy.version_moves import Moves
from inference_svc.engine.transport.messages import (
    Abandon,
    Call,
    Cancel,
    Command,
    LayoutAccepted,
    MaskReady,
    Message,
    Move,
    Output,
    PauseMode,
    RankFailed,
    Reply,
    Repointed,
    Restored,
    SetVocabulary,
    StepOutputs,
    Stop,
    Submit,
    Superseded,
)
from inference_svc.errors import (
    AdapterUnusable,
    DuplicateRequest,
    EngineFailed,
    GrammarRefused,
    with_name,
)
from inference_svc.grammars.masks import Masks
from servicekit.errors import Draining, ServiceError, Unavailable


@dataclass
class Engine:
    """Wires the parts; `build.build_engine` makes them. One thread calls `step`, within
    `times.measure`."""

    scheduler: Scheduler
    runner: Runner
    settler: Settler
    residency: Residency
    sum_checks: SumChecks
    commands: Commands
    admission: Admission
    times: StepTimes
    losses: Losses
    masks: Masks
    adapter_wait_s: float
    sequences: dict[str, Sequence] = field(default_factory=dict)
    is_stopping: bool = False
    moves: Moves = field(init=False)
    _deadlines: Expiries = field(default_factory=Expiries)
    _adapter_waits: AdapterWaits = field(init=False)
    _outputs: list[Output] = field(default_factory=list)
    _replies: list[Reply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.moves = Moves(self.scheduler)
        self._adapter_waits = AdapterWaits(
            self.residency.store_waits_since_s,
            self.residency.loader.wait_reason,
            self.adapter_wait_s,
        )

    @property
    def life_cycle(self) -> LifeCycle:
        return self.commands.life_cycle

    def step(self, messages: list[Message | PullEvent]) -> tuple[StepOutputs, bool]:
        """Takes all messages, then computes one batch, if there is anything to compute.

        Returns the outputs, and whether to go on at once: if not, nothing will change before the
        next message or `next_expiry_s`.
        """
        for message in messages:
            self._take(message, time.monotonic())
        self._before_batch(time.monotonic())
        is_held = self.is_stopping or self.life_cycle.is_asleep
        has_run = not is_held and self._run_batch()
        self._replies += self.commands.poll(time.monotonic())
        go_on = has_run or (self.residency.is_copying and not self.life_cycle.is_asleep)
        return self._flush_outputs(), go_on

    def use_idle_time(self) -> bool:
        """Does a piece of work that makes later steps faster; returns False if there is none.
        Called while `step` has nothing to do and no message waits."""
        return not self.life_cycle.is_asleep and self.runner.backend.use_idle_time()

    def _run_batch(self) -> bool:
        """Returns whether there was a batch: tokens to compute, or residency changes."""
        with self.commands.profiler.step():
            return self._run_traced()

    def _run_traced(self) -> bool:
        began_s = time.monotonic()
        profiler = self.commands.profiler
        loader, backend = self.residency.loader, self.runner.backend
        loader.finish_copies(backend.pop_completed_copies(), began_s)
        for divided in backend.divide_magnitudes():
            loader.finish_dividing(*divided)
            if isinstance(divided.error, AdapterUnusable):
                self.losses.add_refused(divided.digest)
        with profiler.marks("schedule"):
            batch = self.scheduler.schedule(began_s)
        if batch is None:
            return False
        scheduled_s = time.monotonic()
        sampled, timings, lost, parts, late = self.runner.run(batch)
        if self.scheduler.pictures is not None and not timings.failed_pictures:
            self.scheduler.pictures.note(batch, timings.pictures, timings.of_rows)
        if lost or late:
            left_out = late.union(lost)
            rows = tuple(row for row in batch.rows if row.sequence not in left_out)
            batch = replace(batch, rows=rows)
        self.times.add_load(timings.change_residency)
        settled_s = time.monotonic()
        with profiler.marks("settle"):
            outputs = self.settler.settle(batch, sampled, settled_s, parts)
        is_busy = bool(self.scheduler.running)
        self.admission.throughput.observe(batch, outputs, settled_s, is_busy=is_busy)
        for output in outputs:
            if output.is_last:
                self.moves.discard(self.sequences.pop(output.request_id))
        self._outputs += outputs
        for sequence, loss in lost.items():
            self._lose(sequence, loss, settled_s)
        if batch.rows:
            profiler.stepped()
            schedule_s, settle_s = scheduled_s - began_s, time.monotonic() - settled_s
            self.times.computed(
                StepPhases(schedule_s, timings.prepare, timings.forward, timings.sample, settle_s)
            )
        return True

    def _lose(self, sequence: Sequence, loss: Loss, now_s: float) -> None:
        """Ends a sequence that cannot be computed."""
        self._end(sequence, now_s, error=self.losses.add(sequence, loss))

    def _flush_outputs(self) -> StepOutputs:
        spans = self.residency.loads.traces.pop_spans()
        flushed = StepOutputs(tuple(self._outputs), tuple(self._replies), spans=spans)
        self._outputs, self._replies = [], []
        return flushed

    def next_expiry_s(self) -> float | None:
        """Returns when, on the monotonic clock, a waiting sequence or load expires next, or a
        sequence becomes aged, which may take memory from adapters that others wait for."""
        expiries = [self._deadlines.next_s(), self._adapter_waits.next_s()]
        if any(self.residency.loads.num_short().values()):
            expiries.append(self.scheduler.queue.next_ageing_s(time.monotonic()))
        expiries += [self.commands.next_expiry_s(), self.residency.loader.next_expiry_s()]
        return min((e for e in expiries if e is not None), default=None)

    # Messages.

    def _take(self, message: Message | PullEvent, now_s: float) -> None:
        if isinstance(message, Submit):
            self._submit(message, now_s)
        elif isinstance(message, Cancel):
            self._cancel(message.request_id, now_s)
        elif isinstance(message, Call):
            self._call(message, now_s)
        elif isinstance(message, Move):
            self._move(message, now_s)
        elif isinstance(message, Restored):
            self._replies += self.life_cycle.on_restored(message, now_s)
        elif isinstance(message, Abandon):
            self.commands.abandon_trace(message.call_id)
        elif isinstance(message, SetVocabulary):
            self.masks.set_vocabulary(message.vocabulary)
        elif isinstance(message, MaskReady):
            pass  # it has woken the engine
        elif isinstance(message, LayoutAccepted):
            self.residency.loader.set_layout(message.layout_id, message.others)
        elif isinstance(message, RankFailed):
            raise message.error
        elif isinstance(message, Repointed):
            self.residency.prefetcher.on_repointed(message.old_digest, message.new_digest, now_s)
        elif isinstance(message, Superseded):
            self.residency.set_superseded(message.digest, message.is_superseded)
        elif isinstance(message, PullOpened | PullDone | PullFilled | PullFailed):
            with self.times.loading():
                self.residency.loader.on_pull_event(message, now_s)
            if isinstance(message, PullOpened):
                self._refuse_sums(message.job.digest, now_s)
        else:
            assert isinstance(message, Stop)
            self.is_stopping = True

    def _call(self, call: Call, now_s: float) -> None:
        if call.command is Command.PAUSE and call.pause_mode is PauseMode.ABORT:
            for sequence in list(self.sequences.values()):
                self._end(sequence, now_s, reason=FinishReason.ABORTED)
        self._replies += self.commands.handle(call, now_s)

    def _move(self, move: Move, now_s: float) -> None:
        sequence = self.sequences.get(move.request_id)
        if sequence is not None:
            self.moves.add(sequence, move, now_s)

    def _submit(self, message: Submit, now_s: float) -> None:
        request = message.request
        error = self._refusal(request, now_s)
        if error is not None:
            self._outputs.append(Output(request.request_id, error=error))
            return
        sequence = Sequence(request)
        self.sequences[request.request_id] = sequence
        if request.deadline_s is not None:
            self._deadlines.add(sequence, request.deadline_s)
        if request.key:
            self._adapter_waits.add(sequence, now_s)
        self.scheduler.add(sequence, now_s)

    def _refusal(self, request: Request, now_s: float) -> ServiceError | None:
        request_id = request.request_id
        if self.is_stopping:
            return Draining("the server is shutting down")
        if (asleep := self.life_cycle.refusal()) is not None:
            return asleep
        if request_id in self.sequences:
            return DuplicateRequest(f"request {request_id} is running", subject="request_id")
        refusal = self._sum_refusal(request)
        return refusal or self.admission.refusal(request, now_s)

    def _sum_refusal(self, request: Request) -> ServiceError | None:
        if not isinstance(request.key, Sum):
            return None
        headers = self.residency.headers(request.key)
        found = self.sum_checks.refusal(request.key, headers)
        if found is None:
            return None
        part, error = found
        return with_name(error, part, request.name_of(part)) if part else error

    def _refuse_sums(self, digest: str, now_s: float) -> None:
        """Ends requests for sums of this adapter with others that cannot be computed, once enough
        is known of it."""
        for each in self.residency.waiting_sums.of_part(digest):
            for sequence in self.scheduler.queue.of_key(each):
                error = self._sum_refusal(sequence.request)
                if error is not None:
                    self._end(sequence, now_s, error=error)

    def _cancel(self, request_id: str, now_s: float) -> None:
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, now_s, reason=FinishReason.ABORTED)

    # Around the batch.

    def _before_batch(self, now_s: float) -> None:
        """Ends requests that have expired or failed, then advances loads."""
        for digest, error in self.residency.loader.pop_failures():
            self._fail_adapter(digest, error, now_s)
        self._end_expired(now_s)
        self._end_refused(now_s)
        self._replies += self.life_cycle.expire(now_s)
        self.moves.apply(now_s)
        self.admission.update_rates(now_s)
        with self.times.loading():
            queue = self.scheduler.queue
            in_order = queue.turns.in_order(queue.aged_s(now_s))
            self.residency.loader.advance(now_s, in_order)

    def _end_expired(self, now_s: float) -> None:
        for sequence in self._deadlines.due(now_s):
            self._end(sequence, now_s, reason=FinishReason.ABORTED)
        for sequence in self._adapter_waits.due(now_s):
            if sequence.state is SequenceState.WAITING:  # others' pins may leave too little now
                refusal = self._sum_refusal(sequence.request)
                if refusal is not None:
                    self._end(sequence, now_s, error=refusal)
                    continue
            error = self._adapter_waits.error(sequence, now_s)
            if error is not None:
                self._end(sequence, now_s, error=error, expired=True)

    def _end_refused(self, now_s: float) -> None:
        """Ends sequences whose grammars cannot be matched any further."""
        for row in self.masks.pop_failed():
            sequence = self.sequences.get(row.request_id)
            if sequence is not None and sequence.masked is row:
                field = row.grammar.field
                kind = Unavailable if row.is_fault else GrammarRefused
                self._end(sequence, now_s, error=kind(f"{field}: {row.error}", subject=field))

    def _fail_adapter(self, digest: str, error: ServiceError, now_s: float) -> None:
        self._replies += self.commands.fail(digest, error)
        self.moves.fail(digest, now_s)
        for each in self.residency.waiting_with(digest):
            for sequence in self.scheduler.queue.of_key(each):
                named = with_name(error, digest, sequence.request.name_of(digest))
                self._end(sequence, now_s, error=named)

    def _end(
        self,
        sequence: Sequence,
        now_s: float,
        *,
        reason: FinishReason | None = None,
        error: Exception | None = None,
        expired: bool = False,
    ) -> None:
        self.moves.discard(sequence)
        output = self.settler.end(sequence, now_s, reason=reason, error=error, expired=expired)
        self._outputs.append(output)
        del self.sequences[sequence.request.request_id]

    def end_all(self, error: Exception) -> StepOutputs:
        """Ends every open request and call; nothing runs afterwards."""
        now_s = time.monotonic()
        for sequence in list(self.sequences.values()):
            self._end(sequence, now_s, error=error)
        self._replies += self.commands.fail_all(error)
        self.residency.loader.cancel_all()
        return self._flush_outputs()

    def give_up(self, error: EngineFailed) -> StepOutputs:
        """Returns the outputs so far, and `error` for open requests. Removes the files of a trace;
        touches no other structure: after a bug they may be broken."""
        flushed = self._flush_outputs()
        ended = {output.request_id for output in flushed.outputs if output.is_last}
        lost = [Output(r, error=error) for r in self.sequences if r not in ended]
        replies = [Reply(call_id, error=error) for call_id in self.commands.open_call_ids]
        self.commands.give_up_traces()
        outputs = (*flushed.outputs, *lost)
        return StepOutputs(outputs, (*flushed.replies, *replies), error, flushed.spans)

    def check_integrity(self) -> None:
        """Asserts that queues, pages, pins, memory and waiters agree."""
        self.scheduler.check_integrity()
        all_waiting = list(self.scheduler.queue)
        waiting = Counter(s.request.key for s in all_waiting)
        waiting.update([*self.commands.loading, *self.moves.waited_for])
        running = Counter(s.request.key for s in self.scheduler.running)
        self.residency.check_integrity(waiting, running)
        self.moves.check_integrity()
        self.life_cycle.check_integrity()
        queued = self.scheduler.running + all_waiting + self.scheduler.siblings.held
        assert {id(s) for s in queued} == {id(s) for s in self.sequences.values()}
