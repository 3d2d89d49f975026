"""The Triton kernels, run by Triton's interpreter, against the definitions; and compiled for sm_90
without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from kernels.elementwise import reference
from tests.support.kernels.addends import random_addend

DTYPES = [torch.float32, torch.float16]
SIZES = [8, 101, 1500]
TOLERANCES = {torch.float32: {}, torch.float16: {"rtol": 2**-9, "atol": 1e-5}}
"""A sum in another order, or another exponential, may round to the next number in fp16: before the
weight, or the product, and after it."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("rows", [None, [4, 0]], ids=str)
def test_add_rms_norm(interpreter, dtype, size, has_delta, rows):
    hidden, delta, weight = ((torch.randn(5, size) * 3).to(dtype) for _ in range(3))
    rows = None if rows is None else torch.tensor(rows)
    args = (delta if has_delta else None, weight[0], 1e-5, rows)
    got, got_hidden = interpreter.call("add_rms_norm", hidden, *args)
    wanted = reference.add_rms_norm(hidden, *args)
    assert torch.equal(got_hidden, hidden), "the residual stream is the same to the bit"
    torch.testing.assert_close(got, wanted, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [None, [4, 0]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"delta_scale": 0.3},
        {"sum_scale": 0.6},
        {"is_centred": True},
        {"delta_scale": 1.7, "sum_scale": 1.1, "is_centred": True},
        {"is_centred": True, "bias": torch.linspace(-3, 3, 101)},
    ],
    ids=lambda options: " ".join(options),
)
def test_scaled_additions_and_centred_norms(interpreter, dtype, rows, options):
    """With weights in fp32, whose product is rounded instead of the norm."""
    hidden, delta = ((torch.randn(5, 101) * 3 + 1).to(dtype) for _ in range(2))
    weight, rows = torch.randn(101), None if rows is None else torch.tensor(rows)
    args = (delta, weight, 1e-5, rows)
    got, got_hidden = interpreter.call("add_rms_norm", hidden, *args, **options)
    wanted = reference.add_rms_norm(hidden, *args, **options)
    assert torch.equal(got_hidden, hidden), "the residual stream is the same to the bit"
    torch.testing.assert_close(got, wanted, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [None, [4, 0]], ids=str)
def test_each_row_may_have_a_weight(interpreter, dtype, rows):
    hidden = (torch.randn(6, 101) * 3).to(dtype)
    rows = None if rows is None else torch.tensor(rows)
    num_rows = 6 if rows is None else 2
    weights = torch.randn(num_rows, 101)
    got, _ = interpreter.call("add_rms_norm", hidden, None, weights, 1e-5, rows)
    wanted = reference.add_rms_norm(hidden, None, weights, 1e-5, rows)
    torch.testing.assert_close(got, wanted, **TOLERANCES[dtype])
    shared = weights[:2].repeat_interleave(num_rows // 2, dim=0)
    got, _ = interpreter.call("add_rms_norm", hidden, None, weights[:2].contiguous(), 1e-5, rows)
    wanted = reference.add_rms_norm(hidden, None, shared, 1e-5, rows)
    torch.testing.assert_close(got, wanted, **TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("name", "bounds"), [("swiglu", ()), ("geglu", ()), ("clamped_swiglu", (1.702, 7.0))]
)
def test_nan_stays_nan(interpreter, name, bounds):
    gate, up = torch.randn(2, 6, 40)
    gate[1, 5] = up[2, 7] = torch.nan
    got = interpreter.call(name, gate, up, *bounds)
    assert torch.equal(got.isnan(), getattr(reference, name)(gate, up, *bounds).isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "bounds"), [("swiglu", ()), ("geglu", ()), ("clamped_swiglu", (1.702, 7.0))]
)
def test_gated(interpreter, dtype, size, name, bounds):
    """Of halves side by side, and of rows that are elsewhere."""
    gate_up, others = ((torch.randn(3, 2 * size) * 10).to(dtype) for _ in range(2))
    gate_up[0, 0] = -200.0  # where exp overflows
    gate, up = gate_up.chunk(2, dim=1)
    compute = getattr(reference, name)
    got, wanted = interpreter.call(name, gate, up, *bounds), compute(gate, up, *bounds)
    torch.testing.assert_close(got, wanted, **TOLERANCES[dtype])
    gate, up = gate.contiguous(), others[:, 1 : 1 + size]
    got, wanted = interpreter.call(name, gate, up, *bounds), compute(gate, up, *bounds)
    torch.testing.assert_close(got, wanted, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [None, [4, 0, 1]], ids=str)
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("options", [{}, {"delta_scale": 0.3, "sum_scale": 0.6}], ids=str)
def test_an_addend_comes_before_the_norm(interpreter, dtype, rows, has_delta, options):
    """Added in the model's dtype to the delta, or to what is normed alone; of tokens without an
    adapter nothing is added."""
    hidden, delta, weight = ((torch.randn(5, 101) * 3).to(dtype) for _ in range(3))
    addend, rows = random_addend(5, 101, dtype), None if rows is None else torch.tensor(rows)
    args = (weight[0], 1e-5, rows)
    options = options if has_delta else {}
    delta = delta if has_delta else None
    got, got_hidden = interpreter.call(
        "add_rms_norm", hidden, delta, *args, addend=addend, **options
    )
    if has_delta:
        added, before = addend.added_to(delta), hidden
    else:
        added, before = None, addend.added_to(hidden)
    wanted, wanted_hidden = interpreter.call("add_rms_norm", before, added, *args, **options)
    assert torch.equal(got, wanted)
    assert torch.equal(got_hidden, wanted_hidden if has_delta else hidden)
    by_definition = reference.add_rms_norm(hidden, delta, *args, addend=addend, **options)
    torch.testing.assert_close(got, by_definition, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_an_addend_comes_before_the_activation(interpreter, dtype, size, name):
    gate_up, addend = (torch.randn(5, 2 * size) * 3).to(dtype), random_addend(5, 2 * size, dtype)
    got = interpreter.call(name, *gate_up.chunk(2, dim=1), addend)
    wanted = interpreter.call(name, *addend.added_to(gate_up).chunk(2, dim=1))
    assert torch.equal(got, wanted)
    assert not torch.equal(got, interpreter.call(name, *gate_up.chunk(2, dim=1)))
    by_definition = getattr(reference, name)(*gate_up.chunk(2, dim=1), addend)
    torch.testing.assert_close(got, by_definition, **TOLERANCES[dtype])


def test_vectors_are_loaded_and_stored(compiler):
    ptx = compiler.call("compile_ptx", 90, torch.bfloat16)
    assert set(ptx) == {"add_rms_norm_kernel", "clamped_swiglu_kernel", "swiglu_kernel"}
    for name, text in ptx.items():
        for direction in ("ld", "st"):
            assert re.search(rf"{direction}\.global(?:\.\w+)*\.v4\.b32", text), (name, direction)
            assert not re.search(rf"{direction}\.global(?:\.\w+)*\.[bu]16", text), (name, direction)
