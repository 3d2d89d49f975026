"""A device with little memory, real or not, and what is sampled on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from inference_svc.backends.cuda.backend import CudaBackend
from inference_svc.engine.compute.profiler import Marks
from inference_svc.engine.compute.runner import Runner
from inference_svc.engine.compute.sampler import Sampler
from inference_svc.engine.policy.memory_backoff import StepLimit
from inference_svc.model.transformer import Transformer
from tests.support.gpu.models import settle, steps

MIB = 1 << 20
FITS = 20
"""Tokens that an emulated device has memory for."""
LEFT_BYTES = 32 * MIB
"""What is left of a real one: enough for some tokens of a model this wide, not for all."""


@dataclass
class Scarce:
    """Stands for a device with little memory, which runs out at the end of a step."""

    transformer: Transformer

    def forward(self, inputs: Any, *others: Any) -> torch.Tensor:
        logits = self.transformer.forward(inputs, *others)
        if len(inputs.token_ids) > FITS:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits


@contextmanager
def little_memory(backend: CudaBackend) -> Iterator[None]:
    device = backend.arena.device
    if device.type == "cpu":
        backend.transformer = Scarce(backend.transformer)  # type: ignore[assignment]
        yield
        return
    torch.cuda.empty_cache()
    _, total_bytes = torch.cuda.mem_get_info(device)
    limit_bytes = torch.cuda.memory_reserved(device) + LEFT_BYTES
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def tokens(backend: Any, slots: list[int], limit: StepLimit) -> list[list[int]]:
    """Returns what is sampled in each step."""
    sampler = Sampler((), has_device_memory=backend.arena.device.type != "cpu")
    runner = Runner(backend, sampler, Marks(), limit)
    results = []
    for batch in steps(slots):
        results.append(runner.run(batch))
        settle(batch)
    assert not any(result.lost for result in results)
    return [[token.token_id for token in result.sampled] for result in results]
