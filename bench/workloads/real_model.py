"""SmolLM2-135M-Instruct, its trained adapters, and prompts that people could send.

The model's folder is that of `loadout demo --chat`. llama.cpp reads the GGUF file that the folder
was made of, whose weights have 4 bits (Q4_1); the others read the folder's, in bf16.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer

from bench.models import REAL, ROOT, Prepared, make_variants
from loadout.demo.chat.download import GGUF_NAME, gguf_file
from loadout.demo.chat.model import model_folder
from loadout.demo.chat.run import TRAINED_ADAPTERS

QUESTIONS = TRAINED_ADAPTERS.parent / "test_questions.txt"
TEXTS = ("CONTRIBUTING.md", "SECURITY.md", "docs/security.md")
"""English of the project, to summarize."""
WORDS = (0, 30, 80, 140)
"""Words of such a text in a prompt, in turn; a prompt without any is a question."""
ADAPTERS = ("capitals", "pirate")
"""The adapters that every system applies: vLLM refuses DoRA."""


def prepare_real(num_adapters: int) -> Prepared:
    """Returns the model with variants of its adapters, which differ in the lowest bits of some
    weights, so that no system takes two of them for one."""
    model_dir = model_folder(ROOT, Console(stderr=True))
    gguf_path(model_dir)
    root = ROOT / REAL
    shutil.rmtree(root, ignore_errors=True)
    variants = [make_variants(TRAINED_ADAPTERS / each, root / each) for each in ADAPTERS]
    folders = [next(variants[index % len(variants)]) for index in range(num_adapters)]
    adapters = {str(index): folder for index, folder in enumerate(folders)}
    return Prepared(REAL, model_dir, adapters)


def gguf_path(model_dir: Path) -> Path:
    """Returns the file that the folder was made of, downloaded once."""
    folder = model_dir.with_name("gguf")
    path = folder / GGUF_NAME
    if not path.is_file():
        partial = model_dir.with_name("gguf.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        copied = Path(shutil.copy(gguf_file(partial), partial / "copied"))
        folder.mkdir(exist_ok=True)
        copied.replace(path)
        shutil.rmtree(partial)
    return path


@cache
def real_prompts(model_dir: Path, count: int) -> list[list[int]]:
    """Returns the tokens of chats that wait for an answer, of several lengths in turn."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    words = " ".join(Path(each).read_text(encoding="utf-8") for each in TEXTS).split()
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()
    found = []
    for index in range(count):
        length = WORDS[index % len(WORDS)]
        start = 97 * index % (len(words) - max(WORDS))
        text = " ".join(words[start : start + length])
        content = f"Summarize: {text}" if text else questions[index % len(questions)]
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=True
        )
        found.append(list(rendered["input_ids"]))
    return found
