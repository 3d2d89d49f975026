"""What all steps share: inputs and plans at fixed addresses, and the places of their results."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.adapters.targets import AppliedTargets
from inference_svc.backends.arena import Arena
from inference_svc.backends.base import empty_choices
from inference_svc.backends.cuda.inputs import CudaInputs, CudaPictures
from inference_svc.backends.cuda.lora import CudaLora
from inference_svc.backends.cuda.padded_sizes import StepShape, StepShapes
from inference_svc.backends.cuda.pages import PageTable
from inference_svc.backends.cuda.segments import CudaSegments
from inference_svc.backends.lora_step import LoraStep
from inference_svc.core import Batch, BatchColumns, BatchRow, Request, SamplingParams, Sequence
from inference_svc.model.description import Decoder, Pictures
from inference_svc.model.inputs import PlacedRows, StepInputs
from inference_svc.model.recurrent_states import RecurrentStates
from inference_svc.model.sharding.exchange import Exchange
from kernels.recurrence import NOWHERE


class StepLimits(NamedTuple):
    """The most tokens and rows of a step, and pages of a row."""

    max_tokens: int
    max_rows: int
    max_pages: int


class FixedStep(NamedTuple):
    """The inputs and the LoRA plans of steps of up to so many tokens, at fixed addresses, the
    segments of a model with recurrent layers, and the embeddings of pictures if layers here take
    them in, which no decode step has."""

    inputs: CudaInputs
    lora: CudaLora
    segments: CudaSegments | None
    pictures: CudaPictures | None

    def fill_segments(self, batch: BatchColumns | None, shape: StepShape | None) -> None:
        """See `CudaSegments.fill`."""
        if self.segments is not None:
            self.segments.fill(batch, shape)

    def fill_pictures(self, placed: SequenceOf[PlacedRows], shape: StepShape | None) -> None:
        """See `CudaPictures.fill`; nothing without a `shape`, which is a recorded step's."""
        if self.pictures is not None and shape is not None:
            self.pictures.fill(placed)

    def step_inputs(self, states: RecurrentStates | None, shape: StepShape | None) -> StepInputs:
        """Returns the filled inputs, or, of a step padded to `shape`, any of it."""
        own = self.inputs
        inputs = own.inputs() if shape is None else own.padded_inputs(shape)
        if self.pictures is not None and shape is not None:
            inputs = replace(inputs, masked=self.pictures.of_step(shape.num_tokens))
        if self.segments is None:
            return inputs
        assert states is not None, "the states are freed"
        return replace(inputs, recurrent=self.segments.plan(states, shape))


class FixedSteps:
    """The places of steps with prompts, and of decode steps, which share a table of pages. The
    cache's last page, behind its `num_pages`, is padding's."""

    def __init__(
        self,
        arena: Arena,
        targets: AppliedTargets,
        limits: StepLimits,
        num_pages: int,
        page_size: int,
        states: RecurrentStates | None = None,
        exchange: Exchange | None = None,
        pictures: Pictures | None = None,
        *,
        takes_pictures: bool = False,
    ) -> None:
        """`takes_pictures`: layers here take in embeddings of the model's pictures."""
        max_tokens, max_rows, max_pages = limits
        self._exchange, self._pictures = exchange, pictures
        self._takes_pictures = takes_pictures
        self._spare_state = None if states is None else states.spare
        self._max_pages, self._page_size = max_pages, page_size
        self._padding_page = num_pages
        self.table = PageTable(max_rows, max_pages, num_pages, arena.device, arena.streams.compute)
        self.shapes = StepShapes(max_tokens, max_rows, max_pages * page_size)
        # Padding of a step with prompts is one row more.
        self.prompts = self._make_step(arena, targets, max_tokens, max_rows + 1, has_prompts=True)
        self.decodes = self._make_step(arena, targets, max_rows, max_rows, has_prompts=False)

    def _make_step(
        self,
        arena: Arena,
        targets: AppliedTargets,
        max_tokens: int,
        max_rows: int,
        *,
        has_prompts: bool,
    ) -> FixedStep:
        reserved_bytes = CudaLora.num_bytes(max_tokens, max_rows)
        spare = self._spare_state
        if spare is not None:
            reserved_bytes += CudaSegments.num_bytes(max_tokens, max_rows)
        own = self._pictures if has_prompts and self._takes_pictures else None
        if own is not None:
            reserved_bytes += CudaPictures.mask_bytes(max_tokens)
        inputs = CudaInputs(
            max_tokens, max_rows, self.table, self._page_size, reserved_bytes, self._pictures
        )
        block, segments, pictures = inputs.block, None, None
        if spare is not None:
            segments = CudaSegments(block, max_tokens, max_rows, spare)
        if own is not None:
            dtype, stream = arena.layout.dtype, arena.streams.compute
            pictures = CudaPictures(block, max_tokens, own, dtype, stream)
        lora = CudaLora(arena, targets, block, max_tokens, max_rows, self._exchange)
        return FixedStep(inputs, lora, segments, pictures)

    @property
    def num_bytes(self) -> int:
        inputs = (step.inputs.block.num_bytes for step in (self.prompts, self.decodes))
        pictures = self.prompts.pictures
        return self.table.num_bytes + sum(inputs) + (0 if pictures is None else pictures.num_bytes)

    def fill_padding(self, shape: StepShape) -> None:
        """Sends a step of this shape that is nothing but padding, without adapters."""
        step = self.of(shape)
        step.inputs.block.wait()
        step.lora.clear()
        if shape.has_prompts:
            batch = self.padding_batch(shape.num_tokens, shape.num_rows).columns()
            step.inputs.fill(batch)
            step.inputs.pad(shape)
            step.fill_segments(batch, shape)
            step.fill_pictures((), shape)
        else:
            step.inputs.fill_padding(shape)
            step.fill_segments(None, shape)
        step.inputs.send()

    def note_elsewhere(self, slot: int, *, has_more: bool) -> None:
        """Notes whether the adapter at a slot has more than A and B in another stage: steps with it
        are of the same kind in all stages."""
        for step in (self.prompts, self.decodes):
            (step.lora.more_elsewhere.add if has_more else step.lora.more_elsewhere.discard)(slot)

    def of(self, shape: StepShape) -> FixedStep:
        return self.prompts if shape.has_prompts else self.decodes

    def padding_batch(self, num_tokens: int, max_rows: int) -> Batch:
        """Returns prompts of so many tokens in all, or as many as fit `max_rows`, whose pages are
        padding's, and whose states are not stored."""
        rows, longest = [], self._max_pages * self._page_size
        num_rows = min(max_rows, -(-num_tokens // longest))
        for start in range(0, num_rows * longest, longest):
            length = min(longest, num_tokens - start)
            sequence = Sequence(Request("warm-up", (0,) * length, SamplingParams()))
            sequence.page_ids = [self._padding_page] * -(-length // self._page_size)
            sequence.state_written = NOWHERE
            rows.append(BatchRow(sequence, 0, length, samples=True))
        return Batch(tuple(rows))


@dataclass(frozen=True, eq=False, slots=True)
class StepResults:
    """One place for the results of all steps, or each recording would keep its own."""

    logits: Tensor
    """fp32 [max_rows, vocab_size + max_added_tokens]"""
    argmax: Tensor
    """int64 [max_rows]"""
    choices: Tensor | None
    """The experts of each token; None for a model without experts."""
    vocab_size: int
    has_stages: bool = False
    """The last stage hands on logits of all tokens that adapters may add, whether any has."""

    @classmethod
    def allocate(
        cls, decoder: Decoder, targets: AppliedTargets, limits: StepLimits, device: torch.device
    ) -> StepResults:
        num_logits = decoder.vocab_size + targets.max_added_tokens
        return cls(
            logits=torch.zeros(limits.max_rows, num_logits, device=device),
            argmax=torch.zeros(limits.max_rows, dtype=torch.int64, device=device),
            choices=empty_choices(decoder, limits.max_tokens, device),
            vocab_size=targets.vocab_size,
            has_stages=decoder.stage is not None,
        )

    @property
    def num_bytes(self) -> int:
        choices_bytes = 0 if self.choices is None else self.choices.nbytes
        return self.logits.nbytes + self.argmax.nbytes + choices_bytes

    def logits_of(self, num_rows: int, lora: LoraStep | None) -> Tensor:
        """Returns the place of a step's logits, fp32 [num_rows, tokens]. Tokens that adapters add
        are among them if there may be any."""
        if self.has_stages:
            return self.logits[:num_rows]
        num_added = 0 if lora is None else lora.num_added_tokens
        return self.logits[:num_rows, : self.vocab_size + num_added]

    def choices_of(self, num_tokens: int) -> Tensor | None:
        """Returns the place of the experts that a step's tokens choose, int32 [layers, num_tokens,
        experts of each]; None if the model has none."""
        return None if self.choices is None else self.choices[:, :num_tokens]
