"""Rows, whole weights and norms that adapters have in the base's place: every implementation
against what was placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import replaced
from kernels.lora import BASE_SLOT, LoraPlan, LoraTable, ReplacedWeight, TableRow
from kernels.replaced import native
from tests.support.kernels.packing import Packing

OPERATIONS = Path(__file__).parent / "operations.py"
VOCAB, ADDED, SIZE = 300, 5, 70
EMBEDDING, HEAD, NORM = 0, 1, 2
SLOTS = [BASE_SLOT, 0, 1, 1, 2, 3, 4, BASE_SLOT, 4, 0]
LENGTHS = [5, 7, 1, 19, 1, 2, 1, 1, 3, 1]
RATIOS = {torch.float32: 1e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
PATHS = [
    *(("torch", dtype) for dtype in ("float32", "float16", "bfloat16")),
    *(("native", dtype) for dtype in ("float32", "bfloat16")),
    *(("triton", dtype) for dtype in ("float32", "float16")),
]
"""Native kernels know no fp16, and Triton's interpreter multiplies tiles of bf16 wrongly."""


@dataclass
class Case:
    """`dense[slot, weight]` is a whole weight, or its rows by id."""

    table: LoraTable
    dense: dict[tuple[int, int], Any]

    @property
    def dtype(self) -> torch.dtype:
        return self.table.arena.dtype

    def plan(self, slots: Sequence[int] = SLOTS, lengths: Sequence[int] = LENGTHS) -> LoraPlan:
        return LoraPlan.build(slots, lengths, self.table, "cpu")


def build(dtype: torch.dtype) -> Case:
    """Slot 0 has nothing, 1 all of each, 2 to 4 rows, of which 4's are one alone."""
    torch.manual_seed(0)
    packing, dense = Packing(dtype), {}
    rows: list[list[ReplacedWeight]] = [[] for _ in range(5)]
    for weight in (EMBEDDING, HEAD):
        whole = torch.randn(VOCAB, SIZE).to(dtype)
        dense[1, weight] = whole
        rows[1].append(ReplacedWeight(weight, full=packing.place(whole)))
        for slot, ids in (
            (2, [0, 7, VOCAB - 1, VOCAB, VOCAB + ADDED - 1]),
            (3, [*range(0, VOCAB + ADDED, 2)]),
            (4, [11]),
        ):
            values = torch.randn(len(ids), SIZE).to(dtype)
            dense[slot, weight] = dict(zip(ids, values, strict=True))
            places = packing.place_as_it_is(torch.tensor(ids, dtype=torch.int32))
            rows[slot].append(ReplacedWeight(weight, -1, places, packing.place(values), len(ids)))
    for slot in (1, 3):
        dense[slot, NORM] = torch.randn(SIZE).to(dtype)
        rows[slot].append(ReplacedWeight(NORM, full=packing.place(dense[slot, NORM])))
    table = LoraTable.create(5, 1, packing.arena(), "cpu", num_weights=3)
    for slot, weights in enumerate(rows):
        table.set_row(slot, TableRow.of([], weights))
    return Case(table, dense)


@pytest.fixture(scope="session")
def interpreter(start_worker):
    return start_worker(OPERATIONS, interpret=True)


@pytest.fixture(scope="session")
def compiler(start_worker):
    return start_worker(OPERATIONS, interpret=False)


@pytest.fixture(params=PATHS, ids=" ".join)
def path(request) -> str:
    return request.param[0]


@pytest.fixture
def case(request, path) -> Case:
    return build(getattr(torch, request.node.callspec.params["path"][1]))


@pytest.fixture
def run(path, library, interpreter):
    """run(name, out, *args) returns `out` as the operation leaves it, or what it returns."""

    def run_one(name: str, out: torch.Tensor, *args: Any) -> torch.Tensor:
        out = out.clone()
        if path == "triton":
            places = [i for i, each in enumerate(args) if isinstance(each, LoraTable)]
            found = list(args)
            for place in places:  # views would pickle the whole arena each
                found[place] = replace(found[place], _weights=tuple({} for _ in range(5)))
            return interpreter.call(name, out, *found)
        module = (native, (library,)) if path == "native" else (replaced, ())
        returned = getattr(module[0], name)(*module[1], out, *args)
        return out if returned is None else returned

    return run_one


def test_embeddings(case, run):
    plan = case.plan()
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (plan.num_tokens,))
    for t, slot in enumerate(plan.token_slots.tolist()):
        if slot in (2, 3) and t % 2:
            ids[t] = VOCAB + ADDED - 1 if slot == 2 else VOCAB + ADDED - 1 - (VOCAB + ADDED - 1) % 2
        elif slot == 4:
            ids[t] = 11 if t % 2 else 12
    before = torch.randn(plan.num_tokens, SIZE).to(case.dtype)
    expected, num_own = before.clone(), 0
    for t, slot in enumerate(plan.token_slots.tolist()):
        own = case.dense.get((slot, EMBEDDING), {})
        if isinstance(own, torch.Tensor) or int(ids[t]) in own:
            expected[t] = own[int(ids[t])]
            num_own += 1
    assert 20 < num_own < plan.num_tokens - 10
    got = run("replace_embeddings", before, ids, case.table, plan, EMBEDDING)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("lengths", [LENGTHS, [1] * len(SLOTS)], ids=["long", "one each"])
def test_logits(case, run, assert_close, lengths):
    plan = case.plan(SLOTS, lengths)
    torch.manual_seed(1)
    x = torch.randn(plan.num_tokens, SIZE).to(case.dtype)
    before = torch.randn(plan.num_tokens, VOCAB + ADDED).to(case.dtype)
    expected = before.clone()
    for t, slot in enumerate(plan.token_slots.tolist()):
        own = case.dense.get((slot, HEAD), {})
        rows = dict(enumerate(own)) if isinstance(own, torch.Tensor) else own
        for row_id, values in rows.items():
            expected[t, row_id] = x[t].double() @ values.double()
    got = run("replace_logits", before, x, case.table, plan, HEAD, VOCAB)
    assert_close("logits", expected, got, RATIOS[case.dtype])
    untouched = plan.token_slots == BASE_SLOT
    assert torch.equal(got[untouched], before[untouched])
    for t, slot in enumerate(plan.token_slots.tolist()):
        if slot == 4:
            rest = [i for i in range(VOCAB + ADDED) if i != 11]
            assert torch.equal(got[t, rest], before[t, rest]), "rows that it does not have"


def test_logits_are_the_same_bits_in_any_batch(library):
    case = build(torch.float32)
    plan = case.plan()
    x = torch.randn(plan.num_tokens, SIZE)
    before = torch.randn(plan.num_tokens, VOCAB + ADDED)
    together = before.clone()
    native.replace_logits(library, together, x, case.table, plan, HEAD, VOCAB)
    for t, slot in enumerate(plan.token_slots.tolist()):
        alone = before[t : t + 1].clone()
        one = case.plan([slot], [1])
        native.replace_logits(library, alone, x[t : t + 1], case.table, one, HEAD, VOCAB)
        assert torch.equal(alone[0], together[t])


def test_fp32_logits_of_a_bf16_model(library, assert_close):
    case = build(torch.bfloat16)
    plan = case.plan()
    x = torch.randn(plan.num_tokens, SIZE).to(torch.bfloat16)
    got = torch.zeros(plan.num_tokens, VOCAB + ADDED)
    native.replace_logits(library, got, x, case.table, plan, HEAD, VOCAB)
    row = plan.token_slots.tolist().index(1)
    expected = x[row].float() @ case.dense[1, HEAD].float().t()
    assert_close("logits", expected, got[row, :VOCAB], 1e-5)


@pytest.mark.parametrize(
    ("path", "dtype"),
    [
        *((path, dtype) for path in ("torch", "native") for dtype in ("float32", "bfloat16")),
        ("triton", "float16"),
    ],
)
def test_a_whole_weight_keeps_the_bias_of_the_base(library, interpreter, assert_close, path, dtype):
    dtype = getattr(torch, dtype)
    case = build(dtype)
    plan = case.plan()
    x, bias = torch.randn(plan.num_tokens, SIZE).to(dtype), torch.randn(VOCAB).to(dtype)
    got = torch.zeros(plan.num_tokens, VOCAB, dtype=dtype)
    if path == "native":
        native.replace_logits(library, got, x, case.table, plan, HEAD, VOCAB, bias.float())
    elif path == "triton":
        args = got, x, case.table, plan, HEAD, VOCAB, bias
        got = interpreter.call("replace_logits", *args)
    else:
        whole = case.plan([1], [plan.num_tokens])
        replaced.replace_logits(got, x, case.table, whole, HEAD, VOCAB, bias)
    row = plan.token_slots.tolist().index(1)
    expected = x[row].double() @ case.dense[1, HEAD].double().t() + bias.double()
    assert_close("logits", expected.to(dtype), got[row], RATIOS[dtype])


@pytest.mark.parametrize("is_wide", [False, True])
def test_token_weights(case, run, is_wide):
    plan, offset = case.plan(), 1.0 if is_wide else 0.0
    weight = torch.randn(SIZE, dtype=torch.float32 if is_wide else case.dtype)
    expected = weight.repeat(plan.num_tokens, 1)
    for t, slot in enumerate(plan.token_slots.tolist()):
        if (slot, NORM) in case.dense:
            expected[t] = case.dense[slot, NORM].to(weight.dtype) + offset
    got = run("token_weights", weight, case.table, plan, NORM, offset)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_compile_for_devices(compiler, capability, dtype):
    ptx = compiler.call("compile_ptx", capability, dtype)
    assert set(ptx) == {
        "token_weights_kernel",
        "replace_embeddings_kernel",
        "replace_logits_kernel",
    }
    wide = ("ld.global.v4", "ld.global.v2.b64", "cp.async")
    assert any(each in ptx["replace_logits_kernel"] for each in wide), "rows are read vector-wise"
