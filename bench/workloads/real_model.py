"""SmolLM2-135M-Instruct, its trained adapters, and prompts that people could send.

llama.cpp reads the GGUF file of `loadout demo --chat`, whose weights have 4 bits (Q4_1); the others
read a folder that transformers made of the file, in bf16.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from bench.models import REAL, ROOT, Prepared, make_variants
from loadout.demo.chat.model import GGUF_NAME, model_file
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
    model_dir = ROOT / "smollm2-bf16"
    path = gguf_path(model_dir)
    if not model_dir.is_dir():
        write_folder(path, model_dir)
    root = ROOT / REAL
    shutil.rmtree(root, ignore_errors=True)
    variants = [make_variants(TRAINED_ADAPTERS / each, root / each) for each in ADAPTERS]
    folders = [next(variants[index % len(variants)]) for index in range(num_adapters)]
    adapters = {str(index): folder for index, folder in enumerate(folders)}
    return Prepared(REAL, model_dir, adapters)


def gguf_path(model_dir: Path) -> Path:
    """Returns the file that the folder is made of, downloaded once."""
    path = model_dir.with_name("gguf") / GGUF_NAME
    found = model_file(path.parent)
    if found != path:  # of the installed package
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, path)
    return path


def write_folder(path: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as a folder in Hugging Face's format, in bf16; another
    process may write the same meanwhile."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    with tempfile.TemporaryDirectory(dir=folder.parent) as making:
        made = Path(making) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


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
