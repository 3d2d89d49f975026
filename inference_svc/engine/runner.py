"""Turns a batch into tensors, runs the model, samples. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from inference_svc.adapters.arena import Arena
from inference_svc.adapters.lora_step import make_lora_step
from inference_svc.core import Batch, SampledToken
from inference_svc.engine.sampler import Sampler
from inference_svc.model.inputs import StepInputs
from inference_svc.model.transformer import Transformer
from kernels.attention import KVCache
from kernels.lora import LoraGroup


class Runner:
    """Owns nothing but references: the model, its KV cache, the arena."""

    def __init__(
        self,
        model: Transformer,
        kv_cache: KVCache,
        arena: Arena,
        groups: Mapping[str, LoraGroup],
        sampler: Sampler,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._arena = arena
        self._groups = groups
        self._sampler = sampler
        self.num_lora_steps = 0
        self.changes_s = 0.0
        """What the residency changes of the last batch cost."""
        self.compute_s = 0.0
        """How long the model computed the last batch, with choosing its tokens: on a device that
        computes beside us, until they were here."""

    @property
    def copies_are_done(self) -> bool:
        """Whether all residency changes of earlier batches have read what they copy."""
        return self._arena.copies_are_done

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[SampledToken]:
        """Applies the residency changes, computes every row, and samples for the rows that
        `samples`, in their order."""
        began_s = time.perf_counter()
        self._arena.apply(batch.residency)
        self.changes_s = time.perf_counter() - began_s
        if not batch.rows:
            return []
        inputs = StepInputs.build(batch, self._kv_cache.page_size, self._arena.device)
        lora = make_lora_step(batch.rows, self._arena, self._groups)
        self.num_lora_steps += lora is not None
        sampling = [row.sequence for row in batch.rows if row.samples]
        began_s = time.perf_counter()
        logits = self._model.forward(inputs, self._kv_cache, lora)
        sampled = self._sampler.sample(logits, sampling)
        self.compute_s = time.perf_counter() - began_s
        return sampled
