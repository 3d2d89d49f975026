"""Pictures on the device give what torch gives on the CPU: the tower, adapters of all parts,
positions of rows and columns, and tokens that see each other."""

from __future__ import annotations

import pytest
import torch

from inference_svc.backends.cuda import graphs
from inference_svc.backends.cuda.graphs import CudaRecorder
from inference_svc.model.description import decoder as described
from tests.support.gpu.models import Eager, Model, assert_close, run
from tests.support.gpu.pictures import (
    READERS,
    give_tower,
    make_reader,
    replace_outputs,
    steps_with_pictures,
)

TOLERANCES = {torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}
SLOTS = [-1, 0, 2]
"""Adapters of rows: none, and one on some targets of the tower and the text, which also replaces
whole weights of the tower."""
MAX_TOKENS = 128
IN_SHARES = "qwen2.5 vl"
"""The model whose attention is computed in shares where the device is emulated: a GPU divides none.
"""


@pytest.fixture
def check_equal(tmp_path, device, on_device, monkeypatch):
    """`check_equal(name, dtype)` computes the same pictures and steps in both ways."""

    def check(name: str, dtype: torch.dtype) -> None:
        if name == IN_SHARES:
            monkeypatch.setattr(described, "SHARE_PAIRS", 1)
        decoder = make_reader(name, tmp_path)
        host, there = (Model.make(decoder, dtype, at) for at in (torch.device("cpu"), device))
        for model in (host, there):
            replace_outputs(model)
        torch.manual_seed(3)
        works, batches = steps_with_pictures(name, decoder, SLOTS)
        plain = host.plain()
        give_tower(plain, host)
        wanted = run(plain, batches)
        with on_device():
            is_cuda = device.type == "cuda"
            record = CudaRecorder() if is_cuda else Eager
            backend = there.fixed(record, is_warm=False, max_tokens=MAX_TOKENS)
            give_tower(backend, there)
            if is_cuda:
                backend.warm_up()
            torch.manual_seed(3)
            _, again = steps_with_pictures(name, decoder, SLOTS)
            assert backend.pictures is not None
            for work in works:
                backend.pictures.apply(work)
                assert backend.pictures.seconds() >= 0
            got = run(backend, again)
            monkeypatch.setattr(graphs, "LATEST_USE", 1)
            torch.manual_seed(3)
            _, more = steps_with_pictures(name, decoder, SLOTS)
            replayed = run(backend, more[:1])
        is_bfloat16 = dtype is torch.bfloat16
        assert_close(wanted, got, TOLERANCES[dtype], is_bfloat16=is_bfloat16)
        assert_close(wanted[:1], replayed, TOLERANCES[dtype], is_bfloat16=is_bfloat16)
        assert backend.recorded is not None
        assert any(shape.has_prompts for shape in backend.recorded.shapes)

    return check


@pytest.mark.parametrize("name", READERS)
def test_in_half_precision(check_equal, name):
    check_equal(name, torch.float16)


@pytest.mark.real
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", READERS)
def test_in_other_precisions(check_equal, name, dtype):
    check_equal(name, dtype)
