"""The messages to and from a system: JSON lines, so that each system has its own environment.

This module imports only the standard library, because peers' environments import it.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
"""Clocks of steps by the option `clock`. Processor time of one thread is nearly the same beside
other work; several threads wait for each other, and may spend some of it on that."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Folders and limits for a system to load, the same for all systems. `adapters` maps every name
    that requests may use to its PEFT folder; `options` are a system's own."""

    model_dir: str
    base_model: str
    adapters: dict[str, str]
    max_resident: int
    max_rank: int
    max_sequences: int
    max_len: int
    num_threads: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """One greedy request for exactly `max_tokens` tokens. `adapter` "" is the base model."""

    prompt: list[int]
    max_tokens: int
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """Requests to send at once."""

    asks: list[Ask]


@dataclass(frozen=True, slots=True)
class Done:
    """A job's result. `seconds` are from before the first request until the last token, by the
    system's own clock."""

    seconds: float
    num_tokens: int


class System(Protocol):
    """A system in a child process; its methods are called one after the other."""

    def load(self, spec: Spec) -> dict[str, str]:
        """Loads the model without a resident adapter. Returns versions and the kernels in use."""
        ...

    def set_resident(self, names: list[str]) -> None:
        """Makes these adapters ready to compute, and no others."""
        ...

    def register(self, name: str, folder: str) -> None:
        """Adds an adapter."""
        ...

    def run(self, job: Job) -> Done: ...

    def close(self) -> None: ...


class StepSystem(Protocol):
    """A system in a child process whose decode steps are timed one by one."""

    def load(self, spec: Spec) -> dict[str, str]:
        """Loads the model and all adapters. Returns versions and the kernels in use."""
        ...

    def start(self, job: Job) -> None:
        """Computes all prompts, and some steps to warm up, in place of the job before. Requests
        then decode without an end."""
        ...

    def step(self, count: int) -> list[float]:
        """Computes steps, each with one token of every request. Returns their seconds."""
        ...

    def outputs(self) -> list[list[int]]:
        """Returns the tokens of each request until now."""
        ...

    def close(self) -> None: ...


def encode_spec(spec: Spec) -> dict[str, Any]:
    return asdict(spec)


def encode_job(job: Job) -> dict[str, Any]:
    return asdict(job)


def decode_job(message: dict[str, Any]) -> Job:
    return Job([Ask(**ask) for ask in message["asks"]])
