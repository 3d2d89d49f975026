"""An engine on torch's backend, stepped by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from inference_svc.core import EngineConfig, Request
from inference_svc.engine.build import BuiltEngine, build_engine
from inference_svc.engine.policy.memory_backoff import StepLimit
from inference_svc.engine.transport.messages import Output, Submit
from inference_svc.model.inputs import StepInputs
from inference_svc.store.client import NoStore
from tests.support.inference.results import asking

MAX_TOKENS = 64
PROMPT_TOKENS = 40
"""Prompts are of the first so many tokens of the vocabulary."""


class Engine:
    def __init__(self, folder: Path) -> None:
        config = EngineConfig(
            folder,
            "model",
            max_model_len=256,
            max_sequences=8,
            max_batch_tokens=MAX_TOKENS,
            max_prefill_chunk=MAX_TOKENS,
            page_size=4,
            kv_bytes=1 << 19,
            arena_bytes=1 << 20,
            native_kernels=False,
            num_threads=1,
        )
        self.built: BuiltEngine = build_engine(config, NoStore(), lambda event: None)
        self.engine = self.built.engine
        self.limit: StepLimit = self.engine.scheduler.step_limit
        self.backend: Any = self.engine.runner.backend

    def run(
        self, requests: list[Request], later: Sequence[Request] = (), num_before: int = 0
    ) -> dict[str, list[Output]]:
        """Returns the outputs by request; those `later` come after so many steps."""
        found: dict[str, list[Output]] = {r.request_id: [] for r in (*requests, *later)}
        messages: list[Any] = [Submit(request) for request in requests]
        for _ in range(num_before):
            outputs, go_on = self.engine.step(messages)
            assert go_on, "all have ended before the others come"
            messages = []
            for output in outputs.outputs:
                found[output.request_id].append(output)
        messages += [Submit(request) for request in later]
        go_on = True
        while go_on:
            outputs, go_on = self.engine.step(messages)
            self.engine.check_integrity()
            messages = []
            for output in outputs.outputs:
                found[output.request_id].append(output)
        assert all(outputs[-1].is_last for outputs in found.values())
        assert self.engine.scheduler.states.num_used == 0
        return found


def requests() -> list[Request]:
    """Prompts longer and shorter than a step, of greedy, random, penalised and explained rows."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 3},
        {"seed": 4, "top_p": 0.8, "repetition_penalty": 1.4},
        {"temperature": 0.0, "presence_penalty": 0.5, "logprobs": 2},
        {"seed": 5, "min_tokens": 3, "top_k": 5},
    ]
    return [
        Request(
            f"{number}",
            tuple((7 * index + number) % PROMPT_TOKENS for index in range(3 + 37 * number)),
            arrival_s=time.monotonic(),
            **asking({"max_tokens": 12, "ignore_eos": True, **kind}),
        )
        for number, kind in enumerate(kinds)
    ]


def tokens_of(found: dict[str, list[Output]]) -> dict[str, list[int]]:
    return {name: [t for o in outputs for t in o.token_ids] for name, outputs in found.items()}


@dataclass
class Faulty:
    """A model that `changes` the logits of a step, or raises."""

    transformer: Any
    changes: Callable[[StepInputs, Tensor], None]

    @property
    def weights(self) -> Any:
        return self.transformer.weights

    def forward(self, inputs: StepInputs, *others: Any) -> Tensor:
        logits = self.transformer.forward(inputs, *others)
        self.changes(inputs, logits)
        return logits


def faulty_engine(make: Callable[[], Engine], changes: Any) -> Engine:
    engine = make()
    engine.backend.transformer = Faulty(engine.backend.transformer, changes)
    return engine
