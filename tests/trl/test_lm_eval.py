"""lm-eval's client of a completions server computes what transformers gives."""

from __future__ import annotations

import json
import math
from pathlib import Path

import lm_eval
import pytest
import torch
from lm_eval.tasks import TaskManager
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from loadout.demo.adapters import ADAPTERS, MODEL
from loadout.demo.jobs import BASE_MODEL
from tests.support.loadout.fleet import Fleet
from tests.support.models.parity import logprobs_of

pytestmark = [
    *(pytest.mark.trl, pytest.mark.processes),
    pytest.mark.filterwarnings("default"),  # what lm-eval and datasets warn each other of
]

TASK = Path(__file__).parent / "task"


def expected_perplexity(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> float:
    """Returns e to the mean negative log probability of a byte, each text behind BOS."""
    total = num_bytes = 0.0
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
        rows = logprobs_of(model, ids)
        total += rows.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
        num_bytes += len(text.encode())
    return math.exp(-total / num_bytes)


@pytest.mark.parametrize("adapter", ["", "reverse"])
def test_perplexity_is_transformers(
    fleet: Fleet,
    tokenizer: PreTrainedTokenizerBase,
    model: torch.nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    adapter: str,
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    data = TASK / "words.jsonl"
    task = (TASK / "words.yaml").read_text().replace("{file}", str(data))
    (tmp_path / "words.yaml").write_text(task)
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": adapter or BASE_MODEL,
            "base_url": f"{fleet.urls[0]}/v1/completions",
            "tokenizer": str(MODEL),
            "tokenizer_backend": "huggingface",
            "max_length": 512,
            "num_concurrent": 4,
        },
        tasks=["words"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    if adapter:
        adapted = PeftModel.from_pretrained(model, ADAPTERS / adapter).eval()
        expected = expected_perplexity(adapted, tokenizer, texts)
        adapted.unload()
    else:
        expected = expected_perplexity(model, tokenizer, texts)
    assert found["results"]["words"]["byte_perplexity,none"] == pytest.approx(expected, rel=1e-4)
