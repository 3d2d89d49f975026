"""TRL's asynchronous GRPO against two replicas without a folder that they share."""

from __future__ import annotations

import random
import string
from pathlib import Path
from statistics import mean

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase
from trl.experimental.async_grpo import AsyncGRPOConfig

from loadout.demo.adapters import MODEL
from loadout.errors import NotFound
from loadout.integrations.trl import AsyncGRPOTrainer
from tests.support.loadout.fleet import Fleet
from tests.trl.rewards import MAX_TOKENS, reward_of

pytestmark = [
    *(pytest.mark.trl, pytest.mark.processes, pytest.mark.timeout(900)),
    pytest.mark.filterwarnings("default"),  # what TRL and transformers warn each other of
]

STEPS, STALENESS = 110, 2
PLAIN = "{{ bos_token }}{{ messages[-1]['content'] }}"
"""The demo's own chat template has the model copy, which leaves nothing to explore."""


def words(count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))) for _ in range(count)]


@pytest.mark.usefixtures("cpu_trainer")
def test_a_training_run_raises_its_reward(
    fleet: Fleet, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.chat_template = PLAIN
    tokenizer.response_template = {"fields": {"content": {"content": "text"}}}
    args = AsyncGRPOConfig(
        str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=MAX_TOKENS,
        max_staleness=STALENESS,
        max_inflight_tasks=64,
        learning_rate=1e-3,
        token_budget=2048,
        dtype="float32",
        bf16=False,
        activation_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    before = [replica.num_requests for replica in fleet.replicas]
    trainer = AsyncGRPOTrainer(
        str(MODEL),
        reward_of,
        args,
        client=fleet.client,
        urls=fleet.urls,
        policy="run",
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": word}] for word in words(512)]}
        ),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
        ),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    first, last = mean(rewards[:5]), mean(rewards[-5:])
    assert last > first + 0.4, (first, last)
    done = [replica.num_requests - num for replica, num in zip(fleet.replicas, before, strict=True)]
    assert min(done) > 0.4 * sum(done), done
    # What TRL has unloaded is gone, what requests may still name is not.
    newest = trainer.model_version
    for version in range(newest - STALENESS, newest + 1):
        assert fleet.client.get(f"run-v{version}").version == 1
    with pytest.raises(NotFound):
        fleet.client.get(f"run-v{newest - STALENESS - 1}")
