"""transformers and vLLM open the checkpoints of `loadout quantize`, and have our tokens."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.peers.install import python_of
from kernels.native.build import processor_flags
from loadout.cli.__main__ import main
from tests.support.models.zoo import Zoo
from tests.system.services import Services
from tests.trl.opened_by import NUM_TOKENS

pytestmark = [pytest.mark.trl, pytest.mark.processes, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 17, 99, 300, 7], [1, 2, 3, 4, 5, 6, 7, 8], [400, 401, 402]]
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Heads and inputs that vLLM takes on CPUs."""
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # kernels are added to one process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in fp32 whose answers do not repeat themselves."""
    folder = tmp_path_factory.mktemp("model") / "plain"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def opened_by(peer: str, folder: Path, **asked: Any) -> dict[str, Any]:
    out = folder.with_name(f"{peer}.json")
    done = subprocess.run(
        [python_of("vllm"), "-m", "tests.trl.opened_by", peer, str(folder), str(out)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | VLLM_ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("to", ["int4", "int8", "fp8"])
def test_transformers_has_the_tokens_of_our_server(to: str, plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / to
    assert main(["quantize", str(plain), str(folder), "--to", to]) == 0
    flags = ("--no-tokenizer", "--dtype", "float32")
    with Services(Zoo("llama", folder, None, {}), tmp_path, inference_flags=flags) as services:
        assert services.client.server_info().weight_form == to
        ours = [
            list(
                services.client.complete(
                    prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
                ).token_ids
            )
            for prompt in PROMPTS
        ]
        services.check_exit_codes()
    assert opened_by("transformers", folder, prompts=PROMPTS)["answers"] == ours


@pytest.mark.parametrize("to", ["", "int4", "int8", "fp8"])
def test_vllm_has_the_tokens_of_transformers(to: str, plain: Path, tmp_path: Path) -> None:
    """Or ones that are nearly as likely, because it computes in bf16: of two logits that rounding
    changes, the lower one may become the higher. Where its CPU build has no product by a type, one
    in plain torch takes its place (tests/trl/vllm_kernels.py), and all else is vLLM's own."""
    folder = plain
    if to:
        folder = tmp_path / to
        assert main(["quantize", str(plain), str(folder), "--to", to]) == 0
    opened = opened_by("vllm", folder, prompts=PROMPTS)
    answers, kernels = opened["answers"], opened["kernels"]
    expected = {
        "int4": "CPUWNA16LinearKernel" if "avx512f" in processor_flags() else "DequantisedIntegers",
        "int8": "DequantisedIntegers",
        "fp8": "DequantisedFp8",
    }
    # vLLM has q, k and v in one layer, and gate and up in one.
    num_layers = 4 * SIZES["num_hidden_layers"] if to else 0
    assert list(kernels.values()) == [expected.get(to)] * num_layers
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * len(PROMPTS)
    found = opened_by("transformers", folder, prompts=PROMPTS, answers=answers)
    assert max(map(max, found["gaps"])) <= 2 * found["change"]
