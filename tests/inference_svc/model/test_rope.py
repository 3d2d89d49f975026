"""Frequencies and scaling equal transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from inference_svc.model.layers import RotaryEmbedding
from inference_svc.model.rope import RopeFacts, parse_rope
from kernels.attention.reference import rotate

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
PARAMETERS = {
    "none": {},
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "older": {"rope_theta": 2e4, "rope_scaling": None},
    "older linear": {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e6}},
    "llama3": {
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 256, "rope_theta": 5e5}
    },
    "older llama3": {
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
    },
    "llama3 over the whole length": {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}},
    "yarn": {"rope_parameters": YARN | {"rope_theta": 1e6}},
    "yarn tuned": {
        "rope_parameters": YARN
        | {"rope_theta": 1e4, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}
    },
    "yarn not truncated": {"rope_parameters": YARN | {"rope_theta": 1e4, "truncate": False}},
    "yarn mscale": {
        "rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.3}
    },
    "older yarn": {"rope_theta": 1e6, "rope_scaling": YARN},
}


@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize("name", PARAMETERS)
def test_rotation(name, head_dim):
    raw = PARAMETERS[name]
    copied = {
        key: dict(value) if value else value for key, value in raw.items() if "_theta" not in key
    }
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=2048, **(raw | copied))
    theirs = LlamaRotaryEmbedding(config)
    rope = parse_rope(raw, RopeFacts(2048))
    torch.testing.assert_close(rope.inverse_frequencies(head_dim), theirs.inv_freq)
    assert rope.attention_scaling == pytest.approx(theirs.attention_scaling, rel=1e-12)

    positions = torch.tensor([0, 1, 5, 700, 2047])
    heads = torch.randn(5, 3, head_dim)
    cos, sin = theirs(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads, heads, cos[0], sin[0])
    rotation = RotaryEmbedding(rope, head_dim, torch.device("cpu"))(positions, torch.float32)
    torch.testing.assert_close(rotate(heads, *rotation), expected)
