"""Measures the cost of keys and values in FP8 in exactness, with trained adapters.

    python -m bench.kv_exactness [--words 100] [--out FILE]

Both services run as processes, once for each pair of data types, on the same requests: the model
and the keys and values in float32, in bfloat16, and the model in bfloat16 with keys and values in
FP8. All answers are greedy.

- The demo's jobs: the share of answers to held-out words that are right to the last letter.
- SmolLM2 with its three trained adapters and without, on the questions of `examples/smollm2`: the
  share of answers, and of tokens, that equal bfloat16's. An answer may differ after one token
  that was nearly as likely as another.
- The distance of log probabilities: the mean magnitude of the difference from bfloat16, over the
  tokens of bfloat16's answers, and over documents of this project, whose last tokens have contexts
  of 2,000 tokens. Perplexity is of the same documents.

float32 shows how far bfloat16 is from exact, by the same measures.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from bench.models import ROOT
from bench.results import FOLDER, report
from bench.workloads.real_model import QUESTIONS
from inference_svc.model.gguf.expand import expanded
from loadout import Client
from loadout.demo import jobs
from loadout.demo.adapters import ADAPTERS, MODEL
from loadout.demo.chat.model import model_file
from loadout.demo.chat.run import TRAINED_ADAPTERS
from loadout.demo.system import System, SystemSettings
from loadout.demo.traffic import MAX_ANSWER_TOKENS, SEED

PAIRS = {
    "bfloat16": ("bfloat16", "auto"),
    "fp8": ("bfloat16", "fp8"),
    "float32": ("float32", "auto"),
}
"""The model's dtype and the dtype of keys and values, by name. Others are compared
with the first."""
BASELINE = "bfloat16"
NUM_TOKENS, NUM_IN_FLIGHT = 64, 16
DOCUMENTS = ("README.md", "docs/security.md", "docs/limits.md", "docs/configuration.md")
DOCUMENT_TOKENS = 2048
LONG_CONTEXT = 1024
"""Tokens of documents from here on count apart."""
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"

Numbers = NDArray[np.float32]


@dataclass(slots=True)
class Found:
    """The answers of one system: tokens of SmolLM2's answers by adapter and question, the share of
    right answers by job, and log probabilities of given tokens by their adapter."""

    answers: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    right: dict[str, float] = field(default_factory=dict)
    logprobs: dict[str, list[Numbers]] = field(default_factory=dict)


@contextmanager
def running(
    pair: str, model: Path, base: str, adapters: dict[str, Path], folder: Path
) -> Iterator[Client]:
    """Starts both services with adapters of one model."""
    dtype, kv_dtype = PAIRS[pair]
    flags = {
        "--dtype": dtype,
        "--kv-dtype": kv_dtype,
        "--kv-memory": "512MiB",
        "--device": "cpu",
        "--log-level": "warning",
    }
    words = tuple(word for flag in flags.items() for word in flag)
    roots = tuple({path.parent.resolve() for path in adapters.values()})
    settings = SystemSettings(model, base, source_roots=roots, inference_flags=words)
    with System(settings, folder) as system:
        addresses = system.addresses
        with Client(inference=addresses.inference, store=addresses.store, timeout_s=None) as client:
            for name, path in adapters.items():
                client.register(name, f"file://{path.resolve()}", base_model=base)
            yield client


def answer_jobs(client: Client, num_words: int) -> dict[str, float]:
    """Returns the share of right answers by job."""

    def is_right(job: jobs.Job, word: str) -> bool:
        answer = client.complete(
            jobs.prompt(word),
            adapter=job.name if job.adapter else None,
            temperature=0,
            max_tokens=MAX_ANSWER_TOKENS,
        )
        return answer.text == jobs.expected(job, word)

    right = {}
    with ThreadPoolExecutor(NUM_IN_FLIGHT) as threads:
        for job in jobs.JOBS:
            words = jobs.held_out(job, num_words, SEED)
            found = list(threads.map(lambda word, job=job: is_right(job, word), words))
            right[job.name] = sum(found) / len(found)
    return right


class Chats:
    """SmolLM2's requests, as tokens."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self.adapters = {path.name: path for path in sorted(TRAINED_ADAPTERS.iterdir())}
        questions = QUESTIONS.read_text(encoding="utf-8").splitlines()
        self.prompts = {
            (name, question): self._rendered(question)
            for name in ("", *self.adapters)
            for question in questions
        }
        texts = (Path(each).read_text(encoding="utf-8") for each in DOCUMENTS)
        self.documents = [self._tokenizer(text)["input_ids"][:DOCUMENT_TOKENS] for text in texts]

    def _rendered(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        rendered = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        return list(rendered["input_ids"])

    def answer(self, client: Client, found: Found) -> None:
        """Adds the answers to all prompts."""

        def one(name: str, prompt: list[int]) -> tuple[int, ...]:
            answer = client.complete(
                prompt, adapter=name or None, temperature=0, max_tokens=NUM_TOKENS
            )
            return tuple(answer.token_ids)

        with ThreadPoolExecutor(NUM_IN_FLIGHT) as threads:
            names = [name for name, _ in self.prompts]
            answers = threads.map(one, names, self.prompts.values())
            found.answers.update(zip(self.prompts, answers, strict=True))

    def score(self, client: Client, found: Found, baseline: Found) -> None:
        """Adds log probabilities of the baseline's answers, and of documents."""
        for (name, question), prompt in self.prompts.items():
            given = [*prompt, *baseline.answers[name, question]]
            own = _scored(client, given, name)[len(prompt) - 1 :]
            found.logprobs.setdefault(name or "base", []).append(own)
        for document in self.documents:
            scored = _scored(client, document, "")
            found.logprobs.setdefault("documents", []).append(scored[: LONG_CONTEXT - 1])
            long = scored[LONG_CONTEXT - 1 :]
            found.logprobs.setdefault(f"documents, from token {LONG_CONTEXT}", []).append(long)


def _scored(client: Client, tokens: Sequence[int], adapter: str) -> Numbers:
    """Returns the log probability of each token but the first."""
    scores = client.complete(
        list(tokens), adapter=adapter or None, max_tokens=0, prompt_logprobs=0
    ).prompt_logprobs
    assert scores is not None
    return np.asarray(scores.logprobs)


def measure(num_words: int, work: Path) -> dict[str, Found]:
    """Returns the answers of each pair of data types."""
    with expanded(model_file(ROOT)) as model:
        return _measure(model, num_words, work)


def _measure(model: Path, num_words: int, work: Path) -> dict[str, Found]:
    chats = Chats(model)
    demo = {job.name: ADAPTERS / job.name for job in jobs.ADAPTER_JOBS}
    found: dict[str, Found] = {}
    for pair in PAIRS:
        own = found[pair] = Found()
        with running(pair, MODEL, jobs.BASE_MODEL, demo, work / f"{pair}-demo") as client:
            own.right = answer_jobs(client, num_words)
        with running(pair, model, SMOLLM2, chats.adapters, work / f"{pair}-chat") as client:
            chats.answer(client, own)
            chats.score(client, own, found[BASELINE])
    return found


def rows(found: dict[str, Found]) -> Iterator[dict[str, Any]]:
    """Yields a row for each pair of data types, and each set of requests."""
    baseline = found[BASELINE]
    for pair, own in found.items():
        yield {
            "keys and values": pair,
            "requests": "the demo's jobs",
            "right": sum(own.right.values()) / len(own.right),
            "all": own.right,
        }
        for name in dict.fromkeys(name for name, _ in own.answers):
            yield _answers_row(pair, name, own, baseline) | _distance(name or "base", own, baseline)
        for name in (each for each in own.logprobs if each.startswith("documents")):
            mean = float(np.concatenate(own.logprobs[name]).mean())
            row = {"keys and values": pair, "requests": name, "perplexity": math.exp(-mean)}
            yield row | _distance(name, own, baseline)


def _answers_row(pair: str, adapter: str, own: Found, baseline: Found) -> dict[str, Any]:
    pairs = [
        (tokens, baseline.answers[key]) for key, tokens in own.answers.items() if key[0] == adapter
    ]
    same = [sum(a == b for a, b in zip(mine, theirs, strict=False)) for mine, theirs in pairs]
    return {
        "keys and values": pair,
        "requests": f"SmolLM2, {adapter or 'no adapter'}",
        "equal answers": sum(mine == theirs for mine, theirs in pairs) / len(pairs),
        "equal tokens": sum(same) / sum(len(theirs) for _, theirs in pairs),
    }


def _distance(name: str, own: Found, baseline: Found) -> dict[str, float]:
    mine, theirs = (np.concatenate(each.logprobs[name]) for each in (own, baseline))
    return {"mean |difference of log probabilities|": float(np.abs(mine - theirs).mean())}


COLUMNS = (
    *("keys and values", "requests", "right", "equal answers", "equal tokens"),
    *("mean |difference of log probabilities|", "perplexity"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=100, help="held-out words of each job")
    parser.add_argument("--out", type=Path, default=FOLDER / "kv_exactness.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = measure(options.words, Path(work))
    table = [dict.fromkeys(COLUMNS) | row for row in rows(found)]
    report(options.out, "exactness of keys and values", {"words": options.words}, table)


if __name__ == "__main__":
    main()
