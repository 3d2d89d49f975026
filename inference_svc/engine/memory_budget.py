"""The memory budget: what the engine will take, line by line, and whether it fits.

Checked before anything large is allocated, so that a server that starts never runs out later.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from inference_svc.engine.config import EngineConfig
from inference_svc.host.memory import available_bytes, resident_bytes
from inference_svc.model.geometry import ModelGeometry
from inference_svc.model.weights import largest_projection_bytes, weights_bytes
from kernels.attention.native_memory import AttentionShape

log = logging.getLogger(__name__)

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Line:
    """`change` says what makes it smaller; empty: nothing does."""

    name: str
    num_bytes: int
    change: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """What lies in one memory, "device" or "host", and its limit. `limit_bytes` None: unknown."""

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
        """Raises ValueError with the whole arithmetic when the lines exceed the limit."""
        if self.limit_bytes is None or self.needed_bytes <= self.limit_bytes:
            return
        missing = self.needed_bytes - self.limit_bytes
        raise ValueError(
            f"the {self.place} memory does not suffice: {human(missing)} are missing\n{self}"
        )

    def __str__(self) -> str:
        """A table: a line each, their sum, the limit."""
        total = Line("needed", self.needed_bytes)
        limit = Line("limit", self.limit_bytes or 0, self.limit_change)
        rows = (*self.lines, total, limit)
        return "\n".join(
            f"  {row.name:<10} {row.num_bytes:>16,} bytes {human(row.num_bytes):>11}"
            f"  {row.change}".rstrip()
            for row in rows
        )


def human(num_bytes: int) -> str:
    """Such as "1.5 GiB"."""
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {UNITS[unit]}" if unit == 0 else f"{size:.1f} {UNITS[unit]}"


def check_budgets(config: EngineConfig, geometry: ModelGeometry, *, is_native: bool) -> Budget:
    """The budget of the device. Raises ValueError with the arithmetic of one that does not fit."""
    budgets = plan_budgets(config, geometry, is_native=is_native)
    for budget in budgets:
        budget.check()
        log.info("memory of the %s:\n%s", budget.place, budget)
    return budgets[0]


def plan_budgets(
    config: EngineConfig, geometry: ModelGeometry, *, is_native: bool
) -> tuple[Budget, ...]:
    """The device's budget first; on CUDA the host has one of its own. Nothing is allocated.
    `is_native`: the native kernels compute."""
    dtype = getattr(torch, config.dtype)
    workspace = workspace_bytes(config, geometry, is_native=is_native)
    on_device: tuple[Line, ...] = (
        Line("weights", _weights_bytes(geometry, dtype, is_native), "a smaller model or --dtype"),
        Line("kv_pages", config.kv_bytes, "--kv-memory"),
        Line("arena", config.arena_bytes, "--adapter-memory"),
        Line(
            "workspace",
            workspace,
            "--max-batch-tokens, --max-sequences, --max-model-len, --num-threads",
        ),
    )
    # The workspace is allocated after the weights, so that only what exceeds it adds to the peak.
    # While a projection is read, the tensor of its file takes the place of its packed form.
    beyond = largest_projection_bytes(geometry, dtype) - workspace
    if is_native and beyond > 0:
        on_device += (Line("packing", beyond, "a smaller model or --dtype"),)
    on_host = (
        Line("host_tier", config.host_bytes, "--host-memory"),
        Line("tokenizer", config.tokenizer_bytes),
        # The last one, and all of it is there already.
        Line("process", resident_bytes() + config.frontend_bytes),
    )
    if config.device == "cpu":
        return (_budget("host", (*on_device, *on_host), config.memory_limit_bytes),)
    free_bytes, total_bytes = torch.cuda.mem_get_info(torch.device(config.device))
    limit_bytes = config.memory_limit_bytes or total_bytes
    in_use = Line("in use", total_bytes - free_bytes, "other programs on the device")
    change = "--memory-limit, or a larger device"
    return (
        Budget("device", (*on_device, in_use), limit_bytes, change),
        _budget("host", on_host, 0),
    )


def _budget(place: str, lines: tuple[Line, ...], limit_bytes: int) -> Budget:
    """Of the host. Without a limit it is what this process has and what is left to it."""
    if limit_bytes:
        return Budget(place, lines, limit_bytes, "--memory-limit")
    left_bytes = available_bytes()
    limit = None if left_bytes is None else left_bytes + lines[-1].num_bytes
    return Budget(place, lines, limit, "what the machine and its container leave")


def _weights_bytes(geometry: ModelGeometry, dtype: torch.dtype, is_native: bool) -> int:
    """Packed, as the native kernels read it, a tied head cannot share the embedding's memory."""
    num_bytes = weights_bytes(geometry, dtype)
    if geometry.tie_word_embeddings and is_native:
        num_bytes += geometry.vocab_size * geometry.hidden_size * dtype.itemsize
    return num_bytes


def workspace_bytes(config: EngineConfig, geometry: ModelGeometry, *, is_native: bool) -> int:
    """What the widest step computes with: activations of `max_batch_tokens`, what adapters shrink
    them to, the keys and values of one longest sequence side by side, logits and the sampler's
    copies of `max_sequences`, and of the native kernels what the rows that sample take apart in the
    last layer, and what each thread computes attention in."""
    item_bytes = getattr(torch, config.dtype).itemsize
    hidden, intermediate = geometry.hidden_size, geometry.intermediate_size
    attention = 3 * geometry.q_size + 4 * geometry.kv_size
    per_token = (3 * hidden + attention + 3 * intermediate) * item_bytes
    per_token += 3 * config.max_lora_rank * item_bytes
    per_token += 2 * hidden * 4  # norms, in fp32
    gathered = config.max_model_len * 2 * geometry.kv_size * item_bytes
    logits = config.max_sequences * geometry.vocab_size * 4
    whole = config.max_batch_tokens * per_token + gathered + 3 * logits
    if not is_native:
        return whole
    per_sample = (hidden + geometry.q_size + 3 * config.max_lora_rank) * item_bytes
    return whole + config.max_sequences * per_sample + _attention_bytes(config, geometry)


def _attention_bytes(config: EngineConfig, geometry: ModelGeometry) -> int:
    g, item_bytes = geometry, getattr(torch, config.dtype).itemsize
    shape = AttentionShape(g.num_heads, g.num_kv_heads, g.head_dim, item_bytes)
    return shape.num_bytes(
        config.max_batch_tokens,
        config.max_sequences,
        config.num_threads or torch.get_num_threads(),
        len(set(g.sliding_windows)),
    )
