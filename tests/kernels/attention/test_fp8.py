"""Keys and values in FP8: every path reads and writes the same codes and scales."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from kernels.attention import FP8, AttentionPlan, HeadNorms, KVCache, cpu, native, reference
from kernels.attention.kv_cache import to_fp8
from kernels.attention.native import StepRows
from tests.support.pairs import pairwise

pytestmark = pytest.mark.matrix

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
NATIVE = [torch.float32, torch.bfloat16]
MIXED = [(0, 17), (40, 1), (127, 1), (12, 5), (0, 1), (9, 24), (530, 2)]


def cache_of(codes: Tensor, dtype: torch.dtype, *, is_tiled: bool, page_size: int = 16) -> KVCache:
    """A cache of one layer and one key head with these codes `[T, head_dim]` in its first cells,
    for keys and values, whose scales are 1."""
    num_tokens, head_dim = codes.shape
    cache = KVCache.allocate(
        num_layers=1,
        num_pages=-(-num_tokens // page_size),
        page_size=page_size,
        num_kv_heads=1,
        head_dim=head_dim,
        dtype=dtype,
        stored=FP8,
        is_tiled=is_tiled,
    )
    vectors = codes.view(FP8).to(dtype)
    cache.write(0, torch.arange(num_tokens), torch.cat((vectors, vectors), dim=1))
    return cache


def test_a_vector_is_rounded_to_the_nearest_codes_of_its_own_scale():
    vectors = torch.randn(50, 3, 24) * torch.logspace(-30, 30, 50)[:, None, None]
    vectors[7, 1] = 0
    codes, scales = to_fp8(vectors)
    assert scales.shape == (50, 3)
    values = codes.view(FP8).float() * scales[..., None]
    largest = vectors.abs().amax(-1, keepdim=True)
    # Half of the last place: of three bits, or of the smallest codes.
    assert ((values - vectors).abs() <= vectors.abs() / 16 + largest / 448 / 1024).all()
    assert torch.equal(values[7, 1], torch.zeros(24))
    for i in (0, 7, 31):
        alone = to_fp8(vectors[i])
        assert torch.equal(alone[0], codes[i])
        assert torch.equal(alone[1], scales[i])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_vector_that_is_not_finite_stays_so(library, poison):
    for is_tiled in (False, True):
        for dtype in NATIVE:
            cache = cache_of(torch.full((2, 16), 0x7E, dtype=torch.uint8), dtype, is_tiled=is_tiled)
            kv = torch.ones(1, 32, dtype=dtype)
            kv[0, 3] = kv[0, 20] = poison
            run_store(library, torch.cat((torch.ones(1, 16), kv), dim=1).to(dtype), cache, [1])
            assert not any(side.isfinite().any() for side in cache.gather(0, torch.tensor([1])))
            plan = AttentionPlan.build([0, 1], [1, 1], [[0], [0]], 16)
            out = native.attend(
                torch.ones(2, 1, 16).to(dtype), cache, 0, plan, scale=1.0, library=library
            )
            assert out[0].isfinite().all()
            assert not out[1].isfinite().any()


@pytest.mark.parametrize("dtype", NATIVE)
@pytest.mark.parametrize("is_tiled", [False, True])
def test_every_code_is_read_exactly(library, dtype, is_tiled):
    """A query that sees one cell gets its value; one that sees two weighs them by products with
    single elements, in magnitudes that tell codes apart."""
    codes = torch.zeros(2, 256, dtype=torch.uint8)
    codes[0] = torch.arange(256)
    codes[0, [0x7F, 0xFF]] = 0
    codes[1, 0] = 0x7E
    cache = cache_of(codes, dtype, is_tiled=is_tiled)
    alone = AttentionPlan.build([0], [1], [[0]], 16)
    q = torch.zeros(1, 1, 256, dtype=dtype)
    got = native.attend(q, cache, 0, alone, scale=1.0, library=library)
    assert torch.equal(got[0, 0].float(), codes[0].view(FP8).float())
    plan = AttentionPlan.build([1] * 256, [1] * 256, [[0]] * 256, 16)
    q = torch.eye(256, dtype=dtype)[:, None]
    for scale in (0.01, 1.0, 100.0):
        wanted = reference.attend(q, cache, 0, plan, scale=scale)
        got = native.attend(q, cache, 0, plan, scale=scale, library=library)
        assert got.isfinite().all()
        errors, sizes = (
            each.double().square().mean((1, 2)).sqrt() for each in (got - wanted, wanted)
        )
        assert (errors <= TOLERANCES[dtype] * sizes).all(), scale


@pairwise(
    shape=[(4, 1, 64, 16), (8, 1, 128, 32), (6, 3, 10, 3), (40, 2, 16, 64)],
    limits=[(None, None), (70, None), (5, 0.5)],
    has_sinks=[False, True],
    dtype=NATIVE,
    is_tiled=[False, True],
)
def test_native(
    library, make_case, make_sinks, assert_close, shape, limits, has_sinks, dtype, is_tiled
):
    num_heads, num_kv_heads, head_dim, page_size = shape
    q, cache, plan = make_case(
        MIXED,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        is_tiled=is_tiled and page_size % 16 == 0,
        stored=FP8,
    )
    options = {"scale": head_dim**-0.5, "window": limits[0], "softcap": limits[1]}
    options["sinks"] = make_sinks(num_heads) if has_sinks else None
    wanted = reference.attend(q, cache, 1, plan, **options)
    got = native.attend(q, cache, 1, plan, library=library, **options)
    assert_close("out", wanted, got, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("is_tiled", [False, True])
def test_torch(make_case, assert_close, is_tiled, dtype):
    is_tiled = is_tiled and dtype != torch.float16
    q, cache, plan = make_case(
        MIXED, head_dim=16, page_size=16, dtype=dtype, is_tiled=is_tiled, stored=FP8
    )
    for window in (None, 9):
        wanted = reference.attend(q, cache, 1, plan, scale=0.3, window=window)
        got = cpu.attend(q, cache, 1, plan, scale=0.3, window=window)
        assert_close("out", wanted, got, TOLERANCES[dtype])


def test_a_row_is_the_same_beside_any_other_bit_for_bit(library, make_case):
    q, cache, plan = make_case(
        [(40, 1), (1100, 1), (0, 9), (500, 6), (600, 50)],
        head_dim=32,
        page_size=16,
        dtype=torch.bfloat16,
        is_tiled=True,
        stored=FP8,
    )
    together = native.attend(q, cache, 1, plan, scale=0.3, window=600, library=library)
    for row in range(plan.num_rows):
        start, end = plan.query_starts[row : row + 2].tolist()
        first = int(plan.context_lengths[row]) - (end - start)
        pages = [plan.page_table[row].tolist()]
        alone = AttentionPlan.build([first], [end - start], pages, plan.page_size)
        got = native.attend(q[start:end], cache, 1, alone, scale=0.3, window=600, library=library)
        assert torch.equal(got, together[start:end]), f"row {row}"


def run_store(library, qkv: Tensor, cache: KVCache, cells: list[int], **options) -> None:
    """Stores in the cache's last layer, without rotation, from one query head."""
    rows = StepRows(
        *(torch.tensor([len(qkv)], dtype=torch.int32) for _ in range(4)),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        cells=torch.tensor(cells),
    )
    layer = len(cache.data) - 1
    library.run(
        native.rope_and_store_op(qkv, cache, layer, None, None, rows, num_heads=1, **options)
    )


@pairwise(
    shape=[(64, 16), (128, 32), (10, 3), (48, 16)],
    is_tiled=[False, True],
    magnitude=[1.0, 1e-20, 1e20],
    dtype=NATIVE,
)
def test_native_stores_the_definitions_bits(library, shape, is_tiled, magnitude, dtype):
    head_dim, page_size = shape
    torch.manual_seed(0)
    heads = {"num_kv_heads": 2, "head_dim": head_dim}
    got, wanted = (
        KVCache.allocate(
            num_layers=2,
            num_pages=7,
            page_size=page_size,
            dtype=dtype,
            stored=FP8,
            is_tiled=is_tiled and page_size % 16 == 0,
            **heads,
        )
        for _ in range(2)
    )
    # Magnitudes down to a millionth of a vector's largest: all of FP8 occurs, and zero.
    qkv = torch.randn(20, 5 * head_dim) * 10.0 ** torch.randint(-6, 1, (20, 5 * head_dim))
    qkv = (qkv * magnitude).to(dtype)
    qkv[3] = 0
    cells = torch.randperm(7 * page_size)[:20]
    reference.rotate_and_store(qkv.clone(), wanted, 1, cells, None, None, HeadNorms(), num_heads=1)
    run_store(library, qkv, got, cells.tolist())
    for name, each in (("codes", "data"), ("scales", "scales")):
        assert torch.equal(getattr(got, each), getattr(wanted, each)), name


@pairwise(
    shape=[(4, 2, 16, 16), (3, 1, 24, 3)],
    limits=[(None, None), (9, None), (None, 2.0)],
    has_sinks=[False, True],
    dtype=[torch.float32, torch.float16],
)
def test_triton(interpreter, make_case, make_sinks, assert_close, shape, limits, has_sinks, dtype):
    num_heads, num_kv_heads, head_dim, page_size = shape
    q, cache, plan = make_case(
        [(0, 17), (130, 1), (70, 5), (0, 1), (5, 66)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        stored=FP8,
    )
    options = {"scale": 0.3, "window": limits[0], "softcap": limits[1]}
    options["sinks"] = make_sinks(num_heads) if has_sinks else None
    wanted = reference.attend(q, cache, 1, plan, **options)
    got = interpreter.call("attend", q, cache, 1, plan, **options)
    assert_close("out", wanted, got, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_triton_reads_every_code_exactly(interpreter, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    cache = cache_of(codes[None], dtype, is_tiled=False)
    plan = AttentionPlan.build([0], [1], [[0]], 16)
    q = torch.zeros(1, 1, 256, dtype=dtype)
    got = interpreter.call("attend", q, cache, 0, plan, scale=1.0)
    assert torch.equal(got[0, 0].float(), codes.view(FP8).float())


@pytest.mark.parametrize(
    ("head_dim", "half", "dtype"), [(64, 32, torch.float32), (24, 6, torch.float16)], ids=str
)
def test_triton_stores_the_definitions_bits(interpreter, head_dim, half, dtype):
    """In `half`s of a head that turn with each other, by a full turn: what is stored is exact."""
    got, wanted = (
        KVCache.allocate(
            num_layers=2,
            num_pages=4,
            page_size=5,
            num_kv_heads=2,
            head_dim=head_dim,
            dtype=dtype,
            stored=FP8,
        )
        for _ in range(2)
    )
    qkv = torch.randn(9, 5 * head_dim) * 10.0 ** torch.randint(-6, 1, (9, 5 * head_dim))
    qkv = qkv.to(dtype)
    qkv[3], qkv[4, 2 * head_dim + 1] = 0, torch.nan
    cells = torch.randperm(20)[:9]
    cos = torch.ones(9, 1, 2 * half, dtype=dtype)
    args = (1, cells, cos, torch.zeros_like(cos))
    found = interpreter.call("store_fp8", qkv.clone(), got, *args, num_heads=1)
    reference.rotate_and_store(qkv.clone(), wanted, *args, num_heads=1)
    codes, scales = wanted.data, wanted.scales
    is_number = scales.isfinite()
    assert int((~is_number).sum()) == 1
    assert torch.equal(found[1].isfinite(), is_number)
    assert torch.equal(found[1][is_number], scales[is_number])
    vectors = (side.unflatten(-1, (5, head_dim))[is_number] for side in (found[0], codes))
    assert torch.equal(*vectors)


@pytest.mark.parametrize("capability", [80, 90], ids=["sm_80", "sm_90"])
def test_triton_compiles_for_devices(compiler, capability):
    """Codes are loaded in vectors; devices before 8.9 convert them, too."""
    rows = [(100, 1), (0, 100)]
    ptx = compiler.call("compile_ptx", capability, torch.bfloat16, rows, stored=FP8)
    for name in ("decode_kernel", "prefill_kernel"):
        loads = r"ld\.global(?:\.\w+)*\.v4\.[bfu]32|cp\.async\.cg\.shared\.global"
        # 64 keys and 64 values of 128 bytes, by at most 256 threads of 16 bytes: 2 loads each.
        assert len(re.findall(loads, ptx[name])) >= 4, name
        assert not re.search(r"ld\.global(?:\.\w+)*\.[bu]8", ptx[name]), name
        assert re.search(r"wgmma\.mma_async|mma\.sync", ptx[name]), name
