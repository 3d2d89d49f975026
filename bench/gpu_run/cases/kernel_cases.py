"""The problems that measure the kernels' constants: each kernel on several problems of the
model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu_run.cases import delta_cases, expert_cases, lora_cases, quantised_cases
from bench.gpu_run.cases.expert_cases import Products, route_at_random
from bench.gpu_run.cases.lora_cases import Case, Ours, Pool, random
from bench.gpu_run.context import Context
from bench.gpu_run.model import read_description
from inference_svc.model.description import Attention
from kernels import elementwise, experts, lora
from kernels.attention import AttentionPlan, KVCache, attend, rotary_angles, rotate_and_store
from kernels.elementwise import NormWeight
from kernels.experts import Choice
from kernels.lora import GRANULE_BYTES, LoraPlan, LoraTable, ReplacedWeight, TableRow
from kernels.replaced import replace_logits, token_weights

NUM_LAYERS = 32
"""Layers, of which each call uses the next."""
CACHE_BYTES = 4 << 30
"""Maximum bytes of keys and values."""


class Prepared(NamedTuple):
    """A prepared problem. `run` makes `num_calls` calls, and `result` returns the first result."""

    run: Callable[[], None]
    num_calls: int
    result: Callable[[], torch.Tensor]


class Problem(NamedTuple):
    """A problem of one kernel. `prepare` runs again for each choice of constants, because plans may
    depend on them."""

    name: str
    prepare: Callable[[], Prepared]


def problems(context: Context, pool: Pool) -> dict[str, list[Problem]]:
    """Returns the problems of each kernel, by the name of its constants."""
    sizes = context.sizes
    rows, tokens = sizes.kernel_rows, sizes.kernel_tokens
    adapters = [lora_problem(context, pool, case) for case in few_cases(context)]
    decode = [_decode(context, n, sizes.contexts[0]) for n in (rows[0], rows[-2], rows[-1])]
    decode.append(_decode(context, rows[-1], sizes.contexts[0], sizes.long_context))
    prefill = [_prefill(context, n) for n in tokens]
    between = [*rows, *tokens]
    found = {
        "decode": decode,
        "segments": decode,
        "combine": decode,
        "prefill": prefill,
        "add_rms_norm": [_norm(context, n) for n in between],
        "swiglu": [_swiglu(context, n) for n in between],
        "store": [_store(context, n) for n in between],
        "replaced": [_replaced(context, n) for n in (rows[0], rows[-2])],
        "shrink": adapters,
        "expand": adapters,
        **_expert_problems(context),
        **_delta_problems(context),
        **_quantised_problems(context),
    }
    return {kernel: each[: sizes.tune_problems] for kernel, each in found.items()}


def few_cases(context: Context) -> list[Case]:
    """Returns cases for constants of a whole model: one row, many rows with an adapter each, and a
    prompt, for the widest outputs and the widest inputs."""
    sizes, groups = context.sizes, lora_cases.groups(context)
    inner = groups[:-1] or groups
    chosen = {max(inner, key=lambda g: sum(g.widths)), max(inner, key=lambda g: g.num_in)}
    found = []
    for group in sorted(chosen):
        for rows in (sizes.kernel_rows[0], sizes.kernel_rows[-2]):
            found.append(Case(group, sizes.rank, rows, rows))
        found.append(Case(group, sizes.rank, 1, 1, sizes.kernel_tokens[-1]))
    return found[: sizes.tune_problems]


def peer_cases(context: Context) -> list[Case]:
    """Returns cases for the peers' constants, which they keep by shape and tokens: of every group
    many rows with an adapter each, and a prompt. The output head never computes a whole prompt, so
    it has only rows."""
    sizes, groups, found = context.sizes, lora_cases.groups(context), []
    rows, tokens = sizes.kernel_rows[-2], sizes.kernel_tokens[-1]
    for group in groups:
        found.append(Case(group, sizes.rank, rows, rows))
        if group is not groups[-1]:
            found.append(Case(group, sizes.rank, 1, 1, tokens))
    return found[: sizes.tune_problems]


def lora_problem(context: Context, pool: Pool, case: Case) -> Problem:
    def prepare() -> Prepared:
        work = lora_cases.make_work(context, case, pool)
        ours = Ours(work, case.row_tokens, lora_cases.num_targets(context))
        before = work.out.clone()

        def run() -> None:
            for layer in range(len(work.layers)):
                ours.run(layer)

        def result() -> torch.Tensor:
            work.out.copy_(before)
            ours.run(0)
            return work.out

        return Prepared(run, len(work.layers), result)

    return Problem(case.name, prepare)


def _attention_of(context: Context) -> Attention:
    """Returns the first layer's attention, which represents all layers."""
    return read_description(context.sizes.config).attentions[0]


def _cache(context: Context, num_pages: int) -> KVCache:
    """Returns a cache of as many layers as CACHE_BYTES holds, but at least two, so that the
    device's cache holds none of them."""
    g, sizes = _attention_of(context), context.sizes
    page = 2 * sizes.page_size * g.kv_size * sizes.dtype.itemsize
    num_layers = max(2, min(NUM_LAYERS, sizes.max_calls, CACHE_BYTES // (page * num_pages)))
    cache = KVCache.allocate(
        num_layers=num_layers, num_pages=num_pages, page_size=sizes.page_size,
        num_kv_heads=g.num_kv_heads, head_dim=g.head_dim, dtype=sizes.dtype,
        device=context.device,
    )  # fmt: skip
    cache.data.normal_(generator=torch.Generator(context.device).manual_seed(0))
    return cache


def _attention(context: Context, name: str, firsts: list[int], counts: list[int]) -> Problem:
    g, page_size = _attention_of(context), context.sizes.page_size
    pages_of = [-(-(f + n) // page_size) for f, n in zip(firsts, counts, strict=True)]

    def prepare() -> Prepared:
        cache = _cache(context, sum(pages_of))
        order = torch.randperm(cache.num_pages, generator=torch.Generator().manual_seed(0))
        pages = [part.tolist() for part in order.split(pages_of)]
        plan = AttentionPlan.build(firsts, counts, pages, page_size, context.device)
        q = random(context, sum(counts), g.num_heads, g.head_dim)

        def one(layer: int) -> torch.Tensor:
            return attend(q, cache, layer, plan, scale=g.scale)

        def run() -> None:
            for layer in range(len(cache.data)):
                one(layer)

        return Prepared(run, len(cache.data), lambda: one(0))

    return Problem(name, prepare)


def _decode(context: Context, num_rows: int, tokens: int, longest: int = 0) -> Problem:
    """Makes the problem of decode rows; `longest` is the context of the first row, if given."""
    contexts = [tokens - 1] * num_rows
    name = f"{num_rows} rows of {tokens} tokens"
    if longest:
        contexts[0], name = longest - 1, f"{name}, one of {longest}"
    return _attention(context, name, contexts, [1] * num_rows)


def _prefill(context: Context, num_tokens: int) -> Problem:
    return _attention(context, f"{num_tokens} tokens", [0], [num_tokens])


def _store(context: Context, num_tokens: int) -> Problem:
    g, sizes = _attention_of(context), context.sizes

    def prepare() -> Prepared:
        cache = _cache(context, -(-num_tokens // sizes.page_size))
        cells = torch.arange(num_tokens, device=context.device)
        frequencies = torch.ones(g.head_dim // 2, device=context.device)
        angles = rotary_angles(cells, frequencies, 1.0, sizes.dtype)
        qkv = random(context, num_tokens, g.q_size + 2 * g.kv_size)
        before = qkv.clone()

        def run() -> None:
            for layer in range(len(cache.data)):
                rotate_and_store(qkv, cache, layer, cells, *angles, num_heads=g.num_heads)

        def result() -> torch.Tensor:
            qkv.copy_(before)
            rotate_and_store(qkv, cache, 0, cells, *angles, num_heads=g.num_heads)
            return qkv

        return Prepared(run, len(cache.data), result)

    return Problem(f"{num_tokens} tokens", prepare)


def _replaced(context: Context, num_rows: int) -> Problem:
    """Makes the problem of one adapter's own head, and of its own norms for these rows."""
    description, dtype = read_description(context.sizes.config), context.sizes.dtype
    size, vocab_size = description.hidden_size, description.vocab_size

    def prepare() -> Prepared:
        arena = random(context, (vocab_size + 1) * size + GRANULE_BYTES)
        table = LoraTable.create(1, 1, arena, context.device, num_weights=2)
        norm_granule = -(-vocab_size * size * dtype.itemsize // GRANULE_BYTES)
        weights = [ReplacedWeight(0, full=0), ReplacedWeight(1, full=norm_granule)]
        table.set_row(0, TableRow.of([], weights))
        plan = LoraPlan.build([0] * num_rows, [1] * num_rows, table, context.device)
        x, norm = random(context, num_rows, size), random(context, size)
        out = random(context, num_rows, vocab_size).float()
        calls = min(NUM_LAYERS, context.sizes.max_calls)

        def one() -> torch.Tensor:
            token_weights(norm, table, plan, 1)
            replace_logits(out, x, table, plan, 0, vocab_size)
            return out

        def run() -> None:
            for _ in range(calls):
                one()

        return Prepared(run, calls, one)

    return Problem(f"a head of {num_rows} rows", prepare)


def _norm(context: Context, num_tokens: int) -> Problem:
    size = read_description(context.sizes.config).hidden_size

    def prepare() -> Prepared:
        hidden, delta = (random(context, num_tokens, size) for _ in range(2))
        norm, zero = NormWeight(random(context, size), 1e-5), torch.zeros_like(hidden)
        calls = min(NUM_LAYERS, context.sizes.max_calls)

        def run() -> None:
            for _ in range(calls):
                elementwise.add_rms_norm(hidden, delta, norm)

        def result() -> torch.Tensor:
            return elementwise.add_rms_norm(delta.clone(), zero, norm)

        return Prepared(run, calls, result)

    return Problem(f"{num_tokens} tokens", prepare)


def _swiglu(context: Context, num_tokens: int) -> Problem:
    size = read_description(context.sizes.config).max_intermediate_size

    def prepare() -> Prepared:
        gate, up = random(context, num_tokens, 2 * size).chunk(2, dim=1)
        calls = min(NUM_LAYERS, context.sizes.max_calls)

        def run() -> None:
            for _ in range(calls):
                elementwise.swiglu(gate, up)

        return Prepared(run, calls, lambda: elementwise.swiglu(gate, up))

    return Problem(f"{num_tokens} tokens", prepare)


def _expert_problems(context: Context) -> dict[str, list[Problem]]:
    sizes = context.sizes
    rows, between = sizes.kernel_rows, [*sizes.kernel_rows, *sizes.kernel_tokens]
    middle, longest = expert_cases.tokens_of_longer_tiles(context)
    return {
        "route": [_route(context, n) for n in between],
        "sort_pairs": [_sort(context, n) for n in (rows[0], rows[-1], middle, longest)],
        "experts_short": [_experts(context, n) for n in (rows[0], rows[-2], rows[-1])],
        "experts_middle": [_experts(context, middle)],
        "experts_long": [_experts(context, longest)],
        "combine_experts": [_combine(context, n) for n in between],
        "plan_pairs": [_plan(context, n) for n in (rows[-1], longest)],
    }


def _repeated(context: Context, name: str, prepare: Callable[[], Callable[[], Tensor]]) -> Problem:
    """Makes a problem of equal calls, on data that a step has just written."""
    calls = min(NUM_LAYERS, context.sizes.max_calls)

    def make() -> Prepared:
        one = prepare()

        def run() -> None:
            for _ in range(calls):
                one()

        return Prepared(run, calls, one)

    return Problem(name, make)


def _route(context: Context, num_tokens: int) -> Problem:
    mixture = context.sizes.mixture

    def prepare() -> Callable[[], Tensor]:
        logits = random(context, num_tokens, mixture.num_experts).float()
        return lambda: experts.route(logits, Choice(mixture.num_chosen)).weights

    return _repeated(context, f"{num_tokens} tokens", prepare)


def _sort(context: Context, num_tokens: int) -> Problem:
    def prepare() -> Callable[[], Tensor]:
        chosen = route_at_random(context, num_tokens).experts
        return lambda: experts.sort_pairs(chosen, context.sizes.mixture.num_experts).rows

    return _repeated(context, f"{num_tokens} tokens", prepare)


def _combine(context: Context, num_tokens: int) -> Problem:
    mixture = context.sizes.mixture

    def prepare() -> Callable[[], Tensor]:
        routing = route_at_random(context, num_tokens)
        pairs = experts.sort_pairs(routing.experts, mixture.num_experts)
        x = random(context, num_tokens * mixture.num_chosen, mixture.hidden)
        return lambda: experts.combine(x, pairs, routing.weights)

    return _repeated(context, f"{num_tokens} tokens", prepare)


def _plan(context: Context, num_tokens: int) -> Problem:
    def prepare() -> Callable[[], Tensor]:
        plan = expert_cases.make_plan(context, num_tokens)
        chosen = route_at_random(context, num_tokens).experts
        order = lora.order_tokens(plan, 1)
        pairs = experts.sort_pairs(chosen, context.sizes.mixture.num_experts, order.tokens)
        return lambda: lora.plan_pairs(plan, order, chosen, pairs).items

    return _repeated(context, f"{num_tokens} tokens", prepare)


def _experts(context: Context, num_tokens: int) -> Problem:
    """Makes the problem of both projections, with a different routing for each call."""

    def prepare() -> Prepared:
        both = [Products.make(context, num_tokens, kind) for kind in ("gate and up", "down")]
        num_calls = len(both[0].pairs)

        def run() -> None:
            for call in range(num_calls):
                for products in both:
                    products.ours(call)

        def result() -> Tensor:
            return torch.cat([products.ours(0).flatten() for products in both])

        return Prepared(run, num_calls, result)

    return Problem(f"{num_tokens} tokens", prepare)


def _delta_problems(context: Context) -> dict[str, list[Problem]]:
    rows, tokens = context.sizes.kernel_rows, context.sizes.kernel_tokens
    lengths = [*([1] * count for count in (rows[0], rows[-1])), *([n] for n in tokens)]

    def problems(operation: str, chosen: list[list[int]]) -> list[Problem]:
        return [_delta(context, operation, each) for each in chosen]

    return {
        "causal_conv": problems("convolution", lengths),
        "delta_step": problems("delta rule", lengths[:2]),
        "delta_chunks": problems("delta rule", lengths[2:]),
        "gated_norm": problems("gated norm", lengths),
    }


def _delta(context: Context, operation: str, lengths: list[int]) -> Problem:
    """Makes the problem of an operation of a gated delta net, of rows of so many tokens."""

    def prepare() -> Prepared:
        net = delta_cases.Net.make(context, lengths)
        run, result = net.operation(operation)
        return Prepared(run, net.num_calls, result)

    return Problem(f"{len(lengths)} rows of {lengths[0]} tokens", prepare)


def _quantised_problems(context: Context) -> dict[str, list[Problem]]:
    """Returns problems of the narrowest and the widest outputs in the first format; inputs are
    rounded in the last one."""
    of_layer = quantised_cases.projections(context)
    narrow, wide = (choose(of_layer, key=lambda each: each.num_out) for choose in (min, max))
    few, tokens = context.sizes.quantised_rows, context.sizes.kernel_tokens
    return {
        "quantised_narrow": [_quantised(context, narrow, n) for n in few[:2]],
        "quantised_wide": [_quantised(context, wide, n) for n in few[:2]],
        "quantised_sum": [_quantised(context, narrow, few[0])],
        "quantised_short": [_quantised(context, wide, 20)],
        "quantised_middle": [_quantised(context, wide, 64)],
        "quantised_long": [_quantised(context, each, tokens[-1]) for each in (narrow, wide)],
        "quantised_inputs": [_quantised(context, narrow, n, "W8A8") for n in (few[0], tokens[-1])],
    }


def _quantised(
    context: Context,
    projection: quantised_cases.Projection,
    num_rows: int,
    form: str = quantised_cases.FIRST,
) -> Problem:
    def prepare() -> Prepared:
        chosen = quantised_cases.FORMATS[form]
        products = quantised_cases.Products(context, chosen, projection, num_rows)
        return Prepared(products.run, len(products.weights), products.result)

    return Problem(f"{projection.name}, {form}, {num_rows} rows", prepare)
