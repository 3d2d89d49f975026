"""A step on a CUDA device: inputs at fixed addresses, decode steps replayed."""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from inference_svc.adapters.layout import EMBEDDING
from inference_svc.adapters.targets import AppliedTargets
from inference_svc.backends.arena import Arena
from inference_svc.backends.base import (
    Hidden,
    Logits,
    Reload,
    Scored,
    returns_experts,
)
from inference_svc.backends.cuda.exchange import DeviceExchange
from inference_svc.backends.cuda.graphs import Record, RecordedSteps
from inference_svc.backends.cuda.memory import CudaMemory
from inference_svc.backends.cuda.needs import max_prompt_recordings
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape
from inference_svc.backends.cuda.steps import FixedStep, StepLimits
from inference_svc.backends.lora_step import LoraStep
from inference_svc.backends.pictures import mutual_of
from inference_svc.backends.prompt_runs import ScoredRun, pooled_runs, scored_runs
from inference_svc.backends.torch import hidden_slices, score_slices
from inference_svc.core import Batch, BatchColumns, BatchRow
from inference_svc.model.checkpoint.parameters import weight_formats
from inference_svc.model.inputs import PlacedRows, StepInputs
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.recurrent_states import RecurrentStates
from inference_svc.model.step import Step
from inference_svc.model.transformer import Transformer
from kernels import quantised
from kernels.experts import sizes_to_warm_up
from kernels.lora.plan import LoraContents

logger = logging.getLogger(__name__)

SHORT_TOKENS = 16
"""The length of a short prompt: too few for the kernels of many tokens, and not a single one."""


GROUP_LAUNCHES, EMBEDDING_LAUNCHES = 2, 1
"""The kernels that `kernels.lora.triton_ops` launches for a group: it shrinks and expands. An
embedding's rows are shrunk already."""


class PreparedStep(NamedTuple):
    """A step of `num_rows` rows that was filled and sent. `shape` is of the recorded step that is
    replayed for it; None: it is computed operation by operation. `wanted` is the recorded step that
    it could be, if there is any. `num_routed` tokens have chosen experts that a row returns; 0: no
    row does. `runs` are scored, and the hidden states of `pooled` ones returned, never of decode
    steps, which have no embeddings of pictures, `placed`, either."""

    step: FixedStep
    num_rows: int
    kind: StepKind
    shape: StepShape | None
    wanted: StepShape | None = None
    num_routed: int = 0
    runs: tuple[ScoredRun, ...] = ()
    pooled: tuple[ScoredRun, ...] = ()
    placed: tuple[PlacedRows, ...] = ()

    @property
    def keeps_hidden(self) -> bool:
        """Whether hidden states are needed behind the step's logits."""
        return bool(self.runs or self.pooled)


class CudaBackend(CudaMemory):
    """A `Backend` whose inputs lie at fixed addresses: the small ones of decode steps, and the ones
    of steps with prompts. The cache's last page is padding's: no sequence may own it.

    `record` records steps for replay; None: every step is computed operation by operation.
    `exchange`: of a model that is cut; see `CudaRank`.
    """

    def __init__(
        self,
        transformer: Transformer,
        kv_caches: KVCaches,
        arena: Arena,
        targets: AppliedTargets,
        limits: StepLimits,
        record: Record | None,
        reload: Reload | None = None,
        states: RecurrentStates | None = None,
        exchange: DeviceExchange | None = None,
    ) -> None:
        super().__init__(transformer, kv_caches, arena, targets, limits, reload, states, exchange)
        self.num_lora_steps = 0
        self.num_replays = 0
        self.num_eager_steps = 0
        self._limits = limits
        self._last: Step | None = None
        self._record = record
        self.recorded = self._unrecorded()

    def _unrecorded(self) -> RecordedSteps | None:
        if self._record is None:
            return None
        most = max_prompt_recordings(self._decoder, self._targets)
        exchange = self._exchange
        agree = None if exchange is None else exchange.agree
        return RecordedSteps(self.compute, self._record, most, agree)

    @property
    def kernels(self) -> str:
        return "triton" if self.recorded is None else "triton, captured"

    def lora_launches(self, contents: LoraContents) -> Mapping[str, int]:
        """A recorded step of a kind launches every group, for any adapters of its rows; and for
        adapters with more than A and B the replacement of every weight."""
        is_recorded = self.recorded is not None
        launches = {
            name: EMBEDDING_LAUNCHES if name == EMBEDDING else GROUP_LAUNCHES
            for name, group in self._targets.groups.items()
            if is_recorded or not contents.targets.isdisjoint(group.targets)
        }
        weights: Collection[int] = contents.weights
        if is_recorded and (contents.has_vectors or weights):
            weights = self._targets.weights.values()
        return launches | dict.fromkeys(self._targets.names_of(weights), 1)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles all kernels that steps need, and records decode steps and the steps of short
        prompts. Writes to nothing but padding's page.

        Kernels differ between few tokens and many, between tiles and single tokens, and in how many
        decode rows they look for a segment's among: the sizes to record have all of them.
        """
        max_tokens, item_bytes = self._limits.max_tokens, self.arena.flat.itemsize
        sizes = {min(SHORT_TOKENS, max_tokens), max_tokens}
        mixtures = self._decoder.mixtures
        # Pairs are of all experts, and products of this rank's.
        held = {(each.gate_up.num_experts, each.num_chosen) for each in mixtures}
        for shape in held | {(each.num_experts, each.num_chosen) for each in mixtures}:
            sizes.update(sizes_to_warm_up(max_tokens, *shape, item_bytes))
            # Of all stages: they compute the same steps.
            for form in weight_formats(self._decoder.of_all_stages):
                sizes.update(quantised.sizes_to_warm_up(max_tokens, *shape, item_bytes, form))
        for num_tokens in sorted(sizes):
            self._warm_up_prompts(num_tokens)
        if self.pictures is not None:
            self.pictures.warm_up()
        self._record_steps()

    def _record_steps(self) -> None:
        """Records steps over padding. Without recordings, computes them once."""
        shapes = [*self.steps.shapes.decodes(), *self.steps.shapes.usual_prompts()]
        if self.recorded is not None:
            self.recorded.record_all(shapes, self.steps.fill_padding)
            return
        for shape in reversed(self.steps.shapes.decodes()):
            self.steps.fill_padding(shape)
            self.compute(shape)

    def _warm_up_prompts(self, num_tokens: int) -> None:
        """Runs a step of so many tokens, or as many as fit its rows."""
        batch = self.steps.padding_batch(num_tokens, self._limits.max_rows)
        num_rows = len(batch.rows)
        step = self._send(self.steps.prompts, batch.columns(), may_replay=False)[0]
        inputs = step.step_inputs(self.states, None)
        # Without tiles, too: in a step with prompts of others an adapter may have single tokens
        # only.
        steps = (
            step.lora.any_step(kind, len(inputs.token_ids), num_rows, tiles)
            for kind in (StepKind.LORA, StepKind.ANY)
            for tiles in (True, False)
        )
        for lora in (None, *steps):
            self._compute(step, inputs, lora)

    def place_threads(self, processors: abc.Sequence[abc.Sequence[int]]) -> None:
        """Leaves the threads to the system: the device computes."""

    def prepare(self, batch: Batch) -> PreparedStep:
        """Sends the step's inputs. Waits for nothing but an earlier step's copy."""
        columns = batch.columns()
        placed = () if self.pictures is None else self.pictures.placed(batch.rows)
        if placed:  # the last token of a prompt may be a picture's
            columns = columns._replace(is_decode=False)
        if columns.is_decode:
            prepared = self._send(self.steps.decodes, columns)
        else:
            # Recorded steps do not keep the hidden states, which are to be scored or pooled.
            runs, pooled = tuple(scored_runs(batch.rows)), tuple(pooled_runs(batch.rows))
            may_replay = not (runs or pooled)
            prepared = self._send(
                self.steps.prompts, columns, placed, may_replay=may_replay
            )._replace(runs=runs, pooled=pooled)
        if returns_experts(batch, self._decoder):
            return prepared._replace(num_routed=sum(row.num_tokens for row in batch.rows))
        return prepared

    def _send(
        self,
        step: FixedStep,
        batch: BatchColumns,
        placed: tuple[PlacedRows, ...] = (),
        *,
        may_replay: bool = True,
    ) -> PreparedStep:
        step.inputs.block.wait()
        tokens = (each.tokens for each in placed)
        step.inputs.fill(batch, mutual_of(self._decoder.pictures, tokens))
        kind = step.lora.fill(batch)
        self.num_lora_steps += kind is not StepKind.BASE
        num_rows = len(batch.sequences)
        wanted = None
        if may_replay and self.recorded is not None:
            shapes = self.steps.shapes
            if batch.is_decode:
                wanted = shapes.of_decodes(kind, num_rows)
            else:
                wanted = shapes.of_prompts(kind, sum(batch.counts), num_rows)
        shape = self._taken(wanted)
        if shape is not None:
            step.inputs.pad(shape)
        step.fill_segments(batch, shape)
        step.fill_pictures(placed, shape)
        step.inputs.send()
        return PreparedStep(step, num_rows, kind, shape, wanted, placed=placed)

    def _taken(self, wanted: StepShape | None) -> StepShape | None:
        """Returns the shape of a recorded step, if it is to be replayed."""
        if wanted is None:
            return None
        assert self.recorded is not None
        return wanted if self.recorded.takes(wanted) else None

    @torch.inference_mode()
    def forward(self, inputs: PreparedStep) -> Logits:
        lora = self._run(inputs, is_scored=inputs.keeps_hidden)
        num_rows, num_routed = inputs.num_rows, inputs.num_routed
        experts = self.results.choices_of(num_routed) if num_routed else None
        return Logits(
            self.results.logits_of(num_rows, lora), self.results.argmax[:num_rows], experts
        )

    def _run(self, inputs: PreparedStep, *, is_scored: bool) -> LoraStep | None:
        """Launches a step; returns its adapters."""
        step, shape = inputs.step, inputs.shape
        if shape is not None:
            assert self.recorded is not None
            is_replayed = self.recorded.run(shape)
            lora = step.lora.padded_step(shape)
        else:
            is_replayed = False
            lora = step.lora.step() if inputs.kind is not StepKind.BASE else None
            filled = replace(step.step_inputs(self.states, None), pictures=inputs.placed)
            self._compute(step, filled, lora, is_scored=is_scored)
        self.steps.table.close()
        self.num_replays += is_replayed
        self.num_eager_steps += not is_replayed
        return lora

    @torch.inference_mode()
    def score(self, inputs: PreparedStep) -> Iterator[Scored]:
        last = self._last
        if not inputs.pooled:
            self._last = None
        if not inputs.runs:
            return
        assert last is not None, "the step is computed"
        assert self.transformer is not None
        lora = inputs.step.lora.step() if inputs.kind is not StepKind.BASE else None
        yield from score_slices(self.transformer, last, lora, inputs.runs, self._limits.max_rows)

    @torch.inference_mode()
    def pool(self, inputs: PreparedStep) -> Iterator[Hidden]:
        if not inputs.pooled:
            return
        last, self._last = self._last, None
        assert last is not None, "the step is computed"
        assert self.transformer is not None
        lora = inputs.step.lora.step() if inputs.kind is not StepKind.BASE else None
        yield from hidden_slices(
            self.transformer, last, lora, inputs.pooled, self._limits.max_rows, self.arena
        )

    def keep_part(self, row: BatchRow) -> None:
        if self.states is not None:
            self.states.keep_part(row)

    @torch.inference_mode()
    def use_idle_time(self) -> bool:
        """Records a step whose size has occurred."""
        if self.recorded is None or not self.recorded.record_wanted(self.steps.fill_padding):
            return False
        self.steps.table.close()
        return True

    def free_memory(self, *, weights: bool) -> int:
        """Lets go of recorded steps, too: they have addresses in the freed memory."""
        self._last = None  # which has all of it
        self.recorded = None
        return super().free_memory(weights=weights)

    @torch.inference_mode()
    def restore(self) -> None:
        """Records steps anew: kernels are compiled already."""
        self._allocate_freed()
        self._record_again()

    def _record_again(self) -> None:
        if self.recorded is None:
            self.recorded = self._unrecorded()
            try:
                self._record_steps()
            except BaseException:
                self.recorded = None  # half of it recorded: anew the next time
                raise

    def compute(self, shape: StepShape) -> None:
        """Computes the step of this shape that lies at the fixed addresses, operation by
        operation."""
        step, is_recorded = self.steps.of(shape), self.recorded is not None
        lora = step.lora.padded_step(shape, is_recorded=is_recorded)
        self._compute(step, step.step_inputs(self.states, shape), lora)

    def _compute(
        self,
        step: FixedStep,
        inputs: StepInputs,
        lora: LoraStep | None,
        *,
        is_scored: bool = False,
    ) -> None:
        """Writes the step's logits, the largest of each row, and the experts of each token to their
        places."""
        assert self.transformer is not None, "the weights are freed"
        assert self.kv_caches is not None, "the pages are freed"
        step.inputs.write_pages()
        choices = self.results.choices_of(len(inputs.token_ids))
        if is_scored:
            self._last = self.transformer.layers(inputs, self.kv_caches, lora, choices)
            made = self.transformer.logits(self._last, inputs.logit_rows, lora)
        else:
            made = self.transformer.forward(inputs, self.kv_caches, lora, choices)
        if not (self._decoder.is_first_rank and self._decoder.has_embedding):
            return  # rank 0 samples
        logits = self.results.logits_of(len(inputs.logit_rows), lora)
        logits.copy_(made)
        torch.argmax(logits, dim=-1, out=self.results.argmax[: len(logits)])
