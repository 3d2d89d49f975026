"""Computes the memory that an inference service needs, and how many adapters it holds.

    python -m tools.sizing --device-memory 79GiB --rank 16 -- --model DIR --adapter-memory 8GiB

The flags of `loadout serve` follow `--`. Without `--device-memory` it plans for a CPU. The
service's own code computes everything; nothing is allocated, and only config.json is read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from pydantic import ByteSize, TypeAdapter

from inference_svc.adapters.extents import round_up
from inference_svc.adapters.layout import ModelLayout, build_layout
from inference_svc.app import model_facts
from inference_svc.backends.cuda import CudaFactory
from inference_svc.backends.native import NativeFactory
from inference_svc.config import InferenceSettings, Machine, resolve, to_engine_config
from inference_svc.engine.memory_budget import Budget, human, plan_budgets
from inference_svc.model.geometry import ModelGeometry, load_geometry
from inference_svc.model.weights import weights_bytes
from kernels.attention import page_bytes
from servicekit.errors import InvalidSetting
from servicekit.settings.load import load_settings

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ON_DEVICE = ("weights", "kv_pages", "arena", "workspace", "packing")
ON_HOST = ("host_tier",)


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters of one kind: all of one rank, on modules of these names in every layer."""

    rank: int = 16
    targets: tuple[str, ...] = LINEAR


def image_bytes(layout: ModelLayout, adapters: Adapters) -> int:
    """Returns the size of one adapter's image."""
    sizes = [
        round_up(adapters.rank * features * layout.dtype.itemsize)
        for target in layout.targets
        if target.name.rpartition(".")[2] in adapters.targets
        for features in (target.in_features, target.out_features)
    ]
    return sum(sizes)


@dataclass(frozen=True, slots=True)
class Plan:
    """An inference service on one machine. `config` is resolved; `budget` has a line for every area
    of memory."""

    config: InferenceSettings
    geometry: ModelGeometry
    layout: ModelLayout
    budget: Budget

    @property
    def page_bytes(self) -> int:
        """Size of the keys and values of `page_size` tokens."""
        return page_bytes(
            num_layers=self.geometry.num_layers,
            page_size=self.config.page_size,
            num_kv_heads=self.geometry.num_kv_heads,
            head_dim=self.geometry.head_dim,
            dtype=self.layout.dtype,
        )

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that fit, of all sequences together."""
        return self.budget.bytes_of("kv_pages") // self.page_bytes * self.config.page_size

    @property
    def largest_image_bytes(self) -> int:
        """Size of the largest adapter that is admitted."""
        return self.layout.largest_image(self.config.max_lora_rank).num_bytes

    def num_adapters(self, area: str, adapters: Adapters) -> int:
        """Returns how many adapters fit into the arena or the host tier."""
        fitting = self.budget.bytes_of(area) // image_bytes(self.layout, adapters)
        return min(fitting, self.config.max_loras) if area == "arena" else fitting


def plan(config: InferenceSettings, device_bytes: int | None = None) -> Plan:
    """Plans for a GPU with so many free bytes, or for a CPU with the native kernels. Raises like
    the service for models that it cannot serve and settings that it cannot meet."""
    geometry = load_geometry(config.model)
    dtype = geometry.dtype if config.dtype == "auto" else config.dtype
    machine = Machine(has_cuda=False)
    if device_bytes is not None:
        loaded_bytes = weights_bytes(geometry, getattr(torch, dtype))
        machine = Machine(has_cuda=True, free_bytes=device_bytes - loaded_bytes)
    resolved = resolve(config, machine, model_facts(geometry))
    engine_config = to_engine_config(resolved)
    backend = NativeFactory() if device_bytes is None else CudaFactory()
    # All lines in one budget, as if of one memory: asking a GPU what it has would need one.
    [budget] = plan_budgets(engine_config, backend.memory_needs(engine_config, geometry), None)
    layout = build_layout(geometry, resolved.base_model, (), getattr(torch, resolved.dtype))
    return Plan(resolved, geometry, layout, budget)


def hit_share(num_held: int, num_adapters: int, alpha: float) -> float:
    """Returns the largest share of W4's requests that find their adapter among the `num_held` most
    popular of `num_adapters`: each is for adapter floor(n U^(1/alpha))."""
    return min(1.0, num_held / num_adapters) ** alpha


def rows(planned: Plan, adapters: Adapters) -> Iterator[tuple[str, str]]:
    """Yields names and values that describe a plan."""
    budget = planned.budget
    held = {area: planned.num_adapters(area, adapters) for area in ("arena", "host_tier")}
    yield "image of one adapter", human(image_bytes(planned.layout, adapters))
    for area in (*ON_DEVICE, *ON_HOST):
        num_bytes = budget.bytes_of(area)
        if area == "kv_pages":
            pages = num_bytes // planned.page_bytes
            more = f": {pages:,} pages of {human(planned.page_bytes)}, {planned.kv_tokens:,} tokens"
        else:
            more = f": {held[area]:,} adapters" if area in held else ""
        if num_bytes:
            yield f"`{area}`", human(num_bytes) + more
    yield "largest adapter that is admitted", human(planned.largest_image_bytes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device-memory", type=_parse_bytes, help="Free memory of the GPU.")
    parser.add_argument("--rank", type=int, default=16, help="Rank of the adapters.")
    parser.add_argument(
        "--targets", default=",".join(LINEAR), help="Names of the modules that the adapters change."
    )
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, help="Flags of `loadout serve`, after --."
    )
    options = parser.parse_args(arguments)
    try:
        config = load_settings(InferenceSettings, [flag for flag in options.flags if flag != "--"])
    except InvalidSetting as error:
        raise SystemExit(f"error: {error}") from None
    adapters = Adapters(options.rank, tuple(options.targets.split(",")))
    found = list(rows(plan(config, options.device_memory), adapters))
    width = max(len(name) for name, _ in found)
    for name, value in found:
        print(f"{name:<{width}}  {value}")


def _parse_bytes(text: str) -> int:
    return int(TypeAdapter(ByteSize).validate_python(text))


if __name__ == "__main__":
    main()
