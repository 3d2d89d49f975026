"""Operations between the projections that only some families use, each with its definition in
torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu_run.cases.lora_cases import random
from bench.gpu_run.context import Context
from bench.gpu_run.model import read_description
from kernels import elementwise
from kernels.attention import AttentionPlan, HeadNorms, KVCache, attend, rotate_and_store
from kernels.attention import reference as attention_reference
from kernels.elementwise import NormWeight
from kernels.elementwise import reference as elementwise_reference

HEAD_DIMS = (128, 256, 512)
"""Elements of a head in most families, and in Gemma's layers."""
EPS, SCALE, SOFTCAP = 1e-5, 0.05, 1.0


class FamilyCase(NamedTuple):
    """An operation to measure. `run` makes `num_calls` calls, which may change their inputs;
    `result` and `wanted` compute the same inputs with the kernels and with the definition."""

    name: str
    run: Callable[[], None]
    result: Callable[[], Tensor]
    wanted: Callable[[], Tensor]
    num_calls: int = 1


def names(context: Context) -> list[str]:
    return list(_makers(context))


def make(context: Context, name: str) -> FamilyCase:
    return _makers(context)[name](name)


def error(case: FamilyCase) -> float:
    """Returns the relative RMS difference from the definition."""
    got, wanted = case.result().double(), case.wanted().double()
    return float((got - wanted).norm() / wanted.norm())


def _makers(context: Context) -> dict[str, Callable[[str], FamilyCase]]:
    sizes = context.sizes
    rows, tokens = sizes.kernel_rows[-1], sizes.kernel_tokens[0]
    found: dict[str, Callable[[str], FamilyCase]] = {}
    for kind, options in NORMS.items():
        found[f"{kind}, {tokens} tokens"] = partial(_norm, context, tokens, **options)
    found[f"geglu, {tokens} tokens"] = partial(_geglu, context, tokens)
    for head_dim in HEAD_DIMS:
        for kind, options in STORES.items():
            name = f"{kind}, heads of {head_dim}, {tokens} tokens"
            found[name] = partial(_store, context, tokens, head_dim, **options)
        for kind, options in ATTENTIONS.items():
            name = f"{kind}, heads of {head_dim}"
            firsts, counts = [sizes.contexts[0] - 1] * rows, [1] * rows
            decode = partial(_attention, context, head_dim, firsts, counts, **options)
            found[f"{name}, {rows} rows"] = decode
            prompt = partial(_attention, context, head_dim, [0], [tokens], **options)
            found[f"{name}, {tokens} tokens"] = prompt
    return found


NORMS: dict[str, dict[str, Any]] = {
    "a centred norm": {"is_centred": True},
    "a norm in fp32": {"is_wide": True},
    "a norm of scaled sums": {"delta_scale": 0.2, "sum_scale": 0.5},
}
STORES: dict[str, dict[str, Any]] = {
    "a part turned, neighbours": {"part": 0.5, "is_interleaved": True},
    "nothing turned, growing queries": {"part": 0.0, "grows": True},
    "norms in fp32": {"norms": "qk", "is_wide": True},
    "norms of all heads": {"norms": "qk", "is_of_all": True},
    "norms behind the rotation": {"norms": "qk", "are_rotated": True},
    "values that are keys": {"norms": "qkv", "sides": 1, "is_wide": True},
    "keys of another layer": {"norms": "q", "sides": 0},
}
"""Options of the operation before attention; see `_store`."""
ATTENTIONS: dict[str, dict[str, Any]] = {
    "attention": {},
    "soft-capped attention of a window": {"softcap": SOFTCAP, "window": 3},
    "attention of a window with sinks": {"window": 3, "has_sinks": True},
}


def _weight(context: Context, size: int, *, is_wide: bool = False) -> Tensor:
    return (random(context, size) * 0.1 + 1).to(torch.float32 if is_wide else context.sizes.dtype)


def _norm(
    context: Context,
    num_tokens: int,
    name: str,
    *,
    is_wide: bool = False,
    is_centred: bool = False,
    **scales: Any,
) -> FamilyCase:
    size = read_description(context.sizes.config).hidden_size
    # With a mean of 0, the centred norm would equal the other one.
    hidden, delta = random(context, 2, num_tokens, size) + 1
    weight = _weight(context, size, is_wide=is_wide)
    norm, states = NormWeight(weight, EPS, is_centred), hidden.clone()

    def run() -> None:
        elementwise.add_rms_norm(states, delta, norm, **scales)

    def result() -> Tensor:
        both = hidden.clone()
        return torch.cat((elementwise.add_rms_norm(both, delta, norm, **scales), both))

    def wanted() -> Tensor:
        both, compute = hidden.clone(), elementwise_reference.add_rms_norm
        normed = compute(both, delta.clone(), weight, EPS, is_centred=is_centred, **scales)
        return torch.cat((normed, both))

    return FamilyCase(name, run, result, wanted)


def _geglu(context: Context, num_tokens: int, name: str) -> FamilyCase:
    size = read_description(context.sizes.config).max_intermediate_size
    gate, up = random(context, num_tokens, 2 * size).chunk(2, dim=1)

    def run() -> None:
        elementwise.geglu(gate, up)

    return FamilyCase(
        name,
        run,
        partial(elementwise.geglu, gate, up),
        partial(elementwise_reference.geglu, gate, up),
    )


def _cache(context: Context, num_pages: int, head_dim: int) -> KVCache:
    cache = KVCache.allocate(
        num_layers=1,
        num_pages=num_pages,
        page_size=context.sizes.page_size,
        num_kv_heads=read_description(context.sizes.config).attentions[0].num_kv_heads,
        head_dim=head_dim,
        dtype=context.sizes.dtype,
        device=context.device,
    )
    cache.data.normal_(generator=torch.Generator(context.device).manual_seed(0))
    return cache


def _angles(
    cells: Tensor, num_rotated: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Returns cosines and sines of the first features of a head; None if none is rotated."""
    if not num_rotated:
        return None, None
    frequencies = torch.linspace(0.0, 0.1, num_rotated // 2, device=cells.device)
    return attention_reference.rotary_angles(cells, frequencies, 1.0, dtype)


def _store(
    context: Context,
    num_tokens: int,
    head_dim: int,
    name: str,
    *,
    part: float = 1.0,
    sides: int = 2,
    norms: str = "",
    is_wide: bool = False,
    is_of_all: bool = False,
    are_rotated: bool = False,
    is_interleaved: bool = False,
    grows: bool = False,
) -> FamilyCase:
    """Makes the case of the operation that rotates and stores keys and values.

    `part` is the rotated share of a head; `sides` counts keys and values that the projection makes
    (0 to 2); `norms` names which of q, k and v have a norm, for each head or (`is_of_all`) for all
    heads together; `grows` scales the queries by their position.
    """
    device, dtype = context.device, context.sizes.dtype
    num_heads = read_description(context.sizes.config).attentions[0].num_heads
    cache = _cache(context, -(-num_tokens // context.sizes.page_size), head_dim)
    num_kv_heads, cells = cache.num_kv_heads, torch.arange(num_tokens, device=device)
    qkv = random(context, num_tokens, (num_heads + sides * num_kv_heads) * head_dim)
    cos, sin = _angles(cells, int(part * head_dim), dtype)
    heads = {"q": num_heads, "k": num_kv_heads, "v": 1}
    weights = {
        each: _weight(context, head_dim * (heads[each] if is_of_all else 1), is_wide=is_wide)
        for each in norms
    }
    given = HeadNorms(**weights, eps=EPS, are_rotated=are_rotated)
    q_scale = (1 + 0.1 * cells).to(dtype) if grows else None

    rest = {"num_heads": num_heads, "is_interleaved": is_interleaved, "q_scale": q_scale}

    def call(compute: Callable[..., None], x: Tensor) -> None:
        compute(x, cache, 0, cells, cos, sin, given, **rest)

    def result(compute: Callable[..., None]) -> Tensor:
        call(compute, x := qkv.clone())
        stored = [each.flatten(1) for each in cache.gather(0, cells)] if sides else []
        return torch.cat((x[:, : num_heads * head_dim], *stored), dim=1)

    states = qkv.clone()
    return FamilyCase(
        name,
        partial(call, rotate_and_store, states),
        lambda: result(rotate_and_store),
        lambda: result(attention_reference.rotate_and_store),
    )


def _attention(
    context: Context,
    head_dim: int,
    firsts: list[int],
    counts: list[int],
    name: str,
    *,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> FamilyCase:
    page_size = context.sizes.page_size
    pages_of = [-(-(f + n) // page_size) for f, n in zip(firsts, counts, strict=True)]
    cache = _cache(context, sum(pages_of), head_dim)
    order = torch.randperm(cache.num_pages, generator=torch.Generator().manual_seed(0))
    pages = [part.tolist() for part in order.split(pages_of)]
    plan = AttentionPlan.build(firsts, counts, pages, page_size, context.device)
    num_heads = read_description(context.sizes.config).attentions[0].num_heads
    q = random(context, sum(counts), num_heads, head_dim)
    sinks = torch.linspace(-1.0, 1.0, num_heads, device=context.device) if has_sinks else None
    rest: dict[str, Any] = {"scale": SCALE, "window": window, "softcap": softcap, "sinks": sinks}

    def run() -> None:
        attend(q, cache, 0, plan, **rest)

    return FamilyCase(
        name,
        run,
        partial(attend, q, cache, 0, plan, **rest),
        partial(attention_reference.attend, q, cache, 0, plan, **rest),
    )
