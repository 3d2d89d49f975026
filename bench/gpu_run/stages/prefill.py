"""Times prompts: the time to the first token, the host's part, attention against torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu_run.context import Context, Found
from bench.gpu_run.model import BenchModel
from bench.results import median
from inference_svc.backends.cuda.backend import CudaBackend
from kernels.attention import AttentionPlan, KVCache, attend

NUM_ADAPTERS = 8
REPEATS = 3
MARGIN_S = 6.0
"""Time reserved for attention alone."""


def run(context: Context) -> Found:
    sizes = context.sizes
    model = BenchModel(
        context,
        num_adapters=NUM_ADAPTERS,
        max_rows=1,
        max_context=max(sizes.prompts),
        num_pages=2 * max(sizes.prompts) // sizes.page_size + 2,
    )
    backend = model.backend()
    found: Found = {"prompts": [], "attention": [], "left_out": []}
    for length in sizes.prompts:
        for num_adapters in (0, 1):
            if context.deadline.is_near(MARGIN_S if not context.is_emulated else 0.0):
                found["left_out"].append([length, num_adapters])
                continue
            found["prompts"].append(measure(model, backend, length, num_adapters))
            context.save(found)
    for length in sizes.prompts:
        if not context.deadline.is_near():
            found["attention"].append(attention(context, model, length))
            context.save(found)
    return found


def measure(model: BenchModel, backend: CudaBackend, length: int, num_adapters: int) -> Found:
    """Returns medians of a step of one prompt alone, after a first step."""
    times = []
    for _ in range(1 + (0 if model.context.is_emulated else REPEATS)):
        [prompt] = model.sequences([length], num_adapters)
        times.append(model.prompt_times(backend, prompt))
    chosen = times[1:] or times
    first_token_s = median([each.whole for each in chosen])
    return {
        "tokens": length,
        "num_adapters": num_adapters,
        "first_token_ms": 1e3 * first_token_s,
        "host_ms": 1e3 * median([each.host for each in chosen]),
        "tflop_per_s": model.product_flops(length) / first_token_s / 1e12,
    }


def attention(context: Context, model: BenchModel, length: int) -> Found:
    """Times a prompt's attention in one layer, against torch's over contiguous keys and values."""
    g, sizes, device = model.decoder.attentions[0], context.sizes, context.device
    num_pages = -(-length // sizes.page_size)
    cache = KVCache.allocate(
        num_layers=1, num_pages=num_pages, page_size=sizes.page_size,
        num_kv_heads=g.num_kv_heads, head_dim=g.head_dim, dtype=sizes.dtype, device=device,
    )  # fmt: skip
    cache.data.normal_()
    pages = torch.randperm(num_pages).tolist()
    plan = AttentionPlan.build([0], [length], [pages], sizes.page_size, device)
    q = torch.randn(length, g.num_heads, g.head_dim, dtype=sizes.dtype, device=device)
    scale = g.scale
    starts = torch.tensor(pages, device=device)[:, None] * sizes.page_size
    cells = (starts + torch.arange(sizes.page_size, device=device)).flatten()[None, :length]
    k, v = (each[0].contiguous() for each in cache.gather(0, cells))

    # Not every torch has the option for groups of heads, so keys and values are repeated.
    per_key = g.num_heads // g.num_kv_heads
    wide_k, wide_v = (each.repeat_interleave(per_key, dim=1) for each in (k, v))
    ends = torch.tensor([0, length], dtype=torch.int32, device=device)
    head_first = [each.transpose(0, 1)[None].contiguous() for each in (q, wide_k, wide_v)]

    def ours() -> torch.Tensor:
        return attend(q, cache, 0, plan, scale=scale)

    def sdpa() -> torch.Tensor:
        q_, k_, v_ = head_first
        out = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, scale=scale)
        return out[0].transpose(0, 1)

    def varlen() -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        whole: Any = partial(varlen_attn, q, wide_k, wide_v, ends, ends, length, length)
        out: torch.Tensor = whole(window_size=(-1, 0))
        return out

    flops = 2 * 2 * g.num_heads * g.head_dim * length * (length + 1) / 2
    wanted = ours().float()
    found: Found = {"tokens": length, "ours": _rate(context, ours, wanted, flops)}
    for name, run in (("torch_sdpa", sdpa), ("torch_varlen", varlen)):
        try:
            found[name] = _rate(context, run, wanted, flops)
        except (ImportError, RuntimeError, TypeError) as error:
            found[name] = {"missing": f"{type(error).__name__}: {error}"[:300]}
    return found


def _rate(
    context: Context, run: Callable[[], torch.Tensor], wanted: torch.Tensor, flops: float
) -> Found:
    difference = (run().float() - wanted).norm() / wanted.norm()

    def call() -> None:
        run()

    us = context.timer.time_us(call, 1).best_us
    return {"us": us, "tflop_per_s": flops / us / 1e6, "difference_to_ours": float(difference)}
