"""The memory budget: the bytes that the engine will take, line by line, and whether they fit.

The one place that adds them up; `memory_fit` chooses sizes by it. Checked before anything large is
allocated, so that a server that starts does not run out later.
"""

from __future__ import annotations

import logging
from dataclasses import astuple, dataclass, replace

from inference_svc.backends.base import BackendFactory, DeviceMemory, MemoryNeeds, num_kv_pages
from inference_svc.core import EngineConfig
from inference_svc.engine.compute.routed_pages import routed_pages_bytes
from inference_svc.errors import DeviceFull
from inference_svc.host.memory import available_bytes, resident_bytes
from inference_svc.model.description import Decoder, Rank

logger = logging.getLogger(__name__)

IN_USE = "in use"
DRIVER_BYTES = 3 << 29
"""The memory that the driver, and a context of ours, may take of a device that no other program
uses."""
NAME_WIDTH = 14
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Line:
    """`change` names the settings that make it smaller; empty: none does."""

    name: str
    num_bytes: int
    change: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """The lines of one memory, "device" or "host", and its limit. `limit_bytes` None: unknown."""

    place: str
    lines: tuple[Line, ...]
    limit_bytes: int | None
    limit_change: str

    @property
    def needed_bytes(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    def bytes_of(self, name: str) -> int:
        return sum(line.num_bytes for line in self.lines if line.name == name)

    def check(self) -> None:
        """Raises ValueError with all lines when the lines exceed the limit: DeviceFull if they
        would not without other programs."""
        if self.limit_bytes is None or self.needed_bytes <= self.limit_bytes:
            return
        missing = self.needed_bytes - self.limit_bytes
        message = f"the {self.place} memory is too small by {human(missing)}"
        others_bytes = max(0, self.bytes_of(IN_USE) - DRIVER_BYTES)
        if missing <= others_bytes:
            used_bytes = self.bytes_of(IN_USE)
            raise DeviceFull(
                f"{message}, and other programs use {human(used_bytes)} of it: this server needs "
                f"{human(self.needed_bytes - used_bytes)}, and "
                f"{human(max(0, self.limit_bytes - used_bytes))} are free\n{self}"
            )
        raise ValueError(f"{message}\n{self}")

    def __str__(self) -> str:
        """Returns a table: a row for each line, their sum, the limit."""
        total = Line("needed", self.needed_bytes)
        limit = Line("limit", self.limit_bytes or 0, self.limit_change)
        rows = (*self.lines, total, limit)
        width = max(NAME_WIDTH, *(len(row.name) for row in rows))
        return "\n".join(
            f"  {row.name:<{width}} {row.num_bytes:>16,} bytes {human(row.num_bytes):>11}"
            f"  {row.change}".rstrip()
            for row in rows
        )


def human(num_bytes: int) -> str:
    """Returns a text such as "1.5 GiB"."""
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {UNITS[unit]}" if unit == 0 else f"{size:.1f} {UNITS[unit]}"


def check_budgets(config: EngineConfig, decoder: Decoder, backend: BackendFactory) -> Budget:
    """Returns the device's budget. Raises ValueError with the arithmetic of a budget that does not
    fit."""
    memory = backend.device_memory(config)
    if memory is None:
        needs = local_needs(config, decoder, backend)
    else:
        needs = backend.memory_needs(config, decoder)
    budgets = plan_budgets(config, needs, memory, routed_bytes(config, decoder))
    for budget in budgets:
        budget.check()
        logger.info("memory of the %s:\n%s", budget.place, budget)
    return budgets[0]


def check_device_budget(config: EngineConfig, decoder: Decoder, backend: BackendFactory) -> None:
    """Checks the budget of another rank's device; raises as `check_budgets`. The host's is of all
    ranks together."""
    memory = backend.device_memory(config)
    if memory is not None:
        plan_budgets(config, backend.memory_needs(config, decoder), memory)[0].check()


def check_host_budget(config: EngineConfig) -> None:
    """Checks the host's budget of ranks that have a device each, and check its memory themselves;
    raises as `check_budgets`."""
    of_host = plan_budgets(config, MemoryNeeds(0, 0), DeviceMemory(0, 0))[1]
    of_host.check()


def local_needs(config: EngineConfig, decoder: Decoder, backend: BackendFactory) -> MemoryNeeds:
    """Returns the needs of this machine's ranks together, of which `decoder` is the first one's
    part: of each stage the needs of its first rank, and as often as it has others here those of
    another."""
    kinds = [divmod(index, config.tensor_parallel) for index in config.local_ranks]
    places = [(stage, rank == 0) for stage, rank in kinds]
    needs = {
        (stage, is_first): backend.memory_needs(config, part if is_first else _of_other_rank(part))
        for stage, is_first in set(places)
        for part in (decoder.every_stage[stage],)
    }
    first, *others = (needs[place] for place in places)
    for each in others:
        first = first.plus(each)
    return first


def most_needs(config: EngineConfig, decoder: Decoder, backend: BackendFactory) -> MemoryNeeds:
    """Returns the needs of the rank that needs the most of a device, where each has one; `decoder`
    is the first one's part: no rank of a stage needs more than its first one."""
    needs = (backend.memory_needs(config, each) for each in decoder.every_stage)
    return max(needs, key=lambda each: sum(astuple(each)))


def _of_other_rank(decoder: Decoder) -> Decoder:
    """Returns the part of another rank of the same stage, as large as the first one's but for the
    tower."""
    return decoder if decoder.rank is None else replace(decoder, rank=Rank(1, decoder.rank.count))


def routed_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory for keeping the experts that the tokens of all pages have chosen."""
    num_pages = num_kv_pages(config, decoder)
    return routed_pages_bytes(decoder.expert_layers, num_pages, config.page_size)


def plan_budgets(
    config: EngineConfig, needs: MemoryNeeds, memory: DeviceMemory | None, num_routed_bytes: int = 0
) -> tuple[Budget, ...]:
    """Returns the device's budget first; where the device has `memory` of its own, the host's
    follows. `needs` are of the ranks that share the memory: on CPUs all of this machine, see
    `local_needs`. `num_routed_bytes`: see `routed_bytes`. Nothing is allocated. Ranks with a device
    each have a budget each, and the host's is of all ranks of this machine."""
    count = len(config.local_ranks) if memory is None else 1
    on_device: tuple[Line, ...] = (
        Line("weights", needs.weights_bytes, "a smaller model or --dtype"),
        Line("kv_pages", count * config.kv_bytes, "--kv-memory"),
        *_used(Line("recurrent_states", needs.recurrent_bytes, "--max-sequences, --stored-states")),
        Line("arena", count * config.arena_bytes, "--adapter-memory"),
        Line(
            "workspace",
            needs.workspace_bytes,
            "--max-batch-tokens, --max-sequences, --max-model-len, --num-threads",
        ),
    )
    on_device += _used(Line("graphs", needs.graphs_bytes, "--max-sequences"))
    on_device += _used(Line("libraries", needs.libraries_bytes))
    num_ranks = len(config.local_ranks)
    has_landing = memory is not None and config.num_ranks > 1
    landing_bytes = num_ranks * config.arena_bytes if has_landing else 0
    on_host = (
        Line("host_tier", config.host_bytes, "--host-memory"),
        *_used(Line("landing", landing_bytes, "--adapter-memory")),
        Line("tokenizer", config.tokenizer_bytes),
        *_used(Line("routed_experts", num_routed_bytes, "--kv-memory")),
        *_used(Line("image_uploads", config.upload_bytes, "--prompt-image-memory")),
        # The last one, and all of it is there already.
        Line("process", resident_bytes() + config.frontend_bytes),
    )
    if memory is None:
        limit_bytes, change = config.memory_limit_bytes, "memory-limit"
        lines = (*on_device, *_used(_of_processes(count - 1)), *on_host)
        return (_host_budget(lines, limit_bytes, change),)
    if num_ranks > 1:
        others = Line("other_ranks", (num_ranks - 1) * resident_bytes(), "--tensor-parallel")
        on_host = (others, *on_host)
    limit_bytes = config.memory_limit_bytes or memory.total_bytes
    in_use_bytes = memory.total_bytes - memory.free_bytes
    in_use = Line(IN_USE, in_use_bytes, "other programs on the device, without the driver's part")
    change = "memory-limit, or a larger device"
    return (
        Budget("device", (*on_device, in_use), limit_bytes, change),
        _host_budget(on_host, config.host_limit_bytes, "host-memory-limit"),
    )


def _of_processes(count: int) -> Line:
    """Returns a line of so many other ranks' processes."""
    return Line("other_ranks", count * resident_bytes(), "--tensor-parallel, --pipeline-parallel")


def _used(line: Line) -> tuple[Line, ...]:
    return (line,) if line.num_bytes > 0 else ()


def _host_budget(lines: tuple[Line, ...], limit_bytes: int, change: str) -> Budget:
    """Without a limit it is this process's memory and the free memory."""
    if limit_bytes:
        return Budget("host", lines, limit_bytes, change)
    left_bytes = available_bytes()
    limit = None if left_bytes is None else left_bytes + lines[-1].num_bytes
    change = "the free memory of the machine and its container"
    return Budget("host", lines, limit, change)
