"""Logits of GGUF files equal those of transformers with the dequantised weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from inference_svc.model.gguf.expand import expanded
from inference_svc.text.tokenizer import Tokenizer
from tests.support.inference.gguf_files import SIZES, llama3_factors, write_gguf
from tests.support.models import smollm2

pytestmark = pytest.mark.matrix

NUM_TOKENS = 60
THETA = 500_000.0
MIXED = {"v_proj": "Q6_K", "down_proj": "Q6_K", "proj": "Q4_K"}
"""As the files of the type Q4_K_M."""
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 10}


@dataclass(frozen=True)
class Case:
    architecture: str
    family: str
    kinds: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    has_factors: bool = False


CASES = {
    "llama": Case("llama", "Llama", {"embed_tokens": "Q8_0", **MIXED, "lm_head": "Q6_K"}),
    "llama-biases": Case(
        "llama",
        "Llama",
        {"proj": "Q5_K"},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 128, "rms_norm_eps": 1e-3},
    ),
    "llama-factors": Case(
        "llama",
        "Llama",
        {"embed_tokens": "F16", "proj": "F16"},
        {
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": THETA,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        {".rope.freq_base": THETA, ".rope.dimension_count": 64},
        has_factors=True,
    ),
    "qwen2": Case(
        "qwen2",
        "Qwen2",
        {"embed_tokens": "Q5_0", "o_proj": "Q5_0", "proj": "Q5_1"},
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            ".rope.freq_base": 1e6,
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 4.0,
            ".rope.scaling.original_context_length": 64,
        },
    ),
    "qwen3": Case("qwen3", "Qwen3", {"proj": "Q4_0", "lm_head": "Q8_0"}, {"head_dim": 32}),
    "gemma2": Case(
        "gemma2",
        "Gemma2",
        {"embed_tokens": "Q8_0", "proj": "Q4_1"},
        GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        {
            ".attention.sliding_window": 10,
            ".attn_logit_softcapping": 5.0,
            ".final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Case(
        "gemma3",
        "Gemma3",
        {"embed_tokens": "Q6_K", **MIXED},
        GEMMA
        | {
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
        {
            ".attention.sliding_window": 10,
            ".rope.freq_base": 1e6,
            ".rope.scaling.type": "linear",
            ".rope.scaling.factor": 8.0,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits(name, random_model, load_decoder, relative_rms, tmp_path):
    """A tied head computes with the embedding's blocks."""
    case = CASES[name]
    model = random_model(case.family, **(SIZES | case.config))
    extra = {"rope_freqs.weight": llama3_factors(32.0, THETA, 64)} if case.has_factors else {}
    path = tmp_path / "model.gguf"
    write_gguf(path, case.architecture, model, case.kinds, case.metadata, extra)
    token_ids = torch.randint(0, model.config.vocab_size, (NUM_TOKENS,)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]
    with expanded(tmp_path, has_tokenizer=False) as folder:
        for computed in ("torch", "native"):
            decoder = load_decoder(folder, path=computed)
            assert relative_rms(expected, decoder.logits(token_ids, chunk=17)) <= 1e-4


@pytest.mark.long
@pytest.mark.processes
def test_the_real_file(load_decoder, relative_rms):
    """SmolLM2, in fp32: logits, and the tokens that are chosen by them. In `make test` a server's
    answers from this file are compared with those of transformers (tests/system/test_smollm2)."""
    path = smollm2.gguf_path()
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    with expanded(path) as folder:
        tokenizer = Tokenizer(folder)
        decoder = load_decoder(folder)
        for question in smollm2.QUESTIONS[:2]:
            said = [{"role": "user", "content": question}]
            text = tokenizer.hf.apply_chat_template(
                said, tokenize=False, add_generation_prompt=True
            )
            prompt = torch.tensor([tokenizer.encode(text)])
            with torch.no_grad():
                answer = reference.generate(prompt, max_new_tokens=16, do_sample=False)
                expected = reference(answer).logits[0]
            got = decoder.logits(answer[0].tolist(), chunk=100)
            assert relative_rms(expected, got) <= 1e-4
            first = prompt.shape[1] - 1
            assert torch.equal(got[first:-1].argmax(dim=1), answer[0, first + 1 :])
