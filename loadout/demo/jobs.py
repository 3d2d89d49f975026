"""The tasks of the demo's model and adapters: one job per adapter, and copying for the plain base.

Pure Python: this file knows the jobs, the words and which words were never trained on. It knows
nothing of tensors, files or services.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256

BASE_MODEL = "loadout-demo"
"""The model's name: every adapter names it as its base."""

SEPARATOR = "="
"""Ends a prompt; chosen because no shell gives it a meaning."""

MIN_LETTERS = 3
MAX_LETTERS = 8
MAX_ANSWER_LETTERS = 2 * MAX_LETTERS
"""The longest right answer to a word of MAX_LETTERS letters, over all jobs."""

PRINTABLE = " " + string.ascii_letters + string.digits + string.punctuation
WIDE_ALPHABET = PRINTABLE.replace(SEPARATOR, "")
"""The characters that the base can copy."""

HELD_OUT_PERCENT = 10
"""Share of all words that training never sees."""

VOWELS = frozenset("aeiou")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class AdapterSpec:
    """The LoRA settings of one adapter, in PEFT's words."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    use_rslora: bool = False
    rank_pattern: tuple[tuple[str, int], ...] = ()
    """(module pattern, rank) where the rank differs from `rank`."""
    alpha_pattern: tuple[tuple[str, int], ...] = ()
    """(module pattern, alpha) where alpha differs from `alpha`."""
    layers_to_transform: tuple[int, ...] | None = None
    """The layers that the adapter changes; None: all of them."""


@dataclass(frozen=True)
class Job:
    """One visible transformation of a word; `adapter` is None for the plain base."""

    name: str
    title: str
    transform: Callable[[str], str]
    adapter: AdapterSpec | None


def _shift(letters: str, by: int) -> str:
    alphabet = string.ascii_lowercase
    return letters.translate(str.maketrans(alphabet, alphabet[by:] + alphabet[:by]))


def _copy(word: str) -> str:
    return word


def _reverse(word: str) -> str:
    return word[::-1]


def _sort(word: str) -> str:
    return "".join(sorted(word))


def _rot13(word: str) -> str:
    return _shift(word, 13)


def _next_letter(word: str) -> str:
    return _shift(word, 1)


def _double(word: str) -> str:
    return "".join(letter * 2 for letter in word)


def _drop_vowels(word: str) -> str:
    return "".join(letter for letter in word if letter not in VOWELS)


def _pig_latin(word: str) -> str:
    return word[1:] + word[0] + "ay"


BASE = Job("base", "copy", _copy, None)

ADAPTER_JOBS = (
    Job("upper", "upper case", str.upper, AdapterSpec(4, 8, (*ATTENTION, *MLP))),
    Job(
        "double-letters",
        "double every letter",
        _double,
        AdapterSpec(8, 16, ("q_proj", "v_proj", "o_proj")),
    ),
    Job("pig-latin", "pig latin", _pig_latin, AdapterSpec(10, 20, ATTENTION)),
    Job("no-vowels", "drop vowels", _drop_vowels, AdapterSpec(12, 24, (*ATTENTION, *MLP))),
    Job("rot13", "rot13", _rot13, AdapterSpec(16, 32, ("v_proj", "o_proj", *MLP))),
    Job(
        "next",
        "next letter",
        _next_letter,
        AdapterSpec(20, 40, ("v_proj", "o_proj", "gate_proj", "down_proj")),
    ),
    Job(
        "reverse",
        "reverse",
        _reverse,
        AdapterSpec(
            24,
            48,
            (*ATTENTION, *MLP),
            rank_pattern=(("gate_proj", 8), ("up_proj", 8), ("down_proj", 16)),
            alpha_pattern=(("gate_proj", 16), ("up_proj", 16), ("down_proj", 16)),
        ),
    ),
    Job("sort", "sort letters", _sort, AdapterSpec(32, 12, (*ATTENTION, *MLP), use_rslora=True)),
)

JOBS = (BASE, *ADAPTER_JOBS)


def prompt(text: str) -> str:
    """The text to send for `text`: the model answers with the text after it."""
    return text + SEPARATOR


def expected(job: Job, text: str) -> str:
    """The whole right answer, which the model then ends with its end-of-sequence token."""
    return job.transform(text)


def is_held_out(text: str) -> bool:
    """True if training never uses `text`: decided by its hash alone, so it holds for every run."""
    return int.from_bytes(sha256(text.encode()).digest()[:4]) % 100 < HELD_OUT_PERCENT


def training_words(job: Job, seed: int) -> Iterator[str]:
    """Endless words to train `job` on; none is held out.

    Half of the base's texts are longer and of more characters, because answers are made of those.
    """
    rng = random.Random(f"train:{job.name}:{seed}")
    while True:
        wide = job.adapter is None and rng.random() < 0.5
        word = _wide_word(rng) if wide else _word(rng)
        if not is_held_out(word):
            yield word


def held_out(job: Job, count: int, seed: int) -> list[str]:
    """`count` different words that `job` was not trained on and whose answer is not empty."""
    rng = random.Random(f"held-out:{job.name}:{seed}")
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        word = _word(rng)
        if is_held_out(word) and expected(job, word):
            chosen[word] = None
    return list(chosen)


def _word(rng: random.Random) -> str:
    return _random_string(rng, string.ascii_lowercase, MIN_LETTERS, MAX_LETTERS)


def _wide_word(rng: random.Random) -> str:
    alphabet = rng.choice((string.ascii_letters, WIDE_ALPHABET))
    return _random_string(rng, alphabet, 1, MAX_ANSWER_LETTERS)


def _random_string(rng: random.Random, alphabet: str, shortest: int, longest: int) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(shortest, longest)))
