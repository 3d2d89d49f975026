"""Compiles every kernel, in many processes at once, then times a start.

Triton keeps compiled kernels on disk, where the later stages find them.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from bench.gpu_run.compile_pool import context_of_job, run_jobs
from bench.gpu_run.context import Context, Found
from bench.gpu_run.model import BenchModel
from bench.gpu_run.pack.store import MANIFEST
from bench.gpu_run.stages.parity import start_engine
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape, decode_sizes

START_S = 15.0
"""Time reserved for a start after everything is compiled."""


class Variant(NamedTuple):
    """The kernels of steps of `num_rows` decode rows, or of a prompt of `num_tokens`; without
    either, the kernels of the demo's model, in fp32."""

    num_rows: int = 0
    num_tokens: int = 0

    @property
    def name(self) -> str:
        if self.num_rows:
            return f"{self.num_rows} rows"
        return f"{self.num_tokens} tokens" if self.num_tokens else "the demo's model"


def run(context: Context) -> Found:
    """Runs the stage. Raises a kernel's error."""
    found: Found = {"variants": {}}
    chosen = variants(context)
    began_s = time.monotonic()

    def keep(result: tuple[str, float]) -> None:
        name, seconds = result
        found["variants"][name] = seconds
        context.save(found)

    if context.is_emulated:
        for each in chosen:
            keep((each.name, compile_variant(context, each)))
    else:
        seconds = context.deadline.left_s - START_S
        found["pool"] = run_jobs(partial(_compile_alone, context.pack), chosen, seconds, keep)
    found["compile_s"] = time.monotonic() - began_s
    context.save(found)
    began_s = time.monotonic()
    make_model(context).backend()
    found["start_s"] = time.monotonic() - began_s
    return found


def variants(context: Context) -> list[Variant]:
    """Returns a variant for each size at which a launch may differ, the slowest first."""
    sizes = context.sizes
    prompts = [Variant(num_tokens=n) for n in sorted({*sizes.prompts, *sizes.kernel_tokens})]
    decodes = [Variant(num_rows=n) for n in decode_sizes(max(sizes.rows))]
    demo = [Variant()] if (context.pack / MANIFEST).is_file() else []
    return [*demo, *reversed(prompts), *reversed(decodes)]


def make_model(context: Context) -> BenchModel:
    """Makes a model whose launches equal those in the later measurements."""
    sizes = context.sizes
    return BenchModel(
        context,
        num_adapters=1,
        max_rows=max(sizes.rows),
        max_context=sizes.long_context,
        shares_layers=True,
        num_pages=2 * max(sizes.prompts) // sizes.page_size,
    )


def compile_variant(context: Context, variant: Variant) -> float:
    """Computes steps of this variant, without adapters and with one, and returns the seconds."""
    began_s = time.monotonic()
    if variant == Variant():
        start_engine(context).stop()
        return time.monotonic() - began_s
    model = make_model(context)
    backend = model.backend(is_captured=False, is_warm=False)
    for num_adapters in (0, 1):
        if variant.num_rows:
            rows = model.sequences([1] * variant.num_rows, num_adapters)
            model.decode_times(backend, rows, 1, warm_up_steps=0)
            with torch.inference_mode():
                # A recording has every kernel, for any targets of adapters.
                for kind in (StepKind.LORA, StepKind.ANY) if num_adapters else (StepKind.BASE,):
                    backend.compute(StepShape.of_decodes(kind, variant.num_rows))
        else:
            [prompt] = model.sequences([variant.num_tokens], num_adapters)
            model.prompt_times(backend, prompt)
    context.timer.synchronize()
    return time.monotonic() - began_s


def _compile_alone(pack: Path, variant: Variant) -> tuple[str, float]:
    """Compiles a variant in its own process, and returns its name and the seconds."""
    return variant.name, compile_variant(context_of_job(pack), variant)
