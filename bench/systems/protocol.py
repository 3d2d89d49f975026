"""What a system is told and what it answers: JSON lines, so that each has its own environment.

Standard library only: peers' environments import it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Spec:
    """What a system loads: the same folders and limits for all. `adapters` maps every name that may
    be asked for to its PEFT folder; `options` are a system's own."""

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
    """One request: greedy, exactly `max_tokens` tokens. `adapter` "" is the base model."""

    prompt: list[int]
    max_tokens: int
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """Requests that are all sent at once."""

    asks: list[Ask]


@dataclass(frozen=True, slots=True)
class Done:
    """`seconds` from before the first request was sent until the last token was there, by the
    system's own clock."""

    seconds: float
    num_tokens: int


class System(Protocol):
    """Lives in a child process; its methods are called one after the other."""

    def load(self, spec: Spec) -> dict[str, str]:
        """Makes ready, with no adapter resident. Returns versions and what computes."""
        ...

    def set_resident(self, names: list[str]) -> None:
        """Afterwards these adapters are where they can be computed with, and no others."""
        ...

    def register(self, name: str, folder: str) -> None:
        """Makes one more adapter known."""
        ...

    def run(self, job: Job) -> Done: ...

    def close(self) -> None: ...


def encode_spec(spec: Spec) -> dict[str, Any]:
    return asdict(spec)


def encode_job(job: Job) -> dict[str, Any]:
    return asdict(job)


def decode_job(message: dict[str, Any]) -> Job:
    return Job([Ask(**ask) for ask in message["asks"]])
