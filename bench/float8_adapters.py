"""Measures the cost of float8 adapters in accuracy, and how many more of them are resident.

Both services run as real processes, with --adapter-dtype auto and then fp8, in bfloat16.

- The demo's jobs: the share of right answers to words that were held out of training.
- SmolLM2-135M-Instruct with its trained adapters: greedy answers to questions, and the log
  probabilities of the tokens that bfloat16 images give, read as a prompt. Next to this, as a
  measure, the distance of a server in float32 from the one in bfloat16.
- Resident adapters: an arena that has room for some copies of a demo adapter in bfloat16.

    python -m bench.float8_adapters [--words 200] [--copies 12]
        [--out bench/results/float8_adapters.json]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.models import ROOT, make_variants
from bench.results import FOLDER, show, write
from bench.workloads.real_model import QUESTIONS
from inference_svc.model.gguf.expand import expanded
from loadout import Client
from loadout.demo.adapters import ADAPTERS, MODEL
from loadout.demo.chat.model import model_file
from loadout.demo.chat.run import TRAINED_ADAPTERS
from loadout.demo.jobs import ADAPTER_JOBS, BASE_MODEL, Job, expected, held_out, prompt
from loadout.demo.system import System, SystemSettings

DTYPES = ("auto", "fp8")
SMOLLM2 = "smollm2"
NUM_TOKENS = 48
CALLERS = 16
SEED = 7


class Scored(NamedTuple):
    """An answer's log probabilities, and which of its tokens were the most likely, [tokens]."""

    logprobs: np.ndarray
    is_first: np.ndarray


@contextmanager
def serving(
    model: Path, base_model: str, adapters: Mapping[str, Path], *flags: str
) -> Iterator[Client]:
    """Runs both services, with these adapters registered."""
    settings = SystemSettings(model, base_model, inference_flags=flags)
    with (
        tempfile.TemporaryDirectory() as folder,
        System(settings, Path(folder) / "system") as system,
        Client(system.addresses.inference, system.addresses.store) as client,
    ):
        for name, path in adapters.items():
            client.register(name, path, base_model=base_model)
        yield client


def measure_jobs(num_words: int) -> list[dict[str, Any]]:
    """Returns the share of right answers of each job and type."""
    shares: dict[str, dict[str, float]] = {job.name: {} for job in ADAPTER_JOBS}
    for dtype in DTYPES:
        flags = ("--dtype", "bfloat16", "--adapter-dtype", dtype)
        folders = {job.name: ADAPTERS / job.name for job in ADAPTER_JOBS}
        with serving(MODEL, BASE_MODEL, folders, *flags) as client:
            for job in ADAPTER_JOBS:
                shares[job.name][dtype] = _exact(client, job, num_words)
    return [{"job": name, **found} for name, found in shares.items()]


def _exact(client: Client, job: Job, num_words: int) -> float:
    def is_right(word: str) -> bool:
        answer = client.complete(prompt(word), adapter=job.name, max_tokens=24, temperature=0.0)
        return answer.text == expected(job, word)

    with ThreadPoolExecutor(CALLERS) as pool:
        return float(np.mean(list(pool.map(is_right, held_out(job, num_words, SEED)))))


def measure_distance(model: Path) -> list[dict[str, Any]]:
    """Returns, for each adapter and each server but the first, the distance from the first, whose
    images are bfloat16."""
    folders = {path.name: path for path in sorted(TRAINED_ADAPTERS.iterdir())}
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()
    asked = [(name, question) for name in folders for question in questions]
    answers: dict[str, list[tuple[int, ...]]] = {}
    scores: dict[str, list[Scored]] = {}
    given: list[tuple[list[int], int]] = []
    servers = {
        "auto": ("--dtype", "bfloat16"),
        "fp8": ("--dtype", "bfloat16", "--adapter-dtype", "fp8"),
        "float32": ("--dtype", "float32"),
    }
    for server, flags in servers.items():
        with serving(model, SMOLLM2, folders, *flags, "--max-model-len", "512") as client:
            answers[server] = [_answer(client, name, question) for name, question in asked]
            if not given:
                given = [_tokens(model, each) for each in zip(asked, answers["auto"], strict=True)]
            scores[server] = [
                _score(client, name, *each) for (name, _), each in zip(asked, given, strict=True)
            ]
    rows = []
    for server in ("fp8", "float32"):
        for name in folders:
            own = [index for index, (adapter, _) in enumerate(asked) if adapter == name]
            rows.append(
                {"server": server, "adapter": name, **_distance(server, own, answers, scores)}
            )
    return rows


def _distance(
    server: str,
    own: list[int],
    answers: Mapping[str, list[tuple[int, ...]]],
    scores: Mapping[str, list[Scored]],
) -> dict[str, Any]:
    first, other = ([scores[each][index] for index in own] for each in ("auto", server))
    logprobs = [np.concatenate([each.logprobs for each in found]) for found in (first, other)]
    gap = np.abs(logprobs[1] - logprobs[0])
    return {
        "tokens": len(gap),
        "mean |delta logprob|": float(gap.mean()),
        "p99 |delta logprob|": float(np.percentile(gap, 99)),
        "mean delta logprob": float((logprobs[1] - logprobs[0]).mean()),
        "same first token": float(np.concatenate([each.is_first for each in other]).mean()),
        "same answers": float(
            np.mean([answers["auto"][index] == answers[server][index] for index in own])
        ),
    }


def _answer(client: Client, name: str, question: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": question}]
    answer = client.complete(
        messages,  # type: ignore[arg-type]
        adapter=name,
        max_tokens=NUM_TOKENS,
        temperature=0.0,
    )
    return answer.token_ids


def _tokens(model: Path, asked: tuple[tuple[str, str], tuple[int, ...]]) -> tuple[list[int], int]:
    """Returns a question and its answer as a prompt's tokens, and the number of the question's."""
    from transformers import AutoTokenizer

    (_, question), answer = asked
    tokenizer = AutoTokenizer.from_pretrained(model)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )
    tokens = list(rendered["input_ids"])
    return [*tokens, *answer], len(tokens)


def _score(client: Client, name: str, tokens: list[int], first: int) -> Scored:
    found = client.complete(
        tokens, adapter=name, max_tokens=1, temperature=0.0, prompt_logprobs=0
    ).prompt_logprobs
    assert found is not None
    start = first - found.first_position
    return Scored(np.array(found.logprobs)[start:], np.array(found.ranks)[start:] == 1)


def measure_resident(num_copies: int) -> list[dict[str, Any]]:
    """Returns how many copies of an adapter are resident in an arena for `num_copies` in
    bfloat16."""
    rows = []
    arena_bytes = 0
    with tempfile.TemporaryDirectory() as folder:
        variants = make_variants(ADAPTERS / "reverse", Path(folder))
        copies = {f"copy-{index}": next(variants) for index in range(3 * num_copies)}
        for dtype in DTYPES:
            flags = ["--dtype", "bfloat16", "--adapter-dtype", dtype, "--max-loras", "256"]
            if not arena_bytes:
                with serving(MODEL, BASE_MODEL, dict([*copies.items()][:1]), *flags) as client:
                    arena_bytes = num_copies * client.load("copy-0").num_bytes
            flags += ["--adapter-memory", str(arena_bytes), "--no-prefetch"]
            with serving(MODEL, BASE_MODEL, copies, *flags) as client:
                sizes = {client.load(name).num_bytes for name in copies}
                resident = client.residents()
            [num_bytes] = sizes
            rows.append({"images": dtype, "bytes": num_bytes, "resident": len(resident)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=200)
    parser.add_argument("--copies", type=int, default=12)
    parser.add_argument("--out", type=Path, default=FOLDER / "float8_adapters.json")
    options = parser.parse_args()
    with expanded(model_file(ROOT)) as folder:
        found = {
            "resident": measure_resident(options.copies),
            "jobs": measure_jobs(options.words),
            "smollm2": measure_distance(folder),
        }
    for title, rows in found.items():
        show(title, [*rows[0]], [[*row.values()] for row in rows])
    settings = {"words": options.words, "copies": options.copies}
    write(options.out, "float8_adapters", {**settings, **found})


if __name__ == "__main__":
    main()
