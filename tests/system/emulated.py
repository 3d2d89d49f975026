"""An engine on an emulated GPU, as tests/support/kernels/worker.py runs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from bench.gpu_run.emulation import emulated
from inference_svc.core import EngineConfig
from inference_svc.engine.transport.messages import LayoutAccepted, SetVocabulary
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.grammars.grammar import Grammar
from inference_svc.grammars.vocabulary import Vocabulary
from inference_svc.pictures.prompt import PromptPicture, Run
from inference_svc.pictures.sizes import Size
from servicekit.shared_memory import SharedBytes
from tests.system.engines import CompilingStore, Running

Plain: TypeAlias = tuple[bytes, bytes, Size, int, tuple[Run, ...]]
"""A picture of a prompt, with its pixels as bytes: else it has the fields of `PromptPicture`."""
Asked: TypeAlias = tuple[str, Sequence[int], int] | tuple[str, Sequence[int], int, Sequence[Plain]]
"""A greedy request: an adapter, "" for the base model, a prompt, how many tokens, and pictures."""
Served: TypeAlias = tuple[list[int], int]
"""The tokens of an answer, and how many of the prompt's were known already."""


def generate(
    model_dir: Path, adapters: dict[str, Path], rounds: list[list[Asked]], changes: dict[str, Any]
) -> list[list[Served]]:
    """Returns the answers of rounds of requests, which run together."""
    store = CompilingStore()
    digests = {name: store.register(folder) for name, folder in adapters.items()}
    config = EngineConfig(model_dir, "model", num_threads=1, record_steps=False, **changes)
    with emulated():
        engine = EngineThread(config, store)
        running = Running(engine, store, digests)
        engine.start(running.on_outputs)
        try:
            engine.send(LayoutAccepted(store.register_layout(engine.layout)))
            assert engine.built.engine.runner.backend.kernels == "triton"
            return [_serve(running, number, each) for number, each in enumerate(rounds)]
        finally:
            engine.stop()
            engine.built.engine.check_integrity()


def _serve(running: Running, number: int, requests: list[Asked]) -> list[Served]:
    names = [f"{number}-{index}" for index in range(len(requests))]
    for name, (adapter, prompt, count, *more) in zip(names, requests, strict=True):
        pictures = tuple(map(_shared, more[0])) if more else ()
        running.submit(name, prompt, adapter, max_tokens=count, pictures=pictures)
    found = []
    for name in names:
        tokens, last = running.result(name)
        assert last.error is None, last.error
        assert last.usage is not None
        found.append((tokens, last.usage.cached_prompt_tokens))
    return found


def _shared(plain: Plain) -> PromptPicture:
    digest, pixels, *others = plain
    return PromptPicture(digest, SharedBytes.of("loadout-pixels", pixels), *others)


def structured(
    model_dir: Path, vocabulary: Vocabulary, grammars: list[Grammar], changes: dict[str, Any]
) -> list[list[int]]:
    """Returns random answers of these forms, and of one request without, which run together."""
    store = CompilingStore()
    config = EngineConfig(model_dir, "model", num_threads=1, record_steps=False, **changes)
    with emulated():
        engine = EngineThread(config, store)
        running = Running(engine, store, {})
        engine.start(running.on_outputs)
        try:
            engine.send(SetVocabulary(vocabulary))
            forms: list[Grammar | None] = [*grammars, None]
            for index, grammar in enumerate(forms):
                options = {"temperature": 1.0, "seed": index, "max_tokens": 40}
                running.submit(f"{index}", [5, 6], grammar=grammar, ignore_eos=False, **options)
            return [running.result(f"{index}")[0] for index in range(len(forms))]
        finally:
            engine.stop()
            engine.built.engine.check_integrity()


OPERATIONS = {"generate": generate, "structured": structured}
