"""Our engine with a GGUF file, one step after the other."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import torch

from bench.machine import best_kernels
from bench.models import Prepared
from bench.stepper import Stepper
from bench.systems.protocol import CLOCKS, Job, Spec
from inference_svc.model.gguf.expand import expanded


class OursStepsSystem:
    """An engine with the file of the option `gguf`, whose steps this process's thread runs."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def load(self, spec: Spec) -> dict[str, str]:
        torch.set_num_threads(spec.num_threads)
        path = Path(spec.options["gguf"])
        folder = self._stack.enter_context(expanded(path, has_tokenizer=False))
        adapters = {name: Path(each) for name, each in spec.adapters.items()}
        self._stepper = Stepper(
            Prepared(spec.base_model, folder, adapters),
            num_adapters=len(adapters),
            num_requests=spec.max_sequences,
            max_len=spec.max_len,
            num_threads=spec.num_threads,
        )
        self._clock = CLOCKS[spec.options.get("clock", "wall")]
        self._stack.callback(self._stepper.close)
        return {"torch": torch.__version__, "kernels": best_kernels()}

    def start(self, job: Job) -> None:
        digests = {"": "", **self._stepper.digests}
        self._stepper.start([(ask.prompt, digests[ask.adapter]) for ask in job.asks])

    def step(self, count: int) -> list[float]:
        moments = [self._clock()]
        for _ in range(count):
            self._stepper.step()
            moments.append(self._clock())
        return [after - before for before, after in pairwise(moments)]

    def outputs(self) -> list[list[int]]:
        return self._stepper.outputs

    def close(self) -> None:
        self._stack.close()


def make_system() -> OursStepsSystem:
    return OursStepsSystem()
