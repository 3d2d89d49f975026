"""The systems to measure, and the parent's side of each system's process in its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.install import python_of, tcmalloc
from bench.systems.protocol import Done, Job, Spec, encode_job, encode_spec
from bench.systems.worker import Worker


@dataclass(frozen=True, slots=True)
class SystemKind:
    """The start of a system. `module` is bench.systems.<module>; `options` go into its Spec."""

    module: str
    python: Callable[[], str] = lambda: sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    preload: Callable[[], str] = lambda: ""
    options: dict[str, Any] = field(default_factory=dict)


_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in-process, as ours
    "VLLM_NO_USAGE_STATS": "1",
}


def _in_environment(peer: str) -> Callable[[], str]:
    return lambda: str(python_of(peer))


def _tuned() -> str:
    """Returns the libraries that vLLM recommends to preload on x86: Intel's OpenMP and TCMalloc.

    Raises FileNotFoundError, because the loader only warns of a missing library, and vLLM would be
    slower.
    """
    openmp = python_of("vllm").parent.parent / "lib" / "libiomp5.so"
    if not openmp.is_file():
        raise FileNotFoundError(openmp)
    return f"{tcmalloc()}:{openmp}"


def _vllm(preload: Callable[[], str] = lambda: "", **options: Any) -> SystemKind:
    options = {"enforce_eager": True, "enable_lora": True} | options
    return SystemKind("vllm", _in_environment("vllm"), _VLLM_ENVIRONMENT, preload, options)


KINDS = {
    "ours": SystemKind("ours"),
    "ours-grpc": SystemKind("ours_grpc"),
    "vllm": _vllm(),
    "vllm-tuned": _vllm(_tuned),
    "vllm-tuned-no-lora": _vllm(_tuned, enable_lora=False),
    "vllm-compiled": _vllm(enforce_eager=False),
    "peft": SystemKind("peft", _in_environment("peft")),
    "llama-cpp": SystemKind("llama_cpp", _in_environment("llama-cpp")),
}
"""The systems by name, with several configurations of vLLM, the best of which counts."""
WITHOUT_ADAPTERS = {"vllm-tuned-no-lora", "llama-cpp"}
"""Systems that run only the base model here."""

STEP_KINDS = {
    "ours": SystemKind("ours_steps"),
    "llama-cpp": KINDS["llama-cpp"],
    "llama-cpp contexts": SystemKind(
        "llama_cpp", _in_environment("llama-cpp"), options={"has_contexts": True}
    ),
}
"""The systems whose decode steps can be timed one by one. llama.cpp changes adapters in one
context, or has a context for each."""


class Child(Worker):
    """One system in its process, whose output goes to `log_path`. Methods raise WorkerFailed."""

    kinds = KINDS

    def __init__(self, name: str, spec: Spec, log_path: Path) -> None:
        kind = self.kinds[name]
        variables = os.environ | {
            "OMP_NUM_THREADS": str(spec.num_threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **kind.environment,
        }
        if preload := kind.preload():
            variables["LD_PRELOAD"] = preload
        command = [kind.python(), "-m", "bench.systems.serve", kind.module]
        super().__init__(name, command, log_path, variables)
        message = encode_spec(spec) | {"options": spec.options | kind.options}
        self.facts: dict[str, str] = self.ask("load", spec=message)

    def set_resident(self, names: list[str]) -> None:
        self.ask("set_resident", names=names)

    def register(self, name: str, folder: Path) -> None:
        self.ask("register", name=name, folder=str(folder))

    def run(self, job: Job) -> Done:
        """Runs a job, and returns when the system is idle again, so that the next one has the whole
        machine."""
        done = Done(**self.ask("run", job=encode_job(job)))
        self.wait_for_rest()
        return done


class StepChild(Child):
    """One system whose steps are timed, in its process."""

    kinds = STEP_KINDS

    def start(self, job: Job) -> None:
        self.ask("start", job=encode_job(job))

    def step(self, count: int) -> list[float]:
        """Returns the seconds of steps, when the system is idle again."""
        seconds: list[float] = self.ask("step", count=count)
        self.wait_for_rest()
        return seconds

    def outputs(self) -> list[list[int]]:
        found: list[list[int]] = self.ask("outputs")
        return found

    def choices(self, job: Job, outputs: list[list[int]]) -> list[list[int]]:
        """Returns llama.cpp's choices in each place of another system's outputs."""
        found: list[list[int]] = self.ask("choices", job=encode_job(job), outputs=outputs)
        return found
