"""The inputs of a stage: device, sizes, timer, deadline, results of earlier stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu_run.sizes import EMULATED, REAL, Sizes
from bench.gpu_run.timing import Deadline, FakeTimer, GraphTimer, Timer

Found = dict[str, Any]
"""The results of a stage, as JSON."""


class Missing(Exception):
    """Something that a stage needs is missing; the message names it, and the way to get it."""


@dataclass(frozen=True)
class Context:
    """Inputs of a stage. `found` has the earlier stages' results by name; `save` keeps a stage's
    results so far, in case it does not reach its end. Files go to `out`."""

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
        """Makes the context for the device or its emulation. Raises Missing without a device."""
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
        """The rates of the device's memory, bus and processors, as measured by stage env. Raises
        Missing without them."""
        ceilings = self.found.get("env", {}).get("ceilings")
        if ceilings is None:
            raise Missing("no ceilings: run the stage env first, which measures them")
        return dict(ceilings)

    @property
    def bytes_per_us(self) -> float:
        """The rate at which a kernel reads the device's memory, which is higher than a copy's."""
        return float(self.ceilings["device_read_gb_per_s"]) * 1e3

    @property
    def flops_per_us(self) -> float:
        """The rate of a large product."""
        return float(self.ceilings["product_tflop_per_s"]) * 1e6
