"""Attention without a causal mask equals softmax over the tokens of a row, written out: in torch,
and in C++ in every variant."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from inference_svc.model.rope import Rope
from kernels.attention import both_ways, native_both_ways, reference
from kernels.attention.native import rotary_angles_op, rotate_op
from kernels.attention.plan import AttentionPlan
from kernels.native.library import Library, NativeOp

pytestmark = pytest.mark.matrix

LENGTHS = {
    "one": [1],
    "equal": [7, 7, 7],
    "mixed": [1, 1, 30, 30, 2, 30, 65],
}
REACHES = [None, 0, 3, 29, 1000]


def plan_of(lengths: list[int]) -> AttentionPlan:
    return AttentionPlan.build([0] * len(lengths), lengths, [range(99)] * len(lengths), 16)


def written_out(
    qkv: torch.Tensor, lengths: list[int], scale: float, reach: int | None
) -> torch.Tensor:
    """qkv: [T, 3, heads, head_dim] -> float32 [T, heads, head_dim]."""
    made, start = [], 0
    for length in lengths:
        q, k, v = qkv[start : start + length].float().permute(1, 2, 0, 3)
        scores = scale * q @ k.transpose(1, 2)
        if reach is not None:
            places = torch.arange(length)
            scores[:, (places[:, None] - places).abs() > reach] = float("-inf")
        made.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_attend(lengths: list[int], reach: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, 3, 10).to(dtype)
    found = both_ways.attend(*qkv.unbind(1), plan_of(lengths), 0.3, reach)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        found.float(), written_out(qkv, lengths, 0.3, reach), atol=tolerance, rtol=tolerance
    )
    assert found.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 10, 16, 32, 72])
def test_attend_in_native_code(library: Library, head_dim: int, dtype: torch.dtype) -> None:
    """Spans of 512 queries, blocks of 64 cells, and tiles of 16 end where they must."""
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for lengths, reach in product((*LENGTHS.values(), [63, 64, 530, 1, 129, 1025]), REACHES):
        torch.manual_seed(1)
        qkv = torch.randn(sum(lengths), 3, 2, head_dim).to(dtype)
        found = native_both_ways.attend(qkv.flatten(1), 2, plan_of(lengths), 0.3, reach, library)
        wanted = written_out(qkv, lengths, 0.3, reach).flatten(1)
        torch.testing.assert_close(
            found.float(),
            wanted,
            atol=tolerance,
            rtol=tolerance,
            msg=lambda said, case=(lengths, reach): f"{case}: {said}",
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reach", [None, 20])
def test_a_row_depends_on_itself_alone(
    library: Library, reach: int | None, dtype: torch.dtype
) -> None:
    """Bit for bit, whatever its neighbours are, also NaN, and however many threads there are."""
    torch.manual_seed(2)
    own = torch.randn(70, 3 * 2 * 24).to(dtype)
    alone = native_both_ways.attend(own, 2, plan_of([70]), 0.2, reach, library)
    around = torch.full((90, own.shape[1]), torch.nan, dtype=dtype)
    both = torch.cat((around[:1], own, around[1:]))
    num_threads = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found = native_both_ways.attend(both, 2, plan_of([1, 70, 89]), 0.2, reach, library)
        torch.set_num_threads(num_threads)
        assert torch.equal(found[1:71], alone), threads
        assert found[:1].isnan().all()
        assert found[71:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "end"), [(0, 1300), (0, 5), (40, 41), (700, 1300), (1299, 1300)])
def test_some_queries_see_all_keys(
    library: Library, first: int, end: int, dtype: torch.dtype
) -> None:
    """Bit for bit as among all queries; the first one is row 0 of the output."""
    torch.manual_seed(4)
    qkv, lengths = torch.randn(1330, 3 * 2 * 16).to(dtype), [30, 1300]
    whole = native_both_ways.attend(qkv, 2, plan_of(lengths), 0.2, None, library)
    starts = torch.tensor([0, 30, 1330], dtype=torch.int32)
    out = torch.full((1300, 2 * 16), torch.nan, dtype=dtype)
    shape = native_both_ways.BothWaysShape(16, dtype.itemsize, 1300)
    op = native_both_ways.both_ways_op(
        qkv,
        out,
        torch.tensor([2], dtype=torch.int32),
        starts,
        native_both_ways.BothWaysScratch(shape),
        scale=0.2,
    )
    op.args.first, op.args.end = 30 + first, 30 + end
    library.run(op)
    assert torch.equal(out[: end - first], whole[30 + first : 30 + end])
    assert out[end - first :].isnan().all(), "a row beyond the queries was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [10, 16, 72])
def test_packed_keys_and_values_are_those_of_the_row(
    library: Library, head_dim: int, dtype: torch.dtype
) -> None:
    """Bit for bit, whatever pieces they were packed in."""
    torch.manual_seed(5)
    length, size = 131, 2 * head_dim
    qkv = torch.randn(length, 3 * size).to(dtype)
    whole = native_both_ways.attend(qkv, 2, plan_of([length]), 0.2, None, library)
    shape = native_both_ways.BothWaysShape(head_dim, dtype.itemsize, length)
    torch.use_deterministic_algorithms(True)  # empty memory is NaN then
    try:
        packed = native_both_ways.PackedCells.allocate(2, shape, dtype)
    finally:
        torch.use_deterministic_algorithms(False)
    for first, end in ((0, 33), (33, 34), (34, length)):
        own = qkv[first:end].clone()
        op = native_both_ways.pack_op(own, 2, torch.tensor([len(own)], dtype=torch.int32))
        op.args.first, op.args.packed = first, packed.args
        library.run(op)
    queries, out = qkv.clone(), torch.full((length, size), torch.nan, dtype=dtype)
    queries[:, size:] = torch.nan
    op = native_both_ways.both_ways_op(
        queries,
        out,
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([0, length], dtype=torch.int32),
        native_both_ways.BothWaysScratch(replace(shape, max_length=1)),
        scale=0.2,
    )
    op.args.packed = packed.args
    library.run(op)
    assert torch.equal(out, whole)
    _check_shares(library, op, queries, whole, head_dim)


def _check_shares(
    library: Library, op: NativeOp, queries: torch.Tensor, whole: torch.Tensor, head_dim: int
) -> None:
    """Asserts that outputs of some heads of some queries take the place of these alone, bit for
    bit, and that however many threads compute them."""
    args, num_threads = op.args, torch.get_num_threads()
    args.out_stride, own = args.qkv_stride, queries.clone()
    for index, (head, (first, end)) in enumerate(product((0, 1), ((0, 40), (40, 41), (41, 131)))):
        args.first, args.end, args.first_head, args.end_head = first, end, head, head + 1
        args.out = queries[first:].data_ptr()
        torch.set_num_threads(1 + index % 3)
        library.run(op)
        torch.set_num_threads(num_threads)
        columns = slice(head * head_dim, (head + 1) * head_dim)
        own[first:end, columns] = whole[first:end, columns]
        assert torch.equal(queries.nan_to_num(), own.nan_to_num())


def test_large_scores_overflow_nothing(library: Library) -> None:
    """The largest score is subtracted before powers are taken."""
    qkv = torch.randn(130, 3, 1, 16)
    qkv[:, :2] *= 200
    found = native_both_ways.attend(qkv.flatten(1), 1, plan_of([130]), 1.0, None, library)
    wanted = written_out(qkv, [130], 1.0, None).flatten(1)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_heads_are_rotated_in_place(
    library: Library, is_interleaved: bool, dtype: torch.dtype
) -> None:
    """Queries and keys of the first tokens; nothing beside them."""
    torch.manual_seed(3)
    qkv, count = torch.randn(9, 3, 2, 20).to(dtype), torch.tensor([8], dtype=torch.int32)
    positions, frequencies = torch.arange(9), Rope().inverse_frequencies(20)
    cos, sin = torch.zeros(9, 10, dtype=dtype), torch.zeros(9, 10, dtype=dtype)
    library.run(rotary_angles_op(positions, frequencies, cos, sin, count, scaling=1.0))
    angles = reference.rotary_angles(positions, frequencies, 1.0, dtype)
    wanted = qkv.clone()
    for part in (0, 1):
        turned = reference.rotate(qkv[:, part], *angles, is_interleaved=is_interleaved)
        wanted[:8, part] = turned[:8]
    qk = qkv.flatten(1)[:, :80]
    library.run(rotate_op(qk, cos, sin, count, head_dim=20, is_interleaved=is_interleaved))
    torch.testing.assert_close(qkv, wanted)
    assert torch.equal(qkv[:, 2], wanted[:, 2])
