"""An engine whose steps the caller's thread runs one by one."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.kernels.roofline import THREADS
from bench.models import RANK, Prepared, arena_bytes, kv_bytes, prompts
from bench.store.memory_store import MemoryStore
from inference_svc.core import EngineConfig, Request, SamplingParams
from inference_svc.engine.build import BuiltEngine, build_engine
from inference_svc.engine.transport.messages import Cancel, LayoutAccepted, Submit
from inference_svc.grammars.grammar import Grammar
from inference_svc.store.client import RemoteNoStore

NUM_REQUESTS, NUM_IN, MAX_LEN = 16, 64, 512
WARM_UP_STEPS = 8


class Stepper:
    """An engine whose steps the caller runs, with requests that decode and do not end."""

    def __init__(
        self,
        prepared: Prepared,
        num_adapters: int,
        num_requests: int = NUM_REQUESTS,
        arena: int = 0,
        max_len: int = MAX_LEN,
        quantize: str = "none",
        num_threads: int = THREADS,
        num_ranks: int = 1,
        num_stages: int = 1,
    ) -> None:
        """Builds the engine. `arena` is the bytes for adapters; by default it fits adapters on all
        linear layers. `quantize` is the type of the base's weights. Several ranks, with
        `num_threads` each, in so many stages of `num_ranks`, have no adapters, which lie in this
        process."""
        assert num_ranks * num_stages == 1 or not num_adapters
        self._num_requests = num_requests
        self._vocab, self._max_len = prepared.vocab, max_len
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        store = MemoryStore()
        names = list(prepared.adapters)[:num_adapters]
        self.digests = {name: store.register(prepared.adapters[name]) for name in names}
        config = EngineConfig(
            prepared.model_dir,
            prepared.name,
            dtype="bfloat16",
            quantize=quantize,
            max_sequences=num_requests,
            max_model_len=max_len,
            kv_bytes=kv_bytes(prepared.name, num_requests * max_len),
            arena_bytes=arena or arena_bytes(prepared.name, max(1, num_adapters)),
            max_loras=max(1, num_adapters),
            max_lora_rank=RANK,
            adapter_wait_s=600.0,
            prefix_cache=False,
            num_threads=num_threads,
            tensor_parallel=num_ranks,
            pipeline_parallel=num_stages,
        )
        self.built: BuiltEngine = build_engine(config, store, self._inbox.put, _no_store)
        self.built.place_threads()
        layouts = (self.built.layout, *self.built.other_layouts)
        layout_id, *others = (store.accept_layout(each) for each in layouts)
        self._inbox.put(LayoutAccepted(layout_id, tuple(others)))
        for digest in self.digests.values():  # now, and not in the pull threads during steps
            store.compile(digest)
        self.restart()

    def restart(self, *, uses_adapters: bool = True) -> None:
        """Starts again with requests of the adapters in turn, or of the base model, and steps until
        all of them decode."""
        digests = list(self.digests.values()) if uses_adapters and self.digests else [""]
        found = prompts(self._num_requests, NUM_IN, self._vocab)
        self.start([(each, digests[i % len(digests)]) for i, each in enumerate(found)])

    def start(
        self,
        asks: Sequence[tuple[list[int], str]],
        grammar: Grammar | None = None,
        temperature: float = 0.0,
    ) -> None:
        """Starts again with requests of prompts and adapters, by digest or "" for the base model,
        and steps until all of them decode. The answers have the form of the grammar."""
        self._cancel_all()
        sampling = SamplingParams(
            max_tokens=self._max_len, temperature=temperature, ignore_eos=True
        )
        now_s = time.monotonic()
        self._names = [f"{index} at {now_s}" for index in range(len(asks))]
        for name, (prompt, digest) in zip(self._names, asks, strict=True):
            request = Request(
                name, tuple(prompt), sampling, digest, arrival_s=now_s, grammar=grammar
            )
            self._inbox.put(Submit(request))
        while not self._all_decode():
            self.step()
        for _ in range(WARM_UP_STEPS):
            self.step()

    @property
    def outputs(self) -> list[list[int]]:
        """The tokens of each request of `start` until now."""
        running = self.built.engine.scheduler.running
        found = {each.request.request_id: each.token_ids[each.num_prompt :] for each in running}
        return [found[name] for name in self._names]

    def send(self, message: Any) -> None:
        """Has the next step take a message."""
        self._inbox.put(message)

    def step(self) -> None:
        messages = []
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        self.built.engine.step(messages)

    def time_prompt(self, prompt: list[int]) -> float:
        """Returns the seconds of the steps that compute a prompt of the base model."""
        engine, sampling = self.built.engine, SamplingParams(max_tokens=1, temperature=0.0)
        self._cancel_all()
        now_s = time.monotonic()
        self._inbox.put(Submit(Request(f"{now_s}", tuple(prompt), sampling, arrival_s=now_s)))
        began_s = time.perf_counter()
        self.step()
        while engine.scheduler.running:
            self.step()
        return time.perf_counter() - began_s

    def _cancel_all(self) -> None:
        for sequence in self.built.engine.scheduler.running:
            self._inbox.put(Cancel(sequence.request.request_id))
        self.step()

    @property
    def context(self) -> float:
        """Mean tokens that the next step's rows attend to."""
        running = self.built.engine.scheduler.running
        return NUM_IN + sum(s.num_output for s in running) / len(running)

    def _all_decode(self) -> bool:
        running = self.built.engine.scheduler.running
        return len(running) == len(self._names) and all(s.num_output > 0 for s in running)

    def close(self) -> None:
        self.built.close()


def _no_store(on_update: Callable[[Any], None]) -> RemoteNoStore:
    return RemoteNoStore()
