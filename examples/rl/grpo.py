"""Reinforcement learning of a LoRA adapter (GRPO) around `push` and `sample`.

python grpo.py NAME MODEL_DIR BASE_MODEL OUT_DIR [STEPS]

Each step samples answers of the newest version, rewards them, and pushes the next version. When the
push returns, every replica can sample from it. MODEL_DIR is the demo's model, BASE_MODEL its name
at the servers. OUT_DIR gets rewards.csv and rewards.svg. You need torch, transformers and peft.

The task: at first the model copies a word that ends with "=", and answers other words with any of
their letters. It learns to answer with the word's first letter, repeatedly.
"""

from __future__ import annotations

import asyncio
import os
import random
import string
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from loadout import AsyncClient

INFERENCE = os.environ.get("LOADOUT_INFERENCE", "127.0.0.1:7080").split(",")
STORE = os.environ.get("LOADOUT_STORE", "127.0.0.1:7070")
TOKEN = os.environ.get("LOADOUT_TOKEN")

STEPS, PROMPTS, SAMPLES, MAX_TOKENS = 80, 8, 8, 8
LEARNING_RATE, CLIP, MAX_GRAD_NORM = 1e-3, 0.2, 1.0
LORA = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])


class Sample(NamedTuple):
    """An answer; `logprobs` has its tokens' log probabilities when they were sampled."""

    prompt_ids: list[int]
    token_ids: tuple[int, ...]
    logprobs: list[float]
    reward: float
    advantage: float = 0.0


def draw_word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))


def reward_of(word: str, token_ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> float:
    """Returns the share of an answer's tokens that are the word's first letter."""
    [first] = tokenizer.encode(word[0], add_special_tokens=False)
    return token_ids.count(first) / MAX_TOKENS


async def sample(
    client: AsyncClient, adapter: str, words: list[str], tokenizer: PreTrainedTokenizerBase
) -> list[list[Sample]]:
    """Returns a group of answers to each word, from all replicas."""

    async def group_of(word: str) -> list[Sample]:
        prompt = tokenizer.encode(word)
        answers = await client.sample(
            prompt, SAMPLES, adapter=adapter, max_tokens=MAX_TOKENS, temperature=1.0, logprobs=0
        )
        return [
            Sample(
                prompt,
                answer.token_ids,
                [each.chosen.logprob for each in answer.logprobs],
                reward_of(word, answer.token_ids, tokenizer),
            )
            for answer in answers
        ]

    return await asyncio.gather(*map(group_of, words))


def with_advantages(groups: list[list[Sample]]) -> list[Sample]:
    """Returns all answers, with advantages from a comparison with their group."""
    samples = []
    for group in groups:
        rewards = torch.tensor([each.reward for each in group])
        scaled = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        samples += [
            each._replace(advantage=float(a)) for each, a in zip(group, scaled, strict=True)
        ]
    return samples


def loss_of(model: PeftModel, samples: list[Sample]) -> torch.Tensor:
    """Returns the clipped loss over all answers' tokens, [1]."""
    ids = [torch.tensor([*each.prompt_ids, *each.token_ids]) for each in samples]
    logits = model(input_ids=pad_sequence(ids, batch_first=True)).logits
    total, num_tokens = torch.zeros(()), 0
    for row, each, tokens in zip(logits, samples, ids, strict=True):
        start = len(each.prompt_ids)
        logprobs = row[start - 1 : len(tokens) - 1].log_softmax(-1)
        chosen = logprobs.gather(1, tokens[start:, None]).squeeze(1)
        ratio = (chosen - torch.tensor(each.logprobs)).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        total -= torch.minimum(ratio * each.advantage, clipped * each.advantage).sum()
        num_tokens += len(each.token_ids)
    return total / num_tokens


def draw_curve(rewards: list[float], title: str) -> str:
    """Returns the rewards as an SVG image, with their mean over ten steps."""
    width, height, left, top = 640, 300, 50, 30
    step = (width - 2 * left) / max(len(rewards) - 1, 1)

    def line(values: list[float], colour: str, stroke: float) -> str:
        points = (
            f"{left + i * step:.1f},{height - top - v * (height - 2 * top):.1f}"
            for i, v in enumerate(values)
        )
        style = f'fill="none" stroke="{colour}" stroke-width="{stroke}"'
        return f'<polyline {style} points="{" ".join(points)}"/>'

    recent = [rewards[max(0, i - 9) : i + 1] for i in range(len(rewards))]
    means = [sum(each) / len(each) for each in recent]
    marks = "".join(
        f'<text x="{left - 8}" y="{height - top - v * (height - 2 * top) + 4:.1f}" '
        f'text-anchor="end">{v:g}</text>'
        for v in (0, 0.25, 0.5, 0.75, 1)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" fill="#555">'
        f'<rect width="{width}" height="{height}" fill="white"/>{marks}'
        f'<text x="{width / 2}" y="18" text-anchor="middle">{title}</text>'
        f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">'
        f"steps 1 to {len(rewards)}</text>"
        f"{line(rewards, '#9bc', 1)}{line(means, '#036', 2.5)}</svg>\n"
    )


async def train(name: str, model_dir: str, base_model: str, out: Path, num_steps: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = get_peft_model(base, LORA)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
    rng, rewards, start_s = random.Random(0), [], time.monotonic()
    async with AsyncClient(inference=INFERENCE, store=STORE, token=TOKEN) as client:
        for step in range(1, num_steps + 1):
            pushed = await client.push(
                name,
                get_peft_model_state_dict(model),
                LORA,
                wait="all",
                keep=2,
                base_model=base_model,
            )
            words = [draw_word(rng) for _ in range(PROMPTS)]
            groups = await sample(client, pushed.digest, words, tokenizer)
            samples = with_advantages(groups)
            loss_of(model, samples).backward()
            torch.nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            rewards.append(sum(each.reward for each in samples) / len(samples))
            seconds = time.monotonic() - start_s
            version = f"{pushed.name}@{pushed.version}"
            print(f"step {step:3} {version} reward {rewards[-1]:.2f} after {seconds:.0f} s")
    out.mkdir(parents=True, exist_ok=True)
    lines = [f"{step},{reward:.4f}\n" for step, reward in enumerate(rewards, 1)]
    (out / "rewards.csv").write_text("step,reward\n" + "".join(lines))
    (out / "rewards.svg").write_text(draw_curve(rewards, "Mean reward of each step's answers"))


if __name__ == "__main__":
    if len(sys.argv) not in (5, 6):
        print("usage: python grpo.py NAME MODEL_DIR BASE_MODEL OUT_DIR [STEPS]", file=sys.stderr)
        sys.exit(2)
    steps = int(sys.argv[5]) if len(sys.argv) == 6 else STEPS
    asyncio.run(train(*sys.argv[1:4], Path(sys.argv[4]), steps))
