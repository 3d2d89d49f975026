"""The plan that the stage hands to its program, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.gpu_run.services.figures import Round
from bench.gpu_run.sizes import ServiceSizes


@dataclass(frozen=True)
class Plan:
    """What the program starts and measures, until `end_s` of the monotonic clock, which all
    processes share. `dtype` is the weights' name in torch."""

    config: dict[str, Any]
    dtype: str
    rank: int
    device: str
    num_adapters: int
    inference_flags: tuple[str, ...]
    rounds: tuple[Round, ...]
    end_s: float

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Plan:
        facts = json.loads(path.read_text())
        rounds = tuple(Round(**each) for each in facts["rounds"])
        return cls(**facts | {"rounds": rounds, "inference_flags": (*facts["inference_flags"],)})


def rounds_of(sizes: ServiceSizes) -> tuple[Round, ...]:
    """Returns the rounds: many streams without adapters, with one, and with all, at first in the
    store only; one stream; few streams with long prompts."""
    prompt, new = sizes.prompt_tokens, sizes.new_tokens
    found = []
    for streams in sizes.streams:
        found += [Round(streams, adapters, prompt, new) for adapters in (0, 1)]
        for is_cold in (True, False):
            found.append(Round(streams, sizes.adapters, prompt, new, is_cold))
    found += [Round(1, adapters, prompt, new) for adapters in (0, 1)]
    few = sizes.long_streams
    found += [Round(few, adapters, sizes.long_prompt_tokens, new) for adapters in (0, few)]
    return tuple(found)
