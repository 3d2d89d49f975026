"""The memory that a step of the CUDA backend really allocates, to compare plans with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu_model.launches import Launch
from inference_svc.backends.cuda.backend import CudaBackend
from inference_svc.backends.cuda.needs import PRODUCT_NODES
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape
from inference_svc.core import EngineConfig
from tests.support.gpu.live_bytes import live_bytes
from tests.support.gpu.models import MAX_PAGES, MAX_RANK, MAX_ROWS, NUM_SLOTS, PAGE_SIZE

SPARED_NODES = 2
"""The embedding's adapters have one kernel, and the first layer has nothing to add to the stream:
both are counted as the others."""


MOST = 1.1
"""A plan, in units of the allocated bytes: it counts kernels that no one step runs together, and
memory of two streams that in this test is one."""


def config_of(num_tokens: int, **changes: Any) -> EngineConfig:
    """The sizes of the models' backends."""
    return EngineConfig(
        Path(),
        "model",
        device="cuda",
        max_model_len=MAX_PAGES * PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_sequences=MAX_ROWS,
        max_batch_tokens=num_tokens,
        max_loras=NUM_SLOTS,
        max_lora_rank=MAX_RANK,
        **changes,
    )


def peak_bytes(backend: CudaBackend, num_tokens: int, *, has_decodes: bool) -> int:
    """Returns what a step of so many tokens, all with adapters, allocates at most at one time.
    `has_decodes`: some are rows of their own."""
    step = backend.steps.prompts
    step.inputs.fill_padding(StepShape.of_decodes(StepKind.ANY, MAX_ROWS))
    inputs = step.inputs.views(num_tokens, MAX_ROWS, MAX_ROWS, num_tokens // 16, has_decodes)
    if step.segments is not None:
        shape = StepShape(StepKind.ANY, num_tokens, MAX_ROWS - 1, has_prompts=True)
        inputs = replace(inputs, recurrent=step.segments.plan(backend.states, shape))
    lora = step.lora.any_step(StepKind.ANY, num_tokens, MAX_ROWS, has_tiles=True)
    with live_bytes() as live:
        last = backend.transformer.layers(inputs, backend.kv_caches, lora)
        backend.transformer.logits(last, inputs.logit_rows, lora)  # as of a scored step
    return live.peak


def choose_the_first(launch: Launch) -> None:
    """Writes what kernels read that torch's operations read, too: tokens of pairs."""
    tokens = launch.arguments.get("tokens")
    if isinstance(tokens, torch.Tensor):
        tokens.zero_()


def num_kernels(names: list[str]) -> int:
    """Returns how many kernels launches of these names may have on a device."""
    # Products of wider layers are split, and the sums of their parts are kernels, too.
    num_products = sum(map(names.count, ("linear", "mm", "few_rows_kernel")))
    num_products -= names.count("sum_splits_kernel")
    # Padding fills, and copies.
    return len(names) + (PRODUCT_NODES - 1) * num_products + names.count("pad")
