"""Ranks of one process, a thread each, which exchange through its memory; and engines of ranks."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from inference_svc.core import EngineConfig, Request, SamplingParams
from inference_svc.engine.build import build_engine, describe
from inference_svc.engine.engine import Engine
from inference_svc.engine.policy.memory_backoff import StepLimit
from inference_svc.engine.transport.messages import Submit
from inference_svc.store.client import NoStore, RemoteNoStore

T = TypeVar("T")


@dataclass
class Shared:
    """The values that so many ranks exchange."""

    values: list[Tensor | None]
    barrier: threading.Barrier

    @classmethod
    def of(cls, count: int) -> Shared:
        return cls([None] * count, threading.Barrier(count))

    def all(self, index: int, x: Tensor) -> list[Tensor]:
        self.values[index] = x.clone()
        self.barrier.wait(60)
        found = [each for each in self.values if each is not None]
        self.barrier.wait(60)
        return found


@dataclass(frozen=True)
class ThreadExchange:
    """An `Exchange` of the rank with this index in a stage of `count` ranks, of several stages."""

    index: int
    stage: int
    of_stage: Shared
    of_all: Shared
    sent: defaultdict[tuple[int, int, int], SimpleQueue[Tensor]]
    seconds: float = 0.0
    name: str = "threads"

    def sum(self, x: Tensor) -> None:
        _sum(x, self.of_stage.all(self.index, x))

    def sum_stages(self, x: Tensor) -> None:
        count = len(self.of_stage.values)
        _sum(x, self.of_all.all(self.stage * count + self.index, x))

    def side_by_side(self, x: Tensor) -> Tensor:
        return torch.cat(self.of_stage.all(self.index, x), dim=1)

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self.of_stage.all(self.index, x)[0])

    def broadcast_stages(self, x: Tensor) -> None:
        count = len(self.of_stage.values)
        x.copy_(self.of_all.all(self.stage * count + self.index, x)[0])

    def send(self, x: Tensor, stage: int) -> None:
        self.sent[self.index, self.stage, stage].put(x.clone())

    def receive(self, x: Tensor, stage: int) -> None:
        found = self.sent[self.index, stage, self.stage].get(timeout=60)
        assert found.shape == x.shape
        x.copy_(found)


def _sum(x: Tensor, terms: list[Tensor]) -> None:
    x.copy_(torch.stack([each.double() for each in terms]).sum(dim=0))


def exchanges(count: int, num_stages: int = 1) -> list[ThreadExchange]:
    """Returns the exchanges of all ranks, stage by stage."""
    stages, every = [Shared.of(count) for _ in range(num_stages)], Shared.of(count * num_stages)
    sent: defaultdict[tuple[int, int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)
    return [
        ThreadExchange(index, stage, of_stage, every, sent)
        for stage, of_stage in enumerate(stages)
        for index in range(count)
    ]


def on_ranks(count: int, run: Callable[[int], T]) -> Sequence[T]:
    """Runs a function for each rank at the same time; returns the results in their order."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def no_store(publish: Callable[[object], None]) -> RemoteNoStore:
    """Makes the store of a rank that pulls nothing."""
    return RemoteNoStore()


def save_model(folder: Path) -> Path:
    """Saves a small Llama of random weights; returns its folder."""
    # Not in the processes of ranks, which import this module for their stores.
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.3))
    model.save_pretrained(folder)
    return folder


def config_of(model_dir: Path, count: int, **changes: Any) -> EngineConfig:
    """Returns the settings of a small engine of so many ranks; `changes` are of EngineConfig."""
    config = EngineConfig(
        model_dir,
        "model",
        max_model_len=128,
        max_sequences=4,
        max_batch_tokens=32,
        max_prefill_chunk=7,
        page_size=4,
        kv_bytes=1 << 18,
        arena_bytes=1 << 18,
        native_kernels=True,
        num_threads=1,
        tensor_parallel=count,
    )
    return replace(config, **changes)


@dataclass
class Answers:
    """The tokens of requests, in their order, and how the engine came to them."""

    tokens: list[list[int]]
    num_cached: int
    num_preemptions: int


NUM_TOKENS = 64
NUM_PAGES = 64
"""Too few for four requests of 64 tokens behind their prompts."""


def answers_of_ranks(model_dir: Path, count: int, **changes: Any) -> Answers:
    """Returns greedy tokens of more requests than run at once, in chunks of 7 tokens, of pages that
    do not suffice, so that some are preempted; then of prompts that begin like earlier ones. The
    first long steps are computed in parts."""
    config = config_of(model_dir, count, state_pages=2, **changes)
    stages = describe(config, 0).every_stage
    page_bytes = config.page_size * 4 * max(each.kv_elements_per_token for each in stages)
    config = replace(config, kv_bytes=NUM_PAGES * page_bytes)
    built = build_engine(config, NoStore(), lambda event: None, no_store)
    try:
        engine = built.engine
        # As if the memory did not suffice for a step that is planned already, again and again.
        engine.runner._limit = limit = StepLimit(config.max_batch_tokens, config.max_sequences)
        limit.ran_out(10)
        prompts = [tuple(range(n + 1, 3 * n + 16)) for n in range(5)]
        tokens = generate(engine, prompts)[0]
        later, num_cached = generate(engine, [(*prompt, 5, 6) for prompt in prompts[-2:]], 8)
        return Answers(tokens + later, num_cached, engine.scheduler.num_preemptions)
    finally:
        built.close()


def generate(
    engine: Engine, prompts: Sequence[tuple[int, ...]], num_tokens: int = NUM_TOKENS
) -> tuple[list[list[int]], int]:
    """Returns the tokens that follow each prompt, and how many of prompts were in the cache."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    found: list[list[int]] = [[] for _ in prompts]
    messages: list[Any] = [
        Submit(Request(str(n), prompt, params)) for n, prompt in enumerate(prompts)
    ]
    num_cached, go_on = 0, True
    while go_on:
        step, go_on = engine.step(messages)
        messages = []
        for output in step.outputs:
            found[int(output.request_id)] += output.token_ids
            num_cached += output.usage.cached_prompt_tokens if output.usage else 0
    return found, num_cached
