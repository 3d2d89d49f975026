"""Attention in C++ agrees with the definition, in every variant, and depends on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_svc.model.layers import RotaryEmbedding
from inference_svc.model.rope import Axes, Rope
from kernels.attention import AttentionPlan, HeadNorms, KVCache, can_tile, native, reference
from kernels.attention.native import NativeAttention, StepRows
from kernels.attention.native_memory import AttentionScratch, AttentionShape
from kernels.elementwise.reference import rms_norm
from tests.support.native import native_library
from tests.support.pairs import pairwise

pytestmark = pytest.mark.matrix

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCES)
MIXED = [(0, 17), (40, 1), (127, 1), (63, 1), (12, 5), (64, 1), (0, 1), (9, 24), (530, 2)]


@pytest.fixture
def set_threads() -> Iterator[object]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def definition():
    """`definition(key, *args, **options)`: the definition's output, computed once for a key."""
    known: dict[object, torch.Tensor] = {}

    def attend(key, *args, **options):
        if key not in known:
            known[key] = reference.attend(*args, **options)
        return known[key]

    return attend


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size"),
    [
        *[(4, 1, 64, 16), (8, 1, 128, 32), (3, 3, 80, 16), (4, 2, 32, 64), (6, 3, 10, 3)],
        *[(70, 1, 2, 1), (4, 2, 256, 16), (4, 1, 512, 16)],
    ],
)
def test_attend(
    library,
    definition,
    make_case,
    assert_close,
    num_heads,
    num_kv_heads,
    head_dim,
    page_size,
    dtype,
):
    layouts = {False, can_tile(page_size, head_dim, dtype)}
    cases = {
        is_tiled: make_case(
            MIXED,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            is_tiled=is_tiled,
        )
        for is_tiled in layouts
    }
    for window, softcap in ((None, None), (70, None), (None, 2.0), (70, 0.5)):
        options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
        q, cache, plan = cases[False]
        key = (num_heads, head_dim, dtype, window, softcap)
        wanted = definition(key, q, cache, 1, plan, **options)
        for is_tiled, (q, cache, plan) in cases.items():
            name = f"window {window}, cap {softcap}, tiled {is_tiled}"
            got = native.attend(q, cache, 1, plan, library=library, **options)
            assert_close(name, wanted, got, TOLERANCES[dtype])


@settings(
    max_examples=16, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 12))),
        min_size=1,
        max_size=4,
    ),
    window=st.one_of(st.none(), st.integers(1, 200)),
    group=st.sampled_from([1, 2, 5]),
    page_size=st.sampled_from([1, 5, 16, 48]),
    has_sinks=st.booleans(),
    form=st.sampled_from([*product(DTYPES, (16, 48))]),
)
def test_any_batch(
    make_case, make_sinks, assert_close, rows, window, group, page_size, has_sinks, form
):
    """`form`: the dtype and the head's dimensions."""
    q, cache, plan = make_case(
        rows,
        num_heads=2 * group,
        head_dim=form[1],
        page_size=page_size,
        dtype=form[0],
        is_tiled=page_size % 16 == 0,
    )
    sinks = make_sinks(2 * group) if has_sinks else None
    options = {"scale": 0.3, "window": window, "sinks": sinks}
    wanted = reference.attend(q, cache, 1, plan, **options)
    got = native.attend(q, cache, 1, plan, library=native_library(), **options)
    assert_close("out", wanted, got, TOLERANCES[q.dtype])


@pairwise(
    limits=[(None, None), (70, None), (600, None), (None, 2.0), (70, 0.5)],
    is_tiled=[False, True],
    dtype=DTYPES,
)
def test_sinks(
    library, definition, make_case, make_sinks, assert_close, set_threads, limits, is_tiled, dtype
):
    """All rows together, and alone: a long row of few queries is then split among the threads.
    `limits`: the window and the cap of scores."""
    window, softcap = limits
    rows = [*MIXED, (1500, 1), (1700, 2)]
    q, cache, plan = make_case(
        rows, num_heads=6, head_dim=32, page_size=16, dtype=dtype, is_tiled=is_tiled
    )
    options = {"scale": 32**-0.5, "window": window, "softcap": softcap, "sinks": make_sinks(6)}
    wanted = definition(("sinks", limits, dtype), q, cache, 1, plan, **options)
    set_threads(2)
    together = native.attend(q, cache, 1, plan, library=library, **options)
    assert_close("out", wanted, together, TOLERANCES[dtype])
    for row in (0, len(rows) - 2, len(rows) - 1):
        start, end = plan.query_starts[row : row + 2].tolist()
        pages = [plan.page_table[row].tolist()]
        alone = AttentionPlan.build([rows[row][0]], [end - start], pages, plan.page_size)
        for threads in (1, 3):
            set_threads(threads)
            got = native.attend(q[start:end], cache, 1, alone, library=library, **options)
            assert torch.equal(got, together[start:end]), f"row {row}, {threads} threads"


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_sinks(library, make_case, extreme_sinks, assert_close, dtype):
    q, cache, plan = make_case(
        MIXED, num_heads=6, head_dim=16, page_size=16, dtype=dtype, is_tiled=True
    )
    plain = native.attend(q, cache, 1, plan, scale=0.3, library=library)
    got = native.attend(q, cache, 1, plan, scale=0.3, sinks=extreme_sinks, library=library)
    assert not (got[:, :3].abs() > 1e-30).any()
    assert torch.equal(got[:, 3:], plain[:, 3:]), "nothing is added"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "window"),
    [
        *product(DTYPES, (32,), (None, 600)),
        *((torch.bfloat16, *form) for form in ((64, None), (80, 600), (128, None))),
    ],
)
def test_a_row_is_the_same_beside_any_other_bit_for_bit(
    library, make_case, set_threads, dtype, head_dim, window
):
    """Alone, a long row is split among the threads; in a crowd it is not."""
    q, cache, plan = make_case(
        [(40, 1), (1500, 1), (0, 9), (700, 6), (9, 1), (800, 100)],
        head_dim=head_dim,
        page_size=16,
        dtype=dtype,
        is_tiled=True,
    )
    set_threads(2)
    together = native.attend(q, cache, 1, plan, scale=0.3, window=window, library=library)
    for row in range(plan.num_rows):
        start, end = plan.query_starts[row : row + 2].tolist()
        alone = AttentionPlan.build(
            [int(plan.context_lengths[row]) - (end - start)],
            [end - start],
            [plan.page_table[row].tolist()],
            plan.page_size,
        )
        for threads in (1, 3):
            set_threads(threads)
            got = native.attend(
                q[start:end], cache, 1, alone, scale=0.3, window=window, library=library
            )
            assert torch.equal(got, together[start:end]), f"row {row}, {threads} threads"


@pytest.mark.parametrize(
    ("window", "head_dim"), [(None, 32), (50, 32), (None, 64), (50, 80), (None, 128)]
)
def test_a_prompt_is_the_same_in_any_chunks_bit_for_bit(library, make_case, window, head_dim):
    q, cache, plan = make_case(
        [(0, 600)], head_dim=head_dim, page_size=16, dtype=torch.bfloat16, is_tiled=True
    )
    whole = native.attend(q, cache, 1, plan, scale=0.3, window=window, library=library)
    for start, end in ((0, 33), (33, 34), (34, 100), (513, 600)):
        chunk = AttentionPlan.build([start], [end - start], [plan.page_table[0].tolist()], 16)
        got = native.attend(
            q[start:end], cache, 1, chunk, scale=0.3, window=window, library=library
        )
        assert torch.equal(got, whole[start:end])


def row_of(plan: AttentionPlan, start: int, end: int) -> AttentionPlan:
    """A step of queries [start, end) of the only row of `plan`."""
    first = int(plan.context_lengths[0]) - int(plan.query_starts[1])
    pages = [plan.page_table[0].tolist()]
    return AttentionPlan.build([first + start], [end - start], pages, plan.page_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 8180])
def test_parts_do_not_depend_on_the_chunk_where_they_grow(library, make_case, window, dtype):
    """Contexts of up to 8192 tokens have other parts than longer ones. The positions are those
    before and after such a step, and ones whose window ends short of it, but not a block's."""
    for first, count in ((8150, 100), (16390, 70)):
        q, cache, plan = make_case(
            [(first, count)], head_dim=32, page_size=16, dtype=dtype, is_tiled=True
        )
        options = {"scale": 0.3, "window": window, "library": library}
        whole = native.attend(q, cache, 1, plan, **options)
        cuts = (13, 41, 42, 43, 66)
        for start, end in zip((0, *cuts), (*cuts, count), strict=True):
            got = native.attend(q[start:end], cache, 1, row_of(plan, start, end), **options)
            assert torch.equal(got, whole[start:end]), f"{first} + {start} .. {end}"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 4e-6), (torch.bfloat16, 8e-3)])
def test_a_window_that_touches_most_parts_is_split(
    library, definition, make_case, assert_close, set_threads, dtype, ratio
):
    """The first and last cell lie in parts of their own: 18 of 512 cells, computed apart."""
    set_threads(2)
    options = {"scale": 0.3, "window": 8192}
    q, cache, plan = make_case([(8702, 8)], head_dim=32, page_size=16, dtype=dtype, is_tiled=True)
    wanted = definition(("most parts", dtype), q, cache, 1, plan, **options)
    got = native.attend(q, cache, 1, plan, library=library, **options)
    assert_close("out", wanted, got, ratio)
    for i in range(len(q)):
        own = row_of(plan, i, i + 1)
        alone = native.attend(q[i : i + 1], cache, 1, own, library=library, **options)
        assert torch.equal(alone, got[i : i + 1])


@pytest.mark.parametrize("num_heads", [1, 4])
def test_work_items_have_room_where_every_row_is_cut(make_case, set_threads, num_heads):
    """Each of these rows has its two queries in blocks of their own."""
    set_threads(1)
    library = native_library()
    _, cache, plan = make_case(
        [(8191, 2)] * 5, num_heads=num_heads, num_kv_heads=1, head_dim=16, page_size=16
    )
    scratch = AttentionScratch(AttentionShape.of(cache, num_heads))
    attention = NativeAttention(cache, StepRows.of(plan), scratch)
    library.run(attention.items_op())
    assert attention.num_items == 10 <= attention.max_items


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_tiled", [False, True])
def test_a_poisoned_row_poisons_only_itself(library, make_case, is_tiled, dtype):
    q, cache, plan = make_case(
        [(30, 1), (28, 1), (29, 3)], head_dim=16, page_size=16, dtype=dtype, is_tiled=is_tiled
    )
    for poison in (float("inf"), float("nan")):
        cache.write(1, plan.cells[:1], torch.full((1, 2 * 2 * 16), poison, dtype=dtype))
        out = native.attend(q, cache, 1, plan, scale=0.3, library=library)
        assert not out[0].isfinite().all()
        assert out[1:].isfinite().all()


def test_a_program_reads_each_step_anew(library, make_case, assert_close, set_threads):
    """The arrays are as large as a step may need; further threads than were foreseen are idle."""
    q, cache, plan = make_case([(900, 1), (0, 30), (20, 1)], head_dim=32, page_size=16)
    room = StepRows.of(plan)
    scratch = AttentionScratch(AttentionShape.of(cache, num_heads=4), max_threads=2)
    attention = NativeAttention(cache, room, scratch)
    out = torch.full((len(q), 4 * 32 + 5), torch.nan)
    program = library.program(
        [
            attention.items_op(),
            attention.attend_op(q.as_strided((len(q), 128), (q.stride(0), 1)), out, 1, scale=0.2),
        ]
    )
    set_threads(4)
    wanted = reference.attend(q, cache, 1, plan, scale=0.2).flatten(1)
    for _ in range(2):
        program.run()
        assert_close("all rows", wanted, out[:, :128], 1e-6)
    assert out[:, 128:].isnan().all()
    for num_rows, num_tokens in ((0, 0), (1, 1)):
        out.fill_(torch.nan)
        room.num_rows[0] = num_rows
        program.run()
        assert torch.equal(out.isfinite().any(1).sum(), torch.tensor(num_tokens))
    assert_close("first row", wanted[:1], out[:1, :128], 1e-6)


def run_rope_and_store(
    library, qkv, cache, cells, rope, positions, cos, sin, num_heads, norms
) -> None:
    """Layer 1 of `cache`; the last of `qkv`, `cells` and `positions` is beyond the step."""
    rows = StepRows(
        *(torch.zeros(1, dtype=torch.int32) for _ in range(4)),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        cells=cells,
    )
    rows.num_tokens[0] = len(qkv) - 1
    frequencies, scaling = rope.inverse_frequencies(cache.head_dim), rope.attention_scaling
    angles = (positions, frequencies, cos, sin, rows.num_tokens)
    library.run(
        native.rotary_angles_op(*angles, scaling=scaling),
        native.rope_and_store_op(qkv, cache, 1, cos, sin, rows, norms, num_heads=num_heads),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "page_size", "is_tiled"), [(64, 16, True), (128, 32, True), (10, 3, False)]
)
def test_rope_and_store(library, assert_close, head_dim, page_size, is_tiled, has_norms, dtype):
    torch.manual_seed(0)
    num_heads, num_kv_heads, num_tokens = 6, 2, 37
    cache = KVCache.allocate(
        num_layers=2,
        num_pages=-(-100 // page_size),
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        is_tiled=is_tiled,
    )
    qkv = (torch.randn(num_tokens + 1, (num_heads + 2 * num_kv_heads) * head_dim) * 3).to(dtype)
    heads = qkv[:num_tokens].clone().unflatten(1, (-1, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q_norm, k_norm = (torch.randn(2, head_dim)).to(dtype) if has_norms else (None, None)
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, 1e-6), rms_norm(k, k_norm, 1e-6)
    rope = Rope("linear", factor=2.5)
    positions = torch.randint(0, 3000, (num_tokens + 1,))
    frequencies = rope.inverse_frequencies(head_dim)
    angles = reference.rotary_angles(positions[:-1], frequencies, rope.attention_scaling, dtype)

    cells = torch.randperm(100)[: num_tokens + 1]
    cos, sin = torch.full((2, num_tokens + 1, head_dim // 2), torch.nan, dtype=dtype)
    norms = HeadNorms(q_norm, k_norm, eps=1e-6)
    run_rope_and_store(library, qkv, cache, cells, rope, positions, cos, sin, num_heads, norms)
    ratio = {torch.float32: 1e-6, torch.bfloat16: 2e-3}[dtype]
    got = qkv[:num_tokens].unflatten(1, (-1, head_dim))
    assert_close("q", reference.rotate(q, *angles), got[:, :num_heads], ratio)
    keys, values = cache.gather(1, cells[:-1])
    assert_close("k", reference.rotate(k, *angles), keys, ratio)
    assert torch.equal(values, v)
    assert cos[num_tokens].isnan().all(), "a row beyond num_tokens was written"
    assert not torch.cat(cache.gather(1, cells[-1:])).any()
    assert not cache.data[0].any()


def head_norms(options, head_dim, num_tokens):
    """Takes what is of norms out of a test's options, and returns them with random weights."""
    of_tokens = (num_tokens,) if options.pop("of_tokens", False) else ()
    norms = HeadNorms(eps=1e-6, are_rotated=options.pop("norms_rotated", False))
    if width := options.pop("norm", 0):
        q_norm, k_norm = (torch.rand(*of_tokens, width * head_dim) + 0.5 for _ in range(2))
        norms = norms._replace(q=q_norm, k=k_norm)
    if options.pop("v_norm", False):
        norms = norms._replace(v=torch.rand(*of_tokens, head_dim) + 0.5)
    return norms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("part", "options"),
    [
        (0.5, {}),
        (1.0, {"is_interleaved": True}),
        (0.5, {"is_interleaved": True, "norm": 1}),
        (1.0, {"norm": 1, "norms_rotated": True}),
        (1.0, {"norm": 4}),
        (0.0, {}),
        (0.0, {"norm": 4, "q_scale": True}),
        (1.0, {"norm": 1, "v_norm": True}),
        (0.5, {"norm": 1, "v_norm": True, "sides": 1}),
        (1.0, {"norm": 1, "sides": 0}),
        (1.0, {"norm": 1, "v_norm": True, "of_tokens": True}),
        (0.5, {"norm": 1, "norms_rotated": True, "of_tokens": True}),
        (1.0, {"norm": 4, "of_tokens": True}),
    ],
    ids=str,
)
def test_what_families_do_with_heads(library, assert_close, part, options, dtype):
    """A part of a head is turned, or nothing; neighbours with each other; norms of a head (1) or of
    all (4) with weights in fp32, or those of an adapter, before or behind; growing queries; values
    that are keys (1 side), or none (0)."""
    options, num_heads, head_dim, num_tokens = dict(options), 4, 24, 37
    rope = Rope(part=part or 1.0)
    size = rope.rotary_size(head_dim)
    shape = {"num_layers": 2, "num_pages": 25, "page_size": 4}
    heads = {"num_kv_heads": num_heads, "head_dim": head_dim}
    cache, wanted = (KVCache.allocate(**shape, **heads, dtype=dtype) for _ in range(2))
    width = (1 + options.pop("sides", 2)) * num_heads * head_dim
    qkv = (torch.randn(num_tokens, width) * 3).to(dtype)
    positions, cells = torch.randint(0, 3000, (num_tokens,)), torch.randperm(100)[:num_tokens]
    rows = StepRows(
        *(torch.tensor([num_tokens], dtype=torch.int32) for _ in range(4)),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        cells=cells,
    )
    norms = head_norms(options, head_dim, num_tokens)
    frequencies = rope.inverse_frequencies(head_dim)
    waves = (None, None)
    if part:
        waves = tuple(torch.zeros(2, num_tokens, size // 2, dtype=dtype))
        library.run(
            native.rotary_angles_op(positions, frequencies, *waves, rows.num_tokens, scaling=1.0)
        )
    if options.pop("q_scale", False):
        options["q_scale"] = torch.zeros(num_tokens, dtype=dtype)
        growth = (positions, options["q_scale"], rows.num_tokens)
        library.run(native.query_growth_op(*growth, beta=0.3, length=700))
    got = qkv.clone()
    library.run(
        native.rope_and_store_op(got, cache, 1, *waves, rows, norms, num_heads=num_heads, **options)
    )
    if "q_scale" in options:
        expected = 1 + 0.3 * torch.log1p(torch.floor(positions / 700))
        torch.testing.assert_close(options["q_scale"], expected.to(dtype))
    angles = reference.rotary_angles(positions, frequencies, 1.0, dtype) if part else (None, None)
    reference.rotate_and_store(
        qkv, wanted, 1, cells, *angles, norms, num_heads=num_heads, **options
    )
    ratio = {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    end = num_heads * head_dim
    assert_close("q", qkv[:, :end], got[:, :end], ratio)
    for name, *pair in zip("kv", wanted.gather(1, cells), cache.gather(1, cells), strict=True):
        assert_close(name, *pair, ratio)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_of_several_positions(library, assert_close, interleaved, dtype):
    """Of tokens that have three, as of pictures; the last token is beyond the step."""
    axes = Axes((5, 3, 2), interleaved=interleaved)
    rope = Rope(rope_theta=100.0, axes=axes)
    torch.manual_seed(0)
    positions = torch.randint(0, 1000, (3, 8))
    frequencies = rope.inverse_frequencies(20)
    cos, sin = (torch.full((8, 10), torch.nan, dtype=dtype) for _ in range(2))
    count = torch.tensor([7], dtype=torch.int32)
    angles = (positions, frequencies, cos, sin, count)
    library.run(native.rotary_angles_op(*angles, axes.of_pairs.int(), scaling=1.0))
    wanted = RotaryEmbedding(rope, 20, torch.device("cpu"))(positions, dtype)
    assert_close("cos", wanted.cos[:7, 0, :10], cos[:7], 1e-6)
    assert_close("sin", wanted.sin[:7, 0, 10:], sin[:7], 1e-6)
    assert cos[7].isnan().all()
    apart = [0, 1, 2] * 2 + [0, 1, 0, 0] if interleaved else [0] * 5 + [1] * 3 + [2] * 2
    assert axes.of_pairs.tolist() == apart
