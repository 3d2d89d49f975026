"""The engine of `bench.step_breakdown`: its steps are called one by one, in the caller's thread."""

from __future__ import annotations

import queue
import time
from typing import Any

from bench.memory_store import MemoryStore
from bench.models import RANK, Prepared, arena_bytes, kv_bytes, prompts
from bench.roofline import THREADS
from inference_svc.core import EngineConfig, Request, SamplingParams
from inference_svc.engine.build import BuiltEngine, build_engine
from inference_svc.engine.messages import LayoutAccepted, Submit

NUM_REQUESTS, NUM_IN, MAX_LEN = 16, 64, 512
WARM_UP_STEPS = 8


class Stepper:
    """An engine whose steps are called from here, with requests that decode and do not end."""

    def __init__(self, prepared: Prepared, num_adapters: int) -> None:
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        store = MemoryStore()
        folders = list(prepared.adapters.values())[:num_adapters]
        digests = [store.register(folder) for folder in folders]
        config = EngineConfig(
            prepared.model_dir,
            prepared.name,
            dtype="bfloat16",
            max_sequences=NUM_REQUESTS,
            max_model_len=MAX_LEN,
            kv_bytes=kv_bytes(prepared.name, NUM_REQUESTS * MAX_LEN),
            arena_bytes=arena_bytes(prepared.name, max(1, num_adapters)),
            max_loras=max(1, num_adapters),
            max_lora_rank=RANK,
            adapter_wait_s=600.0,
            prefix_cache=False,
            num_threads=THREADS,
        )
        self.built: BuiltEngine = build_engine(config, store, self._inbox.put)
        self.built.place_threads()
        self._inbox.put(LayoutAccepted(store.accept_layout(self.built.layout)))
        sampling = SamplingParams(max_tokens=MAX_LEN, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts(NUM_REQUESTS, NUM_IN, prepared.vocab)):
            digest = digests[index % num_adapters] if num_adapters else ""
            request = Request(
                f"{index}", tuple(prompt), sampling, digest=digest, arrival_s=time.monotonic()
            )
            self._inbox.put(Submit(request))
        while not self._all_decode():
            self.step()
        for _ in range(WARM_UP_STEPS):
            self.step()

    def step(self) -> None:
        messages = []
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        self.built.engine.step(messages)

    @property
    def context(self) -> float:
        """Mean tokens that the next step's rows attend to."""
        running = self.built.engine.scheduler.running
        return NUM_IN + sum(s.num_output for s in running) / len(running)

    def _all_decode(self) -> bool:
        running = self.built.engine.scheduler.running
        return len(running) == NUM_REQUESTS and all(s.num_output > 0 for s in running)

    def close(self) -> None:
        self.built.puller.close()
