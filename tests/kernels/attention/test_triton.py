"""The Triton kernels, run by Triton's interpreter, against the definition; and compiled for sm_90
without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels import tuning
from kernels.attention import AttentionPlan, HeadNorms, KVCache, reference
from kernels.attention.plan import MAX_SEGMENTS, segment_starts
from tests.support.kernels.addends import random_addend
from tests.support.pairs import in_turns

FP32 = torch.float32
TOLERANCES = {FP32: 2e-6, torch.float16: 1e-3}
DECODE = [(0, 1), (130, 1), (7, 1), (63, 1)]
MIXED = [(0, 17), (40, 1), (70, 5), (0, 1), (0, 66)]


@pytest.fixture
def attend(interpreter):
    """`attend(q, cache, plan, positions, programs, window)`: a context is cut into segments of so
    many positions at least, which so many programs share."""

    def call(q, cache, plan, positions=128, programs=528, window=None, **options):
        tuned = {"segments": {"positions": positions}, "decode": {"programs": programs}}
        with tuning.overridden("segments", positions=positions):
            counts, contexts = np.diff(plan.host_query_starts), plan.host_context_lengths
            starts = torch.from_numpy(segment_starts(counts, contexts))
        plan = replace(plan, segment_starts=starts)
        options |= {"scale": 0.3, "window": window, "tuned": tuned}
        return interpreter.call("attend", q, cache, 1, plan, **options)

    return call


@pytest.mark.parametrize(
    ("positions", "programs", "window", "dtype"),
    [
        (1024, 528, None, FP32),
        (64, 3, None, torch.float16),
        (1024, 1, 6, torch.float16),
        (20, 5, 100, FP32),
    ],
    ids=str,
)
def test_decode(make_case, attend, assert_close, positions, programs, window, dtype):
    """One segment of a context and several, of which some have no positions; programs with one of
    them and with many."""
    q, cache, plan = make_case(DECODE, dtype=dtype)
    wanted = reference.attend(q, cache, 1, plan, scale=0.3, window=window)
    got = attend(q, cache, plan, positions, programs, window)
    assert_close("out", wanted, got, TOLERANCES[dtype])


def test_many_rows_and_a_long_one(make_case, attend, assert_close):
    """More rows than the smallest block; a context that has as many segments as there may be."""
    q, cache, plan = make_case([(5 * MAX_SEGMENTS, 1), *[(7, 1), (2, 3)] * 20])
    wanted = reference.attend(q, cache, 1, plan, scale=0.3)
    assert_close("out", wanted, attend(q, cache, plan, positions=2, programs=50), 2e-6)


@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (70, False), (70, True)])
def test_a_row_is_the_same_bits_in_any_batch(make_case, make_sinks, attend, window, has_sinks):
    """Alone, and among others, whose contexts are cut in other ways."""
    q, cache, plan = make_case([(9, 1), (130, 1), (0, 4), (300, 1), (63, 1)])
    sinks = make_sinks(4) if has_sinks else None
    together = attend(q, cache, plan, 30, 7, window, sinks=sinks)
    for row in (0, 1, 3, 4):
        token = int(plan.query_starts[row])
        context = int(plan.context_lengths[row])
        num_pages = -(-context // cache.page_size)
        pages = [plan.page_table[row, :num_pages].tolist()]
        alone = AttentionPlan.build([context - 1], [1], pages, cache.page_size)
        for programs in (1, 64):
            got = attend(q[token : token + 1], cache, alone, 30, programs, window, sinks=sinks)
            assert torch.equal(got[0], together[token])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size", "window", "dtype"),
    [
        (2, 2, 16, 16, 9, FP32),
        (3, 1, 24, 3, None, torch.float16),
        (2, 1, 256, 16, 9, torch.float16),
        (2, 1, 512, 16, None, FP32),
    ],
    ids=str,
)
def test_mixed_batch(
    make_case,
    interpreter,
    assert_close,
    num_heads,
    num_kv_heads,
    head_dim,
    page_size,
    window,
    dtype,
):
    q, cache, plan = make_case(
        MIXED,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
    )
    wanted = reference.attend(q, cache, 1, plan, scale=0.3, window=window)
    got = interpreter.call("attend", q, cache, 1, plan, scale=0.3, window=window)
    assert_close("out", wanted, got, TOLERANCES[dtype])


@pytest.fixture
def rotate_and_store(interpreter):
    """`rotate_and_store(qkv, cache, layer, ...)`: of ten tokens or more, some share a program."""
    tuned = {"store": {"many_tokens": 10}}
    return partial(interpreter.call, "rotate_and_store", tuned=tuned)


@pytest.mark.parametrize("num_tokens", [3, 19])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotate_and_store(rotate_and_store, assert_close, has_norms, num_tokens):
    """Against the steps one by one, in torch."""
    heads, kv_heads, dim = 3, 1, 12
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim)
    cos, sin = reference.rotary_angles(torch.arange(num_tokens), torch.rand(dim // 2), 0.8, FP32)
    shape = {"num_pages": 8, "page_size": 5, "num_kv_heads": kv_heads, "head_dim": dim}
    cache = KVCache.allocate(num_layers=2, dtype=FP32, **shape)
    cells = torch.randperm(40)[:num_tokens]
    q_norm, k_norm = (torch.rand(dim) + 0.5 for _ in range(2)) if has_norms else (None, None)
    args = (cells, cos, sin, HeadNorms(q_norm, k_norm, eps=1e-5))
    options = {"num_heads": heads}
    got_qkv, got_data = rotate_and_store(qkv, cache, 1, *args, **options)
    assert torch.equal(got_qkv[:, heads * dim :], qkv[:, heads * dim :]), "k and v stay"
    reference.rotate_and_store(qkv, cache, 1, *args, **options)
    assert_close("q", qkv[:, : heads * dim], got_qkv[:, : heads * dim], 1e-6)
    assert_close("cache", cache.data, got_data, 1e-6)


HEADS = [
    (8, {}),
    (12, {"is_interleaved": True}),
    (6, {"is_interleaved": True, "norm": 1}),
    (12, {"norm": 1, "norms_rotated": True}),
    (4, {"norm": 1, "q_scale": True}),
    (12, {"norm": 3}),
    (0, {}),
    (0, {"norm": 3, "q_scale": True}),
    (12, {"norm": 1, "v_norm": True}),
    (6, {"norm": 1, "v_norm": True, "sides": 1}),
    (12, {"norm": 1, "sides": 0}),
    (12, {"norm": 1, "v_norm": True, "of_tokens": True}),
    (6, {"norm": 1, "norms_rotated": True, "of_tokens": True}),
    (12, {"norm": 3, "of_tokens": True}),
]
"""How many elements of a head are turned, and what else is done to heads."""


TOKENS = [(FP32, 3), (torch.float16, 19), (FP32, 19), (torch.float16, 3)]
"""Dtypes, and numbers of tokens."""


@pytest.mark.parametrize(("part", "options", "tokens"), in_turns(HEADS, TOKENS))
def test_what_families_do_with_heads(rotate_and_store, assert_close, part, options, tokens):
    """A part of a head is turned, or nothing; neighbours with each other; norms of a head (1) or of
    all (3) with weights in fp32, before or behind, or with those of an adapter; values that are
    keys (1 side), or none (0)."""
    heads, kv_heads, dim = 3, 3, 12
    dtype, num_tokens = tokens
    options = {"num_heads": heads, **options}
    sides = options.pop("sides", 2)
    qkv = torch.randn(num_tokens, (heads + sides * kv_heads) * dim).to(dtype)
    cos = sin = None
    if part:
        frequencies = torch.rand(part // 2)
        cos, sin = reference.rotary_angles(torch.arange(num_tokens), frequencies, 0.8, dtype)
    shape = {"num_pages": 8, "page_size": 5, "num_kv_heads": kv_heads, "head_dim": dim}
    cache = KVCache.allocate(num_layers=2, dtype=dtype, **shape)
    cells = torch.randperm(40)[:num_tokens]
    of_tokens = (num_tokens,) if options.pop("of_tokens", False) else ()
    norms = HeadNorms(eps=1e-5, are_rotated=options.pop("norms_rotated", False))
    if width := options.pop("norm", 0):
        q_norm, k_norm = (torch.rand(*of_tokens, width * dim) + 0.5 for _ in range(2))
        norms = norms._replace(q=q_norm, k=k_norm)
    if options.pop("v_norm", False):
        norms = norms._replace(v=torch.rand(*of_tokens, dim) + 0.5)
    if options.pop("q_scale", False):
        options["q_scale"] = torch.rand(num_tokens) + 0.5
    args = (cells, cos, sin, norms)
    got_qkv, got_data = rotate_and_store(qkv, cache, 1, *args, **options)
    if "q_scale" in options:
        options["q_scale"] = options["q_scale"].to(dtype)
    reference.rotate_and_store(qkv, cache, 1, *args, **options)
    tolerance = 1e-6 if dtype is FP32 else 3e-3
    assert_close("q", qkv[:, : heads * dim], got_qkv[:, : heads * dim], tolerance)
    assert_close("cache", cache.data, got_data, tolerance)


@pytest.mark.parametrize(
    ("part", "sides", "is_interleaved", "has_norms", "tokens"),
    in_turns(
        [(12, 2, False, False), (6, 2, True, True), (6, 1, False, True), (12, 0, False, True)],
        TOKENS,
    ),
)
def test_an_addend_comes_before_all_else(
    rotate_and_store, assert_close, part, sides, is_interleaved, has_norms, tokens
):
    """Of queries, keys and values, in the model's dtype; of tokens without an adapter nothing."""
    dtype, num_tokens = tokens
    heads, kv_heads, dim = 3, 3, 12
    qkv = torch.randn(num_tokens, (heads + sides * kv_heads) * dim).to(dtype)
    addend = random_addend(num_tokens, qkv.shape[1], dtype)
    angles = reference.rotary_angles(torch.arange(num_tokens), torch.rand(part // 2), 0.8, dtype)
    cache = KVCache.allocate(
        num_layers=2, num_pages=8, page_size=5, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype
    )
    weights = (torch.rand(dim) + 0.5 for _ in range(2)) if has_norms else (None, None)
    args = (torch.randperm(40)[:num_tokens], *angles, HeadNorms(*weights, eps=1e-5))
    options = {"num_heads": heads, "is_interleaved": is_interleaved}
    got, got_data = rotate_and_store(qkv, cache, 1, *args, addend=addend, **options)
    wanted, wanted_data = rotate_and_store(addend.added_to(qkv), cache, 1, *args, **options)
    assert torch.equal(got[:, : heads * dim], wanted[:, : heads * dim])
    assert torch.equal(got_data, wanted_data)
    reference.rotate_and_store(qkv, cache, 1, *args, addend=addend, **options)
    assert_close("q", qkv[:, : heads * dim], got[:, : heads * dim], 3e-3)
    assert_close("cache", cache.data, got_data, 3e-3)


@pytest.mark.parametrize(("window", "dtype"), [(None, FP32), (20, torch.float16)], ids=str)
def test_soft_caps(make_case, interpreter, assert_close, window, dtype):
    """Of scores large and small."""
    q, cache, plan = make_case(MIXED, dtype=dtype)
    q[::2] *= 20
    wanted = reference.attend(q, cache, 1, plan, scale=0.3, window=window, softcap=5.0)
    got = interpreter.call("attend", q, cache, 1, plan, scale=0.3, window=window, softcap=5.0)
    assert_close("out", wanted, got, TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("positions", "window", "softcap", "dtype"),
    [
        (1024, None, None, FP32),
        (20, None, None, torch.float16),
        (20, 100, None, FP32),
        (1024, 20, 5.0, torch.float16),
        (20, None, 5.0, FP32),
    ],
    ids=str,
)
def test_sinks(make_case, make_sinks, attend, assert_close, positions, window, softcap, dtype):
    """Rows of one query, in one segment and in several, and of more."""
    q, cache, plan = make_case([*MIXED, *DECODE], num_heads=6, dtype=dtype)
    options = {"window": window, "softcap": softcap, "sinks": make_sinks(6)}
    wanted = reference.attend(q, cache, 1, plan, scale=0.3, **options)
    got = attend(q, cache, plan, positions, 5, **options)
    assert_close("out", wanted, got, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_extreme_sinks(make_case, extreme_sinks, attend, dtype):
    q, cache, plan = make_case([(0, 17), (130, 1), (7, 1)], num_heads=6, dtype=dtype)
    got = attend(q, cache, plan, positions=20, sinks=extreme_sinks)
    assert not (got[:, :3].abs() > 1e-30).any()
    assert torch.equal(got[:, 3:], attend(q, cache, plan, positions=20)[:, 3:]), "nothing is added"


def test_rotation_rounds_as_transformers_does(rotate_and_store):
    """Each product, and their sum: bit by bit."""
    heads, dim, num_tokens = 3, 12, 4
    qkv = torch.randn(num_tokens, (heads + 2) * dim, dtype=torch.float16)
    cos, sin = reference.rotary_angles(
        torch.arange(num_tokens), torch.rand(dim // 2), 1.0, torch.float16
    )
    cache = KVCache.allocate(
        num_layers=1, num_pages=2, page_size=5, num_kv_heads=1, head_dim=dim, dtype=torch.float16
    )
    cells = torch.arange(num_tokens)
    got, _ = rotate_and_store(qkv, cache, 0, cells, cos, sin, num_heads=heads)
    q = qkv[:, : heads * dim].unflatten(1, (-1, dim))
    unsigned = torch.cat((-sin[..., : dim // 2], sin[..., dim // 2 :]), dim=-1)
    theirs, _ = apply_rotary_pos_emb(q, q, cos[:, 0], unsigned[:, 0])
    assert torch.equal(got[:, : heads * dim], theirs.flatten(1))


@pytest.mark.parametrize("dtype", [FP32, torch.float16], ids=str)
def test_rotary_angles(interpreter, dtype):
    positions = torch.tensor([0, 1, 77, 130_000])
    frequencies = torch.rand(6)
    wanted = reference.rotary_angles(positions, frequencies, 1.3, dtype)
    got = interpreter.call("rotary_angles", positions, frequencies, 1.3, dtype)
    torch.testing.assert_close(got, wanted)
    of_pairs = torch.stack([positions + 7 * pair for pair in range(6)]).t()
    wanted = reference.rotary_angles(of_pairs, frequencies, 1.3, dtype)
    got = interpreter.call("rotary_angles", of_pairs, frequencies, 1.3, dtype)
    torch.testing.assert_close(got, wanted)


def vector_loads(ptx: str) -> int:
    direct = re.findall(r"ld\.global(?:\.\w+)*\.v4\.[bfu]32", ptx)
    return len(direct) + len(re.findall(r"cp\.async\.cg\.shared\.global", ptx))


def element_loads(ptx: str) -> int:
    return len(re.findall(r"ld\.global(?:\.\w+)*\.[bu]16", ptx))


def num_arguments(ptx: str) -> int:
    return len(re.findall(r"\.param .*_param_\d+", ptx))


def test_keys_and_values_are_loaded_as_vectors(compiler):
    ptx = compiler.call("compile_ptx", 90, torch.bfloat16, [(100, 1), (0, 100)])
    names = ("rotary_angles", "store", "decode", "combine", "prefill")
    assert set(ptx) == {f"{name}_kernel" for name in names}
    for name in ("decode_kernel", "prefill_kernel"):
        # 64 keys and 64 values of 128 elements, by 128 threads of 16 bytes: 8 loads each.
        assert vector_loads(ptx[name]) >= 16, name
        assert element_loads(ptx[name]) == 0, name
        assert re.search(r"wgmma\.mma_async|mma\.sync", ptx[name]), name


@pytest.mark.parametrize("window", [None, 128])
def test_pictures_compile_for_devices(compiler, window):
    """Tokens that see each other: the products and loads stay what they are."""
    rows = [(500, 1), (0, 100)]
    ptx = compiler.call("compile_ptx", 90, torch.bfloat16, rows, mutual=[(20, 60)], window=window)
    assert vector_loads(ptx["prefill_kernel"]) >= 16
    assert element_loads(ptx["prefill_kernel"]) == 0
    assert re.search(r"wgmma\.mma_async|mma\.sync", ptx["prefill_kernel"])


@pytest.mark.parametrize("capability", [80, 90], ids=["sm_80", "sm_90"])
def test_sinks_compile_for_devices(compiler, capability):
    """In a window, as GPT-OSS has them: the products and loads stay what they are."""
    args = (capability, torch.bfloat16, [(500, 1), (0, 100)])
    ptx = compiler.call("compile_ptx", *args, window=128, sinks=torch.zeros(32))
    for name in ("decode_kernel", "prefill_kernel"):
        assert vector_loads(ptx[name]) >= 16, name
        assert element_loads(ptx[name]) == 0, name
        assert re.search(r"wgmma\.mma_async|mma\.sync", ptx[name]), name
    without = compiler.call("compile_ptx", *args, window=128)
    grown = {name for name in ptx if num_arguments(ptx[name]) > num_arguments(without[name])}
    assert grown == {"combine_kernel", "prefill_kernel"}, "parts do not know of sinks"


def test_fp32_compiles_without_reduced_precision(compiler):
    ptx = compiler.call("compile_ptx", 90, FP32, [(100, 1)])
    assert not any("tf32" in kernel for kernel in ptx.values())
