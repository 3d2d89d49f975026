"""The prompts to ask."""

from __future__ import annotations

from pathlib import Path

DEFAULT_PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def add(a, b):\n    return",
    "The three most important things about a good story are",
    "Question: Why is the sky blue?\nAnswer:",
    "Dear customer, thank you for your message. We",
    "1, 2, 3, 4,",
    "The weather today is",
)
MAX_PROMPTS = 256


def read_prompts(path: Path) -> list[str]:
    """Returns the lines of a file that are not blank; "\\n" in a line is a new line.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has no prompts, or too many.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    prompts = [line.replace("\\n", "\n") for line in lines if line.strip()]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"{path} has {len(prompts)} prompts, expected 1 to {MAX_PROMPTS}")
    return prompts
