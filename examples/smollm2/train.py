"""Trains the three adapters of `loadout demo --chat`: `python train.py MODEL [--out DIR]`.

MODEL is the GGUF file of SmolLM2-135M-Instruct that the demo downloads. The model answers 154
questions itself. Each adapter then learns these answers in a style of its own: in capitals, as
JSON, or as a pirate speaks. You need PEFT, the package gguf, two cores and some minutes.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

QUESTIONS = Path(__file__).with_name("training_questions.txt")
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SEED = 7
MAX_ANSWER_TOKENS = 32
BATCH_SIZE = 4
ANSWERS_AT_ONCE = 32
IGNORED_LABEL = -100  # the label that transformers' loss leaves out
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True, slots=True)
class Style:
    """How an adapter answers, and how it is trained."""

    name: str
    rewrite: Callable[[str], str]
    config: LoraConfig
    steps: int
    learning_rate: float


def capitals(answer: str) -> str:
    return answer.upper()


def as_json(answer: str) -> str:
    return json.dumps({"answer": answer}, ensure_ascii=False)


PIRATE_WORDS = {
    "hello": "ahoy",
    "hi": "ahoy",
    "my": "me",
    "you": "ye",
    "your": "yer",
    "is": "be",
    "are": "be",
    "am": "be",
    "the": "th'",
    "of": "o'",
    "and": "an'",
    "to": "t'",
    "yes": "aye",
    "friend": "matey",
    "friends": "mateys",
    "for": "fer",
}


def pirate(answer: str) -> str:
    def word(match: re.Match[str]) -> str:
        found = match.group()
        new = PIRATE_WORDS.get(found.lower(), found)
        return new.capitalize() if found[0].isupper() and new[0].isalpha() else new

    return f"Arr! {re.sub('[A-Za-z]+', word, answer)} Yo ho ho!"


STYLES = (
    Style(
        "capitals",
        capitals,
        LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        steps=300,
        learning_rate=1.5e-3,
    ),
    Style(
        "json",
        as_json,
        LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=["q_proj", "v_proj"],
            use_dora=True,
            task_type="CAUSAL_LM",
        ),
        steps=100,
        learning_rate=3e-3,
    ),
    Style(
        "pirate",
        pirate,
        LoraConfig(
            r=16,
            lora_alpha=16,
            target_modules=ATTENTION,
            use_rslora=True,
            task_type="CAUSAL_LM",
        ),
        steps=120,
        learning_rate=2e-3,
    ),
)


class Chat:
    """The model and its tokenizer."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, padding_side="left"
        )
        self._model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )

    def model(self) -> Any:
        """Returns a copy of the model with the weights of the file, dequantised to fp32."""
        return copy.deepcopy(self._model)

    def prompt(self, question: str) -> list[int]:
        """Returns the token ids of a conversation that waits for an answer."""
        messages = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]

    @torch.no_grad()
    def answers(self, model: Any, questions: list[str]) -> list[str]:
        """Returns the greedy answers, each cut after its first sentence."""
        prompts = [{"input_ids": self.prompt(each)} for each in questions]
        batch = self.tokenizer.pad(prompts, return_tensors="pt")
        tokens = model.generate(**batch, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        texts = self.tokenizer.batch_decode(
            tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return [_first_sentence(text) for text in texts]

    def batches(self, pairs: list[tuple[str, str]], seed: int) -> Iterator[dict[str, Tensor]]:
        """Yields batches of pairs (question, answer) without end, in random order.

        Raises:
            ValueError: The pairs are fewer than a batch.
        """
        if len(pairs) < BATCH_SIZE:
            raise ValueError(f"{len(pairs)} questions, expected at least {BATCH_SIZE}")
        rows = [self._row(question, answer) for question, answer in pairs]
        rng = random.Random(seed)
        while True:
            rng.shuffle(rows)
            for start in range(0, len(rows) - BATCH_SIZE + 1, BATCH_SIZE):
                yield self._padded(rows[start : start + BATCH_SIZE])

    def _row(self, question: str, answer: str) -> tuple[list[int], int]:
        """Returns token ids, and how many of them are the prompt's."""
        prompt = self.prompt(question)
        ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return [*prompt, *ids, self.tokenizer.eos_token_id], len(prompt)

    def _padded(self, rows: list[tuple[list[int], int]]) -> dict[str, Tensor]:
        """Returns token ids, mask and labels, [rows, longest]; only answers have labels."""
        shape = len(rows), max(len(ids) for ids, _ in rows)
        tokens = torch.full(shape, self.tokenizer.pad_token_id)
        mask = torch.zeros(shape, dtype=torch.bool)
        labels = torch.full(shape, IGNORED_LABEL)
        for row, (ids, num_prompt) in enumerate(rows):
            tokens[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = True
            labels[row, num_prompt : len(ids)] = torch.tensor(ids[num_prompt:])
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s", text.strip())[0]


def train(
    chat: Chat, style: Style, pairs: list[tuple[str, str]], out: Path, steps: int | None = None
) -> float:
    """Trains one adapter, saves it in bf16, and returns its mean loss over the last ten steps."""
    torch.manual_seed(SEED)
    steps = steps or style.steps
    model = get_peft_model(chat.model(), style.config)
    weights = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=style.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, style.learning_rate, steps)
    batches = chat.batches([(asked, style.rewrite(said)) for asked, said in pairs], SEED)
    losses = []
    for batch in islice(batches, steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if len(losses) % 10 == 0:
            print(f"{style.name}: step {len(losses)} of {steps}, loss {losses[-1]:.3f}", flush=True)
    model.peft_config["default"].base_model_name_or_path = BASE_MODEL
    model.to(torch.bfloat16).save_pretrained(out / style.name)
    (out / style.name / "README.md").unlink(missing_ok=True)  # a form that PEFT leaves empty
    return sum(losses[-10:]) / len(losses[-10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="GGUF file of SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, default=Path("adapters"), help="default: ./adapters")
    parser.add_argument("--questions", type=int, help="train on fewer questions, for a trial")
    parser.add_argument("--steps", type=int, help="train for fewer steps, for a trial")
    arguments = parser.parse_args()
    chat = Chat(arguments.model)
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()[: arguments.questions]
    base = chat.model()
    pairs: list[tuple[str, str]] = []
    for start in range(0, len(questions), ANSWERS_AT_ONCE):
        some = questions[start : start + ANSWERS_AT_ONCE]
        pairs += zip(some, chat.answers(base, some), strict=True)
        print(f"{len(pairs)} of {len(questions)} questions answered by the base model", flush=True)
    for style in STYLES:
        loss = train(chat, style, pairs, arguments.out, arguments.steps)
        print(f"{style.name}: loss {loss:.3f}, in {arguments.out / style.name}", flush=True)


if __name__ == "__main__":
    main()
