"""The steps of `loadout demo --chat`, in the order of time."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from loadout.client import Client
from loadout.demo.chat.ask import Answer
from loadout.demo.chat.model import BASE_MODEL, model_file
from loadout.demo.chat.view import show
from loadout.demo.system import System, SystemSettings, temporary_work_dir

TRAINED_ADAPTERS = Path(__file__).resolve().parents[3] / "examples" / "smollm2" / "adapters"
"""In a clone; a wheel does not have them."""
QUESTIONS = ("What is the capital of France?", "Give me a tip for learning a language.")
MEMORY_FLAGS = ("--kv-memory", "128MiB", "--adapter-memory", "64MiB")
"""Enough for these requests, and less than a service's default: all of it is written at the
start."""


def run_chat(
    console: Console,
    adapters: Path,
    cache: Path,
    questions: Sequence[str] = QUESTIONS,
    work_dir: Path | None = None,
) -> list[list[Answer]]:
    """Asks SmolLM2 and each adapter of the folder `adapters`; returns the answers to each question.

    Without a `work_dir` it uses a fresh one and removes it after a good run.

    Raises:
        Unavailable: The model cannot be had here.
        ProcessFailed: A service did not start, or failed.
        LoadoutError: A call failed.
        OSError: The model's file cannot be written.
    """
    started_s = time.monotonic()
    model = model_file(cache)
    folder = work_dir or temporary_work_dir()
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(path.parent.name for path in adapters.glob("*/adapter_config.json"))
    settings = SystemSettings(model, BASE_MODEL, inference_flags=MEMORY_FLAGS)
    with ExitStack() as running:
        with console.status("starting adapter store and inference service"):
            system = running.enter_context(System(settings, folder))
        with Client(store=system.addresses.store) as client:
            for name in names:
                client.register(name, adapters / name, base_model=BASE_MODEL)
        answers = [show(console, system.addresses.inference, each, names) for each in questions]
    console.print(f"all services exited with 0; {time.monotonic() - started_s:.1f} s in all")
    if work_dir is None:
        shutil.rmtree(folder)
    lines = ["Serve this model yourself:", *commands(model, adapters, names)]
    console.print("\n".join(lines), soft_wrap=True)
    return answers


def commands(model: Path, adapters: Path, names: Sequence[str]) -> list[str]:
    """Returns commands to try next."""
    name = names[-1]
    return [
        f"  loadout up --model {shlex.quote(str(model))} --http 127.0.0.1:8000",
        f"  loadout register {name} {shlex.quote(str(adapters / name))}",
        f'  loadout generate --adapter {name} --chat "Who are you?"',
    ]
