"""Rank 0's backend, which has all ranks compute its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from contract.images.segment_kinds import LORA_KINDS
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.memory.stages import extents_of, parts_of
from inference_svc.adapters.memory.tiers import DivideMagnitudes, ResidencyChange, TableWrite
from inference_svc.backends.base import Hidden, Logits, RankBackend, Scored, returns_experts
from inference_svc.backends.exchange import ExchangeFailed, StepAbandoned
from inference_svc.backends.magnitudes import Divided
from inference_svc.backends.pictures import PictureRows, hand_out
from inference_svc.backends.step_data import StepData
from inference_svc.core import Batch, BatchRow
from inference_svc.engine.ranks.group import RankGroup
from inference_svc.engine.ranks.messages import DIVIDE, IDLE
from inference_svc.engine.ranks.steps import StepWriter, encode_changes
from inference_svc.model.description import Decoder
from inference_svc.model.inputs import PlacedRows
from inference_svc.model.recurrent_states import StateCopy, part_copies, spare_slot
from kernels.lora.plan import LoraContents


class RankedInputs(NamedTuple):
    """A step's inputs, its rows as other ranks get them, and the embeddings of pictures."""

    own: Any
    data: StepData
    placed: Sequence[PlacedRows] = ()


class RankedBackend:
    """A `Backend` of several ranks, whose first is `own`.

    Changes, and copies of states, go with the next step to the other ranks. An error of a step ends
    the engine: other ranks may be in the middle of it, so that it cannot be computed in parts. The
    embeddings of pictures are rank 0's work, which others do not wait for: they hear of a step when
    all that it reads is there, and get these with it.
    """

    def __init__(
        self, own: RankBackend[Any], group: RankGroup, decoder: Decoder, max_scored: int
    ) -> None:
        self._own, self._group, self._max_scored = own, group, max_scored
        self.land, self.place_threads = own.land, own.place_threads
        assert group.report.exchange is not None, "ranks have met"
        self._exchange, self._decoder = group.report.exchange, decoder
        self._changes: list[ResidencyChange] = []
        self._state_copies: list[StateCopy] = []
        self._writer = StepWriter()
        self._scores: Iterator[Scored] = iter(())
        self.pictures: PictureRows | None = own.pictures
        self._places = None if decoder.pictures is None else decoder.pictures.positions

    @property
    def kernels(self) -> str:
        name = self._exchange.name
        return f"{self._own.kernels}, {self._group.count} ranks through {name}"

    @property
    def pull_memory(self) -> memoryview:
        return self._own.pull_memory

    @property
    def num_pages(self) -> int:
        return self._own.num_pages

    @property
    def num_states(self) -> int:
        return self._own.num_states

    @property
    def kv_bytes(self) -> int:
        return self._own.kv_bytes

    @property
    def recurrent_bytes(self) -> int:
        return self._own.recurrent_bytes

    @property
    def weights_bytes(self) -> int:
        return self._own.weights_bytes

    @property
    def workspace_bytes(self) -> int:
        return self._own.workspace_bytes

    @property
    def num_lora_steps(self) -> int:
        return self._own.num_lora_steps

    @property
    def num_eager_steps(self) -> int:
        return self._own.num_eager_steps

    def lora_launches(self, contents: LoraContents) -> Mapping[str, int]:
        return self._own.lora_launches(contents)

    def apply(self, changes: Sequence[ResidencyChange]) -> None:
        self._own.apply([_of_first_stage(each, self._own) for each in changes])
        self._changes += changes

    def pop_completed_copies(self) -> list[str]:
        return self._own.pop_completed_copies()

    def divide_magnitudes(self) -> list[Divided]:
        """Has all ranks go on, as they exchange the squares of norms. Raises EngineFailed if one
        of them has ended or hangs."""
        if not self._own.is_dividing:
            return []
        self._group.send_changes(DIVIDE, encode_changes(self._begin()))
        try:
            return self._own.divide_magnitudes()
        except Exception as error:
            raise self._group.blame(error) from error

    def prepare(self, batch: Batch) -> RankedInputs:
        has_choices = returns_experts(batch, self._decoder)
        sizes = self._max_scored, self.num_states
        data = StepData.of(batch.rows, *sizes, self._places, returns_experts=has_choices)
        inputs = self._own.prepare(batch)
        placed, plan = self._own.placed(inputs), self._own.plan(inputs)
        tokens = [each.tokens for each in placed]
        return RankedInputs(inputs, data._replace(plan=plan, pictures=tokens), placed)

    def forward(self, inputs: RankedInputs) -> Logits:
        changes = self._begin()
        copies, self._state_copies = self._state_copies, []
        data = inputs.data._replace(state_copies=copies)
        try:
            self._group.send_step(self._writer.write(changes, data))
            with self._group.report.step():
                if inputs.placed:
                    hand_out(inputs.placed, self._decoder, self._exchange)
                found = self._own.forward(inputs.own)
        except Exception as error:
            raise self._group.blame(error) from error
        self._scores = _blaming(self._group, self._own.score(inputs.own))
        return found

    def _begin(self) -> list[ResidencyChange]:
        """Ends the step before, as other ranks do; returns the changes that go before the next."""
        if self._group.failure is not None:
            raise self._group.failure
        _score_rest(self._scores)
        changes, self._changes = self._changes, []
        return changes

    def score(self, inputs: RankedInputs) -> Iterator[Scored]:
        """Returns what `forward` has begun; a caller may leave the rest to the next step."""
        return chain(self._scores)  # which, as `yield from` would not, stays open

    def pool(self, inputs: RankedInputs) -> Iterator[Hidden]:
        """Each rank has the whole hidden states: no other one has to compute anything."""
        return self._own.pool(inputs.own)

    def keep_part(self, row: BatchRow) -> None:
        self._own.keep_part(row)
        if self.num_states:
            self._state_copies += part_copies(row, spare_slot(self.num_states))

    def use_idle_time(self) -> bool:
        if not self._own.wants_idle_time:
            return False
        self._group.send_changes(IDLE, encode_changes(self._begin()))
        try:
            return self._own.use_idle_time()
        except Exception as error:
            raise self._group.blame(error) from error

    def free_unused(self) -> None:
        self._own.free_unused()

    def free_memory(self, *, weights: bool) -> int:
        _score_rest(self._scores)
        others_bytes = self._group.begin_free(weights=weights)
        return self._own.free_memory(weights=weights) + others_bytes()

    def restore(self) -> None:
        wait_for_others = self._group.begin_restore()
        try:
            self._own.restore()
        except (ExchangeFailed, StepAbandoned) as error:
            raise self._group.blame(error) from error
        finally:
            wait_for_others()


def _of_first_stage(change: ResidencyChange, own: RankBackend[Any]) -> ResidencyChange:
    """Returns a change with the part of an image that is in the first stage, which is rank 0's
    own."""
    if not isinstance(change, TableWrite | DivideMagnitudes):
        return change
    whole = change.resident
    header, *others = parts_of(whole.header)
    if not others:
        return change
    extents = extents_of(whole.header, whole.extents, 0, own.pull_memory.nbytes)
    own_part = Resident(header, whole.slot, extents, header.rank)
    if isinstance(change, DivideMagnitudes):
        return replace(change, resident=own_part)
    kinds = {segment.kind for other in others for segment in other.segments}
    return TableWrite(own_part, has_more_elsewhere=not kinds <= {*LORA_KINDS})


def _blaming(group: RankGroup, scores: Iterator[Scored]) -> Iterator[Scored]:
    """Yields what a step scores; raises the failure that an error of it has."""
    try:
        while True:
            with group.report.step(is_new=False):
                found = next(scores, None)
            if found is None:
                return
            yield found
    except Exception as error:
        raise group.blame(error) from error


def _score_rest(scores: Iterator[Scored]) -> None:
    """Scores the rest of a step that failed behind `forward`, as in the sampler: other ranks score
    all of it."""
    for _ in scores:
        pass
