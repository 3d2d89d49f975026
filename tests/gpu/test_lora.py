"""LoRA in recorded steps and in others: bitwise what a plan made for the step gives."""

from __future__ import annotations

import pytest
import torch

from tests.support.gpu.lora import (
    DTYPES,
    Bench,
    check_definition,
    check_later_writes,
    check_longer_rows,
    check_replays,
)

REAL = [pytest.param(d, marks=pytest.mark.real if d == torch.bfloat16 else ()) for d in DTYPES]


@pytest.fixture
def make_bench(device):
    return lambda dtype: Bench(dtype, device.type)


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_replay_is_bitwise_a_new_plan(make_bench, on_device, dtype):
    with on_device():
        check_replays(make_bench(dtype))


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_longer_rows_are_bitwise_a_new_plan(make_bench, on_device, dtype):
    with on_device():
        check_longer_rows(make_bench(dtype))


@pytest.mark.smoke
def test_replay_sees_later_table_writes(make_bench, on_device):
    with on_device():
        check_later_writes(make_bench(torch.float16))


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_against_the_definition(make_bench, on_device, dtype):
    bench = make_bench(dtype)
    with on_device():
        check_definition(bench, Bench(dtype).arena)


@pytest.mark.real
def test_a_row_is_written_as_on_the_host(make_bench):
    there, here = make_bench(torch.float16).arena.table, Bench(torch.float16).arena.table
    for table in (there, here):
        table.clear_row(2)
    assert torch.equal(there.rows.cpu(), here.rows)
