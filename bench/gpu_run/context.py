"""What a stage is given: device, sizes, timer, deadline, what earlier stages found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu_run.sizes import EMULATED, REAL, Sizes
from bench.gpu_run.timing import Deadline, FakeTimer, GraphTimer, Timer

Found = dict[str, Any]
"""What a stage has found, as JSON."""


class Missing(Exception):
    """What a stage needs is not there: it says what, and how to get it."""


@dataclass(frozen=True)
class Context:
    """`found` are the results of the stages before by name; `save` keeps what a stage has found so
    far, should it not reach its end. Files go to `out`."""

    is_emulated: bool
    sizes: Sizes
    device: torch.device
    timer: Timer
    deadline: Deadline
    pack: Path
    out: Path
    found: Mapping[str, Found]
    save: Callable[[Found], None]

    @classmethod
    def make(
        cls,
        *,
        is_emulated: bool,
        seconds: float,
        pack: Path,
        out: Path,
        found: Mapping[str, Found],
        save: Callable[[Found], None],
    ) -> Context:
        """Raises Missing where there is no device."""
        if not is_emulated and not torch.cuda.is_available():
            raise Missing("there is no CUDA device: --emulate runs the stages without one")
        return cls(
            is_emulated=is_emulated,
            sizes=EMULATED if is_emulated else REAL,
            device=torch.device("cpu" if is_emulated else "cuda"),
            timer=FakeTimer() if is_emulated else GraphTimer(),
            deadline=Deadline(seconds),
            pack=pack,
            out=out,
            found=found,
            save=save,
        )

    @property
    def ceilings(self) -> Found:
        """What the device's memory, bus and processors give, as stage env measured it. Raises
        Missing without that."""
        ceilings = self.found.get("env", {}).get("ceilings")
        if ceilings is None:
            raise Missing("no ceilings: run the stage env, by which others' shares are reckoned")
        return dict(ceilings)

    @property
    def bytes_per_us(self) -> float:
        """What the device's memory gives, read and written bytes alike."""
        return float(self.ceilings["device_copy_gb_per_s"]) * 1e3
