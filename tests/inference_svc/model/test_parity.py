"""Logits equal those of transformers, for every architecture and everything that configs vary."""

from __future__ import annotations

import pytest
import torch

from inference_svc.model.architectures import ARCHITECTURES

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0}

MODELS = {
    "llama": ("Llama", {}),
    "llama-one-kv-head-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-no-gqa-biases": (
        "Llama",
        {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": LINEAR}),
    "llama-head-dim": ("Llama", {"head_dim": 20, "rms_norm_eps": 1e-3}),
    "mistral-sliding": ("Mistral", {"sliding_window": 10}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding-from-layer-1": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-yarn-rope-bias": (
        "Qwen3",
        {"head_dim": 12, "rope_parameters": YARN | {"rope_theta": 1e6}, "attention_bias": True},
    ),
    "qwen3-layer-types": (
        "Qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
NUM_TOKENS = 100


def test_every_architecture_has_a_row() -> None:
    assert {f"{family}ForCausalLM" for family, _ in MODELS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("path", ["torch", "native"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, path, dtype, tolerance, random_model, save_model, load_decoder, relative_rms):
    family, changes = MODELS[name]
    model = random_model(family, **changes)
    decoder = load_decoder(save_model(model), dtype, path=path)
    token_ids = torch.randint(0, model.config.vocab_size, (NUM_TOKENS,)).tolist()
    with torch.no_grad():
        expected = model.to(dtype)(torch.tensor([token_ids])).logits[0].float()
    got = decoder.logits(token_ids, chunk=NUM_TOKENS)
    assert got.dtype == torch.float32
    assert relative_rms(expected, got) <= tolerance
    # The same one by one: decode rows over a paged context.
    got = decoder.logits(token_ids, chunk=1)
    assert relative_rms(expected, got) <= tolerance


def test_fp16(random_model, save_model, load_decoder, relative_rms):
    model = random_model("Llama")
    decoder = load_decoder(save_model(model), torch.float16)
    token_ids = torch.randint(0, model.config.vocab_size, (20,)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]
    assert relative_rms(expected, decoder.logits(token_ids, chunk=1)) <= 1e-2


def test_greedy_tokens(random_model, save_model, load_decoder):
    model = random_model("Qwen3", head_dim=16)
    decoder = load_decoder(save_model(model))
    prompt = torch.randint(0, model.config.vocab_size, (1, 9))
    expected = model.generate(prompt, max_new_tokens=64, do_sample=False, eos_token_id=None)
    sequence = decoder.add(expected[0].tolist())
    sequence.token_ids = prompt[0].tolist()
    start = 0
    while len(sequence.token_ids) < expected.shape[1]:
        logits = decoder.step([(sequence, start, len(sequence.token_ids) - start, True)])
        start = len(sequence.token_ids)
        sequence.token_ids.append(int(logits[0].argmax()))
    assert sequence.token_ids == expected[0].tolist()
