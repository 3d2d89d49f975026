"""Our engine in a thread of this process, over a store in memory."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from bench.engine import BenchEngine
from bench.models import arena_bytes
from bench.store.memory_store import MemoryStore
from bench.systems.protocol import Done, Job, Spec
from inference_svc.core import EngineConfig


class OursSystem:
    def load(self, spec: Spec) -> dict[str, str]:
        self._store = MemoryStore()
        self._digests = {n: self._store.register(Path(f)) for n, f in spec.adapters.items()}
        config = EngineConfig(
            Path(spec.model_dir),
            spec.base_model,
            dtype="bfloat16",
            max_sequences=spec.max_sequences,
            max_model_len=spec.max_len,
            kv_bytes=2 << 30,
            arena_bytes=arena_bytes(spec.base_model, max(spec.max_resident, 1)),
            max_loras=max(spec.max_resident, 1),
            max_lora_rank=spec.max_rank,
            prefetch=False,  # it would reload adapters that `set_resident` has unloaded
            prefix_cache=False,
            num_threads=spec.num_threads,
        )
        self._engine = BenchEngine(config, self._store)
        for digest in self._digests.values():
            self._store.compile(digest)
        return {"torch": torch.__version__, "kernels": self._engine.kernels}

    def register(self, name: str, folder: str) -> None:
        self._digests[name] = self._store.register(Path(folder))
        self._store.compile(self._digests[name])

    def set_resident(self, names: list[str]) -> None:
        self._engine.set_resident(self._digests[name] for name in names)

    def run(self, job: Job) -> Done:
        began_s = time.perf_counter()
        tracks = [
            self._engine.submit(ask.prompt, ask.max_tokens, self._digests.get(ask.adapter, ""))
            for ask in job.asks
        ]
        self._engine.wait(tracks)
        seconds = time.perf_counter() - began_s
        for track in tracks:
            if track.error is not None:
                raise track.error
        num_tokens = sum(track.num_tokens for track in tracks)
        assert num_tokens == sum(ask.max_tokens for ask in job.asks)
        return Done(seconds, num_tokens)

    def close(self) -> None:
        self._engine.stop()


def make_system() -> OursSystem:
    return OursSystem()
