"""The memory that steps in torch are said to take is at least what their operations allocate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inference_svc.backends.torch_needs import step_bytes
from inference_svc.core import EngineConfig
from tests.support.gpu.live_bytes import live_bytes
from tests.support.gpu.models import (
    FEATURES,
    MAX_ADDED,
    MAX_PAGES,
    MAX_RANK,
    MAX_ROWS,
    NUM_SLOTS,
    PAGE_SIZE,
    SUM,
    Model,
    make_decoder,
    steps,
)


@pytest.mark.parametrize("has_kinds", [False, True], ids=["A and B", "all kinds"])
@pytest.mark.parametrize("feature", FEATURES)
def test_steps_take_no_more(tmp_path: Path, feature: str, has_kinds: bool) -> None:
    """Prompts and decodes with the base, each adapter, and a sum."""
    decoder = make_decoder(feature, tmp_path)
    num_added = MAX_ADDED if has_kinds else 0
    for dtype in (torch.float32, torch.bfloat16):
        model = Model.make(decoder, dtype, torch.device("cpu"))
        if has_kinds:
            model = model.with_kinds(num_added)
        backend = model.plain(num_added)
        for slots in ([-1] * 5, [0] * 5, [1, 2, 0, SUM, SUM]):
            for batch in steps(slots):
                config = EngineConfig(
                    tmp_path,
                    "model",
                    dtype=str(dtype).removeprefix("torch."),
                    max_model_len=MAX_PAGES * PAGE_SIZE,
                    page_size=PAGE_SIZE,
                    max_sequences=MAX_ROWS,
                    max_batch_tokens=sum(row.num_tokens for row in batch.rows),
                    max_loras=NUM_SLOTS,
                    max_lora_rank=MAX_RANK,
                    max_added_tokens=num_added,
                )
                inputs = backend.prepare(batch)
                with live_bytes() as live:
                    backend.forward(inputs)
                assert live.peak <= step_bytes(config, decoder), (dtype, slots)
