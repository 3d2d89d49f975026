"""The part of a backend that holds adapters: the arena, the host tier's bytes, and magnitudes that
are being divided."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.memory.tiers import DivideMagnitudes, ResidencyChange
from inference_svc.backends.arena import Arena
from inference_svc.backends.magnitudes import Divided, Magnitudes
from inference_svc.backends.pictures import PictureRows
from inference_svc.core import EngineConfig
from inference_svc.host.device_faults import is_out_of_memory


class AdapterMemory(ABC):
    """The methods of a `Backend` that concern adapters, for one device. It reads no pictures,
    unless a subclass has some."""

    pictures: PictureRows | None = None

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._magnitudes: Magnitudes | None = None

    @property
    def pull_memory(self) -> memoryview:
        return self.arena.pull_memory

    def apply(self, changes: Sequence[ResidencyChange]) -> None:
        for change in changes:
            if isinstance(change, DivideMagnitudes):
                self._magnitudes = self._magnitudes or self._make_magnitudes()
                self._magnitudes.start(change.resident)
            else:
                self._apply(change)

    def _apply(self, change: ResidencyChange) -> None:
        """Makes one change. Where the memory does not suffice it frees unused memory, and tries
        once more.

        Any other error is a bug and ends the engine: no adapter's content causes it. A change has
        offsets, shapes and ranks alone, of headers that `ModelLayout.read_header` and the refusals
        of Loader and SumChecks have checked. An adapter's values are first read by
        `Magnitudes.advance`, where it fails alone, and by steps.
        """
        try:
            self.arena.apply((change,))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            return
        self.free_unused()  # without the error, which holds the allocations
        self.arena.apply((change,))

    def land(self, extents: Sequence[Extent]) -> None:
        self.arena.land(extents)

    def pop_completed_copies(self) -> list[str]:
        return self.arena.pop_completed_copies()

    @property
    def is_dividing(self) -> bool:
        """Whether magnitudes are left to be divided."""
        return self._magnitudes is not None and self._magnitudes.has_jobs

    def divide_magnitudes(self) -> list[Divided]:
        return [] if self._magnitudes is None else self._magnitudes.advance()

    @abstractmethod
    def _make_magnitudes(self) -> Magnitudes:
        """Makes the object that divides magnitudes, when an adapter first has any. It reads the
        base's weights: `free_memory` lets go of it with them."""

    @abstractmethod
    def free_unused(self) -> None:
        """See `Backend.free_unused`."""


def allocate_arena(config: EngineConfig, layout: ModelLayout) -> Arena:
    """Allocates the adapters' memory. Raises ValueError if the system does not give it the host
    tier's."""
    device = torch.device(config.device)
    has_landing = device.type != "cpu" and config.num_ranks > 1
    try:
        return Arena(
            layout,
            config.arena_bytes,
            config.max_loras,
            config.max_lora_rank,
            device,
            config.host_bytes,
            num_mixes=config.max_sequences,
            has_landing=has_landing,
        )
    except OSError as error:
        setting = "--adapter-memory" if has_landing else "--host-memory"
        raise ValueError(f"{setting}: {error.strerror}") from error
