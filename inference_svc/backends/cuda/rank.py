"""A rank's part of steps on a CUDA device: all ranks replay a recorded step, or none does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from inference_svc.adapters.memory.tiers import ResidencyChange, TableWrite
from inference_svc.backends.base import Logits, Scored, gather_choices
from inference_svc.backends.cuda.backend import CudaBackend, PreparedStep
from inference_svc.backends.cuda.exchange import DeviceExchange
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape
from inference_svc.backends.exchange import ExchangeFailed, StepAbandoned
from inference_svc.backends.pictures import mutual_of, take_in
from inference_svc.backends.step_data import StepData
from inference_svc.host.copies import to_device
from inference_svc.model.inputs import PlacedRows


class _Plan(NamedTuple):
    """How rank 0 computes a step: all ranks do the same, because a recorded exchange meets no
    other. `shape` is of the recorded step that it could be; `is_taken`: it is replayed, or
    recorded now."""

    is_decode: bool
    shape: StepShape | None
    is_taken: bool

    def encoded(self) -> tuple[int, ...]:
        if self.shape is None:
            return (int(self.is_decode),)
        kind, *others = self.shape
        return (int(self.is_decode), self.is_taken, kind.value, *others)

    @classmethod
    def decoded(cls, numbers: Sequence[int]) -> _Plan:
        is_decode, *others = numbers
        if not others:
            return cls(bool(is_decode), None, False)
        is_taken, kind, num_tokens, num_rows, has_prompts = others
        shape = StepShape(StepKind(kind), num_tokens, num_rows, bool(has_prompts))
        return cls(bool(is_decode), shape, bool(is_taken))


class CudaRank(CudaBackend):
    """A `RankBackend`. Each waits for its own steps in the end: a fault is found where it is, and a
    rank that is missing within bounded time. Of several stages each replays its part of a recorded
    step, of the same shape, with the hand-over of hidden states and logits in it."""

    @property
    def exchange(self) -> DeviceExchange:
        assert self._exchange is not None, "its model is cut"
        return self._exchange

    def plan(self, inputs: PreparedStep) -> tuple[int, ...]:
        is_decode = inputs.step is self.steps.decodes
        return _Plan(is_decode, inputs.wanted, inputs.shape is not None).encoded()

    def placed(self, inputs: PreparedStep) -> Sequence[PlacedRows]:
        return inputs.placed

    def apply(self, changes: Sequence[ResidencyChange]) -> None:
        for change in changes:
            if isinstance(change, TableWrite):
                has_more = change.has_more_elsewhere
                self.steps.note_elsewhere(change.resident.slot, has_more=has_more)
        super().apply(changes)

    def forward(self, inputs: PreparedStep) -> Logits:
        found = super().forward(inputs)
        gather_choices(found.experts, self._decoder, self.exchange)
        self.exchange.wait()
        return found

    def score(self, inputs: PreparedStep) -> Iterator[Scored]:
        for scored in super().score(inputs):
            self.exchange.wait()
            yield scored

    @torch.inference_mode()
    def follow(self, data: StepData) -> None:
        """Computes this rank's part of a step of the first rank, which has the logits."""
        inputs = self._send_data(data)
        lora = self._run(inputs, is_scored=bool(data.scored))
        if data.returns_experts:
            choices = self.results.choices_of(len(data.token_ids))
            gather_choices(choices, self._decoder, self.exchange)
        last, self._last = self._last, None
        for indices, runs in data.scored:
            assert last is not None, "the step is computed"
            assert self.transformer is not None
            rows = to_device(indices, self.arena.device)
            of_runs = None if lora is None else lora.with_head_of(runs)
            self.transformer.logits(last, rows, of_runs)
        self.exchange.wait()

    def _send_data(self, data: StepData) -> PreparedStep:
        plan = _Plan.decoded(data.plan)
        step = self.steps.decodes if plan.is_decode else self.steps.prompts
        step.inputs.block.wait()
        step.inputs.fill_rows(data, mutual_of(self._decoder.pictures, data.pictures))
        kind = step.lora.fill_runs(data.runs, data.last_slots, is_decode=plan.is_decode)
        shape = self._taken(plan.shape)
        if (shape is not None) is not plan.is_taken:
            raise ExchangeFailed(f"another rank has recorded other steps than this one: {plan}")
        if shape is not None:
            step.inputs.pad(shape)
        if step.segments is not None:
            assert self.states is not None, "the states are freed"
            step.segments.fill_rows(data.segments, data.counts, shape)
            self.states.copy(data.state_copies)
        where = self.arena.layout.dtype, self.arena.device
        placed = take_in(data.pictures, self._decoder, self.exchange, *where)
        step.fill_pictures(placed, shape)
        step.inputs.send()
        return PreparedStep(step, len(data.counts), kind, shape, placed=placed)

    @property
    def wants_idle_time(self) -> bool:
        """Whether `use_idle_time`, of all ranks, would record a step."""
        return self.recorded is not None and self.recorded.wants_any

    @torch.inference_mode()
    def restore(self) -> None:
        """Records steps when all ranks have their memory again. Raises ExchangeFailed, and
        StepAbandoned, if ranks cannot go on; other errors if all have let go of it."""
        failure: Exception | None = None
        try:
            self._allocate_freed()
        except Exception as error:
            failure = error
        if not self.exchange.agree(failure is None):
            raise failure or MemoryError("another rank has not got its memory back")
        try:
            self._record_again()
        except ExchangeFailed:
            raise
        except Exception as error:
            raise StepAbandoned(f"steps cannot be recorded again: {error}") from error
