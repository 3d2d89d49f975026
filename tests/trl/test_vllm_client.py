"""TRL's client of vLLM's server, and its scores against transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase
from trl.generation import vllm_client

from loadout.demo.adapters import ADAPTERS
from loadout.demo.jobs import BASE_MODEL
from tests.support.loadout.fleet import Fleet
from tests.support.models.parity import logprobs_of

pytestmark = [pytest.mark.trl, pytest.mark.processes]

PROMPTS = ["loadout=", "count"]
TOLERANCE = 1e-4


@pytest.fixture
def client(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Any:
    # It asks whether vLLM is installed, which it needs to send full weights alone.
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_client, "_HAS_RESET_PREFIX_CACHE_SUCCESS", True)
    return vllm_client.VLLMClient(base_url=fleet.urls[0])


def check_answers(
    found: dict[str, Any], prompts: list[list[int]], n: int, model: torch.nn.Module
) -> None:
    """Compares the log probabilities of every answer's tokens with the model's."""
    assert found["prompt_ids"] == prompts
    assert len(found["completion_ids"]) == n * len(prompts)
    for index, answer in enumerate(found["completion_ids"]):
        prompt = prompts[index // n]
        rows = logprobs_of(model, prompt + answer)[len(prompt) - 1 :]
        for row, token, top, ids in zip(
            rows,
            answer,
            found["logprobs"][index],
            found["logprob_token_ids"][index],
            strict=True,
        ):
            assert token in ids
            assert top == sorted(top, reverse=True)
            assert top == pytest.approx(row[ids].tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("logprobs", [0, 3])
def test_generate(
    client: Any, tokenizer: PreTrainedTokenizerBase, model: torch.nn.Module, logprobs: int
) -> None:
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    found = client.generate(prompts, n=2, max_tokens=8, logprobs=logprobs)
    check_answers(found, prompts, 2, model)
    texts = client.generate(PROMPTS, max_tokens=4, generation_kwargs={"seed": 3})
    assert texts["prompt_ids"] == prompts


def test_generate_with_an_adapter(
    client: Any, tokenizer: PreTrainedTokenizerBase, model: torch.nn.Module
) -> None:
    client.model = "upper"
    prompts = [tokenizer.encode(PROMPTS[0])]
    found = client.generate(prompts, max_tokens=8, temperature=0.0)
    assert tokenizer.decode(found["completion_ids"][0]).startswith("LOADOUT")
    adapted = PeftModel.from_pretrained(model, ADAPTERS / "upper").eval()
    try:
        check_answers(found, prompts, 1, adapted)
    finally:
        adapted.unload()


def test_chat(client: Any, tokenizer: PreTrainedTokenizerBase, model: torch.nn.Module) -> None:
    chats = [[{"role": "user", "content": word}] for word in ("loadout", "adapter")]
    found = client.chat(chats, n=2, max_tokens=10)
    prompts = [tokenizer.encode(f"{word}=") for word in ("loadout", "adapter")]
    check_answers(found, prompts, 2, model)


def test_sequence_logprobs(
    client: Any, tokenizer: PreTrainedTokenizerBase, model: torch.nn.Module
) -> None:
    sequences = [tokenizer.encode(text) for text in ("loadout=LOADOUT", "reward=rawerd")]
    lengths, top = [9, 8], 20
    found = client.get_sequence_logprobs(sequences, lengths, top_logprobs=top, chunk_size=1)
    for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        rows = logprobs_of(model, sequence)[length - 1 :]
        best = rows.topk(top).values
        assert torch.tensor(found["logprobs"][index]) == pytest.approx(best, abs=TOLERANCE)
        ids = torch.tensor(found["logprob_token_ids"][index])
        assert torch.tensor(found["logprobs"][index]) == pytest.approx(
            rows.gather(1, ids), abs=TOLERANCE
        )
        actual = torch.tensor(found["actual_logprobs"][index]).squeeze(1)
        expected = rows.gather(1, torch.tensor(sequence[length:])[:, None]).squeeze(1)
        # TRL leaves out what is not among the most likely ones; the server sends it.
        assert actual == pytest.approx(expected, abs=TOLERANCE)


def test_facts(client: Any) -> None:
    assert client.model == BASE_MODEL
    assert client.get_world_size() == 1
    assert client.get_server_info()["model_config"]["dtype"] == "torch.float32"
    client.reset_prefix_cache()


def test_full_weights_are_refused(client: Any) -> None:
    with pytest.raises(RuntimeError, match="no weight-transfer engine"):
        client.init_communicator(device="cpu")
    with pytest.raises(Exception, match=r"501.*push it"):
        client._start_weight_update()
