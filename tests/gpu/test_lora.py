"""LoRA in recorded steps and in others: bitwise what a plan made for the step gives."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.lora import DTYPES, Bench, check_later_writes, check_longer_rows, check_replays

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
