"""A step that the device has no memory for is computed in parts, and gives the same tokens."""

from __future__ import annotations

import torch

from inference_svc.engine.policy.memory_backoff import StepLimit
from tests.support.gpu.models import MAX_TOKENS, Model, make_decoder
from tests.support.gpu.shortage import little_memory, tokens

WIDE = 1 << 16
"""So wide that some tokens fit what is left of a real device, and not all."""
ARENA_BYTES = 16 << 20
"""Adapters of so wide a model in fp32 lie within this."""
SLOTS = [-1, 0, 1, 2, 2]


def test_a_step_in_parts(tmp_path, device, on_device):
    changes = {"intermediate_size": WIDE} if device.type == "cuda" else {}
    decoder = make_decoder("qwen3, norms of heads", tmp_path, num_hidden_layers=1, **changes)
    model = Model.make(decoder, torch.float32, device, arena_bytes=ARENA_BYTES)
    wanted = tokens(model.plain(), SLOTS, StepLimit(MAX_TOKENS))
    backend, limit = model.fixed(None, is_warm=False), StepLimit(MAX_TOKENS)
    with on_device(), little_memory(backend):
        assert tokens(backend, SLOTS, limit) == wanted
    assert limit.num_out_of_memory > 0
    assert 1 < limit.tokens < MAX_TOKENS
