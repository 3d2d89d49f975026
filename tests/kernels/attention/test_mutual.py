"""Tokens of a picture see each other in both directions, and nothing else sees more."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import FP8, AttentionPlan, attend, native, reference

ROWS = [(0, 33), (40, 1), (12, 5), (64, 30), (0, 12)]
MUTUAL = [(3, 20), (20, 30), (34, 39), (39, 40), (45, 69)]
"""At a row's start, middle and end; one beside another, and one of a single token."""
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
WINDOWS = [None, 1, 6, 20, 1000]


@pytest.mark.parametrize("window", [None, 7])
def test_the_definition_is_dense_attention(make_case, assert_close, window):
    """Against the formula over one sequence: a mask of all that is earlier, or in the same picture,
    within the window."""
    q, cache, plan = make_case([(0, 21)], page_size=4, mutual=[(2, 6), (9, 18)])
    assert plan.ends.tolist() == [1, 2, *[6] * 4, 7, 8, 9, *[18] * 9, 19, 20, 21]
    k, v = (part.repeat_interleave(2, dim=1) for part in cache.gather(1, plan.cells))
    picture = torch.tensor([*[-1] * 2, *[0] * 4, *[-2] * 3, *[1] * 9, *[-3] * 3])
    place = torch.arange(21)
    is_earlier = place[None, :] <= place[:, None]
    is_same = (picture[:, None] == picture[None, :]) & (picture[:, None] >= 0)
    visible = (is_earlier | is_same) & (place[None, :] > place[:, None] - (window or 21))
    scores = 0.5 * torch.einsum("qhd,khd->hqk", q, k)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    wanted = torch.einsum("hqk,khd->qhd", weights, v)
    assert_close("out", wanted, reference.attend(q, cache, 1, plan, scale=0.5, window=window), 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_torch(make_case, assert_close, window, dtype):
    q, cache, plan = make_case(ROWS, dtype=dtype, mutual=MUTUAL)
    for softcap in (None, 2.0):
        options = {"scale": 0.3, "window": window, "softcap": softcap}
        wanted = reference.attend(q, cache, 1, plan, **options)
        assert_close("out", wanted, attend(q, cache, 1, plan, **options), TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("window", "softcap", "stored", "dtype"),
    [
        (None, None, None, torch.float16),
        (6, None, None, torch.float32),
        (20, 2.0, None, torch.float16),
        (None, None, FP8, torch.float16),
    ],
    ids=str,
)
def test_triton(interpreter, make_case, assert_close, window, softcap, stored, dtype):
    """Pictures that end in another block of queries, or of keys, than they begin in; an end of 0
    stands for a token's own."""
    mutual = [*MUTUAL, (91, 200)]
    rows = [*ROWS, (70, 200)]
    q, cache, plan = make_case(rows, dtype=dtype, stored=stored, mutual=mutual)
    is_own = torch.ones(len(plan.ends), dtype=torch.bool)
    for start, end in mutual:
        is_own[start:end] = False
    plan.ends[is_own] = 0
    options = {"scale": 0.3, "window": window, "softcap": softcap}
    wanted = reference.attend(q, cache, 1, plan, **options)
    got = interpreter.call("attend", q, cache, 1, plan, **options)
    assert_close("out", wanted, got, 2e-6 if dtype is torch.float32 else 1e-3)
    assert_close("torch's", wanted, attend(q, cache, 1, plan, **options), 2e-3)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("is_tiled", "stored"), [(False, None), (True, None), (True, FP8)])
def test_native(library, make_case, make_sinks, assert_close, is_tiled, stored, window, dtype):
    shape = {"head_dim": 48, "page_size": 16, "is_tiled": is_tiled, "stored": stored}
    q, cache, plan = make_case(ROWS, dtype=dtype, mutual=MUTUAL, **shape)
    for sinks in (None, make_sinks(4)):
        options = {"scale": 0.3, "window": window, "sinks": sinks}
        wanted = reference.attend(q, cache, 1, plan, **options)
        got = native.attend(q, cache, 1, plan, library=library, **options)
        assert_close("out", wanted, got, TOLERANCES[dtype])


@pytest.mark.parametrize("window", [None, 50, 8180])
def test_a_query_is_the_same_in_any_chunk_bit_for_bit(library, make_case, window):
    """Also from the middle of a picture on, where the tokens before are cached, and where a context
    passes the length at which it is cut into other parts."""
    for first, count in ((0, 600), (8000, 400)):
        picture = (100, 356)
        q, cache, plan = make_case(
            [(first, count)],
            head_dim=32,
            page_size=16,
            dtype=torch.bfloat16,
            is_tiled=True,
            mutual=[picture],
        )
        options = {"scale": 0.3, "window": window, "library": library}
        whole = native.attend(q, cache, 1, plan, **options)
        pages = [plan.page_table[0].tolist()]
        for start, end in ((0, 100), (13, 356), (100, 400), (177, 360), (355, 356), (356, 390)):
            inside = max(start, picture[0]) - start, min(end, picture[1]) - start
            mutual = [inside] if inside[0] < inside[1] else []
            own = AttentionPlan.build([first + start], [end - start], pages, 16, mutual=mutual)
            got = native.attend(q[start:end], cache, 1, own, **options)
            assert torch.equal(got, whole[start:end]), f"{first} + {start} .. {end}"


def test_a_picture_of_more_parts_than_fit_is_not_split(library, make_case, assert_close):
    """The queries before a multiple of 8192 are a block of their own, which many threads would
    compute apart; they see 19 parts: a window of most, and the picture beyond them."""
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        shape = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16, "page_size": 16}
        q, cache, plan = make_case([(16368, 1040)], is_tiled=True, mutual=[(0, 1040)], **shape)
        options = {"scale": 0.3, "window": 8192}
        got = native.attend(q, cache, 1, plan, library=library, **options)
        assert_close("out", attend(q, cache, 1, plan, **options), got, 4e-6)
    finally:
        torch.set_num_threads(before)
