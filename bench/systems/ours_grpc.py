"""Our system as in use: both services in their own processes, called over gRPC."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.services import Services, Wanted
from bench.systems.protocol import Ask, Done, Job, Spec
from loadout.aio import AsyncClient


class OursGrpcSystem:
    def load(self, spec: Spec) -> dict[str, str]:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        wanted = Wanted(
            Path(spec.model_dir),
            spec.base_model,
            max_resident=max(spec.max_resident, 1),
            max_rank=spec.max_rank,
            max_sequences=spec.max_sequences,
            max_len=spec.max_len,
            num_threads=spec.num_threads,
            prefix_cache=False,
        )
        self._services = self._stack.enter_context(Services(wanted, folder))
        for name, adapter in spec.adapters.items():
            self.register(name, adapter)
        self._runner = self._stack.enter_context(asyncio.Runner())
        self._client = self._runner.run(_connect(self._services.inference))
        return {"kernels": self._services.kernels}

    def register(self, name: str, folder: str) -> None:
        self._services.register(name, Path(folder))

    def set_resident(self, names: list[str]) -> None:
        self._services.set_resident(names)

    def run(self, job: Job) -> Done:
        return self._runner.run(self._run(job))

    async def _run(self, job: Job) -> Done:
        began_s = time.perf_counter()
        counts = await asyncio.gather(*(self._generate(ask) for ask in job.asks))
        return Done(time.perf_counter() - began_s, sum(counts))

    async def _generate(self, ask: Ask) -> int:
        stream = self._client.generate(
            ask.prompt,
            adapter=ask.adapter,
            max_tokens=ask.max_tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        count = sum([len(chunk.token_ids) async for chunk in stream])
        assert count == ask.max_tokens
        return count

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._stack.close()


async def _connect(address: str) -> AsyncClient:
    return AsyncClient(inference=address, timeout_s=None)


def make_system() -> OursGrpcSystem:
    return OursGrpcSystem()
