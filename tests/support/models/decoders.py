"""Our decoders, run over sequences in any chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from inference_svc import core
from inference_svc.backends.native.adapter_ops import ADDED_TOKENS, GroupedOp
from inference_svc.backends.native.buffers import StepArrays
from inference_svc.backends.native.program import NativeTransformer
from inference_svc.model import operations
from inference_svc.model.inputs import StepInputs
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.lora import Lora
from inference_svc.model.recurrent_states import RecurrentStates
from inference_svc.model.transformer import Transformer
from kernels.elementwise import NormWeight
from kernels.experts import Pairs
from kernels.native.library import NativeOp

Rows = Sequence[tuple[core.Sequence, int, int, bool]]


@dataclass(eq=False)
class Decoder:
    """Our decoder with a cache, and sequences whose pages are scattered in it. Each has two of the
    `states`, if there are any."""

    cache: KVCaches
    sequences: list[core.Sequence] = field(default_factory=list)

    def add(self, token_ids: Sequence[int]) -> core.Sequence:
        request = core.Request(str(len(self.sequences)), tuple(token_ids), core.SamplingParams())
        sequence = core.Sequence(request)
        used = sum(len(other.page_ids) for other in self.sequences)
        count = -(-len(token_ids) // self.cache.page_size)
        assert used + count <= self.cache.num_pages
        # 7 has no divisor in common with the number of pages: a walk over all of them.
        sequence.page_ids = [i * 7 % self.cache.num_pages for i in range(used, used + count)]
        sequence.state_written = 2 * len(self.sequences) + 1
        self.sequences.append(sequence)
        return sequence

    def step(self, rows: Rows) -> torch.Tensor:
        """Rows of (sequence, first token, number of tokens, samples); fp32 logits after the last
        token of each."""
        raise NotImplementedError

    def every_logit(self, row: tuple[core.Sequence, int, int, bool]) -> torch.Tensor:
        """One row's step; fp32 logits after each of its tokens."""
        raise NotImplementedError

    def logits(self, token_ids: Sequence[int], chunk: int) -> torch.Tensor:
        """Logits after every token, computed `chunk` tokens at a time, the sequence being alone."""
        sequence, parts = self.add(token_ids), []
        for start in range(0, len(token_ids), chunk):
            count = min(chunk, len(token_ids) - start)
            parts.append(self.every_logit((sequence, start, count, True)))
        return torch.cat(parts)

    def decoded_logits(
        self, token_ids: Sequence[int], ends: Sequence[int], num_tokens: int
    ) -> torch.Tensor:
        """Logits [row, token] after the last `num_tokens` before each of `ends`, each computed by a
        row of one token. The rows decode side by side, with all tokens before as their context."""
        sequences = [self.add(token_ids[:end]) for end in ends]
        for sequence, end in zip(sequences, ends, strict=True):
            if end > num_tokens:
                self.step([(sequence, 0, end - num_tokens, True)])
        steps = [
            self.step(
                [
                    (sequence, end - left, 1, True)
                    for sequence, end in zip(sequences, ends, strict=True)
                ]
            )
            for left in range(num_tokens, 0, -1)
        ]
        return torch.stack(steps, dim=1)

    def _begin(self, rows: Rows) -> core.Batch:
        for sequence, start, _, _ in rows:
            sequence.num_computed = start
        return batch_of(rows)

    def _note_states(self, rows: Rows) -> None:
        """The state that the step has written is the next one's; a sequence has two slots."""
        for sequence, _, _, _ in rows:
            read = sequence.state_read or sequence.state_written + 1
            sequence.state_read, sequence.state_written = sequence.state_written, read


@dataclass(eq=False, kw_only=True)
class TorchDecoder(Decoder):
    transformer: Transformer
    lora: Lora | None = None
    states: RecurrentStates | None = None

    def step(self, rows: Rows) -> torch.Tensor:
        logits = self.transformer.forward(self._inputs(rows), self.cache, self.lora).float()
        self._note_states(rows)
        return logits

    def every_logit(self, row: tuple[core.Sequence, int, int, bool]) -> torch.Tensor:
        inputs = self._inputs([row])
        inputs = replace(inputs, logit_rows=torch.arange(len(inputs.token_ids)))
        logits = self.transformer.forward(inputs, self.cache, self.lora).float()
        self._note_states([row])
        return logits

    def _inputs(self, rows: Rows) -> StepInputs:
        return StepInputs.build(self._begin(rows), self.cache.page_size, states=self.states)


@dataclass(eq=False, kw_only=True)
class NativeDecoder(Decoder):
    transformer: NativeTransformer
    arrays: StepArrays

    def step(self, rows: Rows) -> torch.Tensor:
        self._fill(rows)
        logits = self.transformer.forward().clone()
        self._note_states(rows)
        return logits

    def every_logit(self, row: tuple[core.Sequence, int, int, bool]) -> torch.Tensor:
        self._fill([row])
        count = row[2]
        self.arrays.logit_rows[:count] = torch.arange(count)
        self.arrays.num_logits[0] = count
        logits = self.transformer.forward().clone()
        self._note_states([row])
        return logits

    def _fill(self, rows: Rows) -> None:
        batch = self._begin(rows)
        self.arrays.fill(batch.columns())
        if self.transformer.states is not None:
            self.transformer.states.fill(batch.rows)


def batch_of(rows: Rows) -> core.Batch:
    return core.Batch(tuple(core.BatchRow(*row) for row in rows))


class NoAdapters:
    @property
    def every_group(self) -> frozenset[str]:
        return frozenset({ADDED_TOKENS})

    def add(
        self,
        group: str,
        x: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        rows: operations.Rows,
    ) -> Iterator[GroupedOp]:
        return iter(())

    def add_experts(
        self,
        group: str,
        x: torch.Tensor,
        out: torch.Tensor,
        pairs: Pairs,
        rows: operations.Rows,
    ) -> list[NativeOp]:
        return []

    def add_embedding(self, token_ids: torch.Tensor, out: torch.Tensor) -> list[NativeOp]:
        return []

    def replace_embeddings(self, token_ids: torch.Tensor, out: torch.Tensor) -> list[NativeOp]:
        return []

    def replace_logits(self, x: torch.Tensor, out: torch.Tensor) -> list[NativeOp]:
        return []

    def token_weights(self, module: str, norm: NormWeight, rows: operations.Rows) -> None:
        """No adapter replaces any."""


MAX_TOKENS, NUM_CELLS = 120, 400
