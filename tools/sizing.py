"""Computes the memory that an inference service needs, and the number of adapters that it holds.

    python -m tools.sizing --device-memory 79GiB --rank 16 -- --model DIR --adapter-memory 8GiB

The flags of `loadout serve` follow `--`. Without `--device-memory` the plan is for a CPU. The
service's own code computes everything, allocates nothing, and reads only config.json. Sizes that
you do not give are chosen as for a server with a store.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.targets import layout_of
from inference_svc.app import resolve_settings
from inference_svc.auto_settings import Machine, resolve_images, to_engine_config
from inference_svc.backends.base import BackendFactory, DeviceMemory
from inference_svc.backends.cuda.factory import CudaFactory
from inference_svc.backends.native.backend import NativeFactory
from inference_svc.config import InferenceSettings
from inference_svc.engine.memory_budget import (
    Budget,
    human,
    local_needs,
    most_needs,
    plan_budgets,
    routed_bytes,
)
from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import load_description
from inference_svc.model.description import Decoder, Rank
from inference_svc.model.kv_caches import kv_page_bytes, stored_dtype
from inference_svc.model.recurrent_states import slot_bytes
from inference_svc.model.sharding.description import of_rank
from inference_svc.model.sharding.stages import of_stage
from servicekit.errors import InvalidSetting
from servicekit.settings.load import load_settings
from servicekit.settings.types import Size

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ON_DEVICE = (
    *("weights", "kv_pages", "recurrent_states", "arena", "workspace"),
    *("graphs", "libraries", "in use"),
)
ON_HOST = ("host_tier", "routed_experts")
CONTEXT_BYTES = 600 << 20
"""Memory of a CUDA context before any allocation: half a gigabyte, and more on some devices."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters of one rank, on modules with these names in every layer."""

    rank: int = 16
    targets: tuple[str, ...] = LINEAR


def image_bytes(layout: ModelLayout, adapters: Adapters) -> int:
    """Returns the size of one adapter's image."""
    return layout.largest_image(adapters.rank, adapters.targets).num_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """An inference service on one machine. `config` is resolved; `budgets`, the device's first,
    have a line for every area of memory, of `num_ranks` together. `layout` is of the stage that has
    most of an adapter."""

    config: InferenceSettings
    decoder: Decoder
    layout: ModelLayout
    budgets: tuple[Budget, ...]
    num_ranks: int = 1

    def bytes_of(self, area: str) -> int:
        return sum(budget.bytes_of(area) for budget in self.budgets)

    @property
    def page_bytes(self) -> int:
        """Size of the keys and values of `page_size` tokens, in the stage where they take most."""
        stored = stored_dtype(self.config.kv_dtype, self.layout.dtype)
        size = self.config.page_size
        return max(kv_page_bytes(each, size, stored) for each in self.decoder.every_stage)

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that fit, of all sequences together."""
        return self.num_pages * self.config.page_size

    @property
    def num_pages(self) -> int:
        """All ranks have the same."""
        return self.bytes_of("kv_pages") // self.num_ranks // self.page_bytes

    @property
    def state_bytes(self) -> int:
        """Size of a sequence's recurrent state; 0 for a model without recurrent layers."""
        return max(map(slot_bytes, self.decoder.every_stage))

    @property
    def largest_image_bytes(self) -> int:
        """Size of the largest adapter that the service admits."""
        return self.layout.largest_image(self.config.max_rank, self.config.lora_targets).num_bytes

    def num_adapters(self, area: str, adapters: Adapters) -> int:
        """Returns the number of adapters that fit into the arena or the host tier."""
        fitting = self.bytes_of(area) // self.num_ranks // image_bytes(self.layout, adapters)
        return min(fitting, self.config.max_loras) if area == "arena" else fitting


def plan(
    config: InferenceSettings, device_bytes: int | None = None, host_bytes: int | None = None
) -> Plan:
    """Plans for a GPU with this much free memory in a machine with `host_bytes` free, or for a CPU
    with the native kernels; of ranks on GPUs, for the stage with the largest needs. Raises like the
    service for models that it cannot serve and settings that it cannot meet."""
    config = resolve_images(config)
    with_pictures = bool(config.max_prompt_images)
    decoder = load_description(config.model, config.quantize, with_pictures=with_pictures)
    config = config.model_copy(update={"store": config.store or "store:7070"})
    machine, memory = Machine(has_cuda=False), None
    backend: BackendFactory = NativeFactory()
    if device_bytes is not None:
        memory = DeviceMemory(device_bytes - CONTEXT_BYTES, device_bytes)
        machine = Machine(
            True,
            memory.free_bytes,
            memory.total_bytes,
            host_bytes,
            num_devices=config.num_ranks // config.nnodes,
        )
        backend = CudaFactory()
    resolved = resolve_settings(config, machine, decoder)
    engine_config = to_engine_config(resolved)
    stage = of_stage(decoder, 0, config.pipeline_parallel, config.tensor_parallel)
    decoder = of_rank(stage, Rank(0, config.tensor_parallel), config.expert_parallel)
    num_ranks = 1
    if memory is None:
        needs = local_needs(engine_config, decoder, backend)
        num_ranks = len(engine_config.local_ranks)
    else:
        needs = most_needs(engine_config, decoder, backend)
    budgets = plan_budgets(engine_config, needs, memory, routed_bytes(engine_config, decoder))
    layouts = [layout_of(engine_config, each) for each in decoder.every_stage]
    largest = max(layouts, key=lambda layout: image_bytes(layout, Adapters()))
    return Plan(resolved, decoder, largest, budgets, num_ranks)


def hit_share(num_held: int, num_adapters: int, alpha: float) -> float:
    """Returns the maximum share of W4's requests that find their adapter among the `num_held` most
    popular of `num_adapters`, if each request is for adapter floor(n U^(1/alpha))."""
    return min(1.0, num_held / num_adapters) ** alpha


def rows(planned: Plan, adapters: Adapters) -> Iterator[tuple[str, str]]:
    """Yields names and values that describe a plan."""
    held = {area: planned.num_adapters(area, adapters) for area in ("arena", "host_tier")}
    yield "image of one adapter", human(image_bytes(planned.layout, adapters))
    for area in (*ON_DEVICE, *ON_HOST):
        num_bytes = planned.bytes_of(area)
        if area == "kv_pages":
            each, num_tokens = human(planned.page_bytes), planned.kv_tokens
            more = f": {planned.num_pages:,} pages of {each}, {num_tokens:,} tokens"
        elif area == "recurrent_states":
            more = _states(planned)
        else:
            more = f": {held[area]:,} adapters" if area in held else ""
        if num_bytes:
            yield f"`{area}`", human(num_bytes) + more
    yield "largest adapter that is admitted", human(planned.largest_image_bytes)


def _states(planned: Plan) -> str:
    config = planned.config
    return (
        f": {human(planned.state_bytes)} each, two for each of {config.max_sequences:,} requests, "
        f"{config.stored_states:,} stored, one every {config.state_interval_tokens:,} tokens"
    )


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
    try:
        found = list(rows(plan(config, options.device_memory), adapters))
    except (UnsupportedModel, InvalidSetting, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    width = max(len(name) for name, _ in found)
    for name, value in found:
        print(f"{name:<{width}}  {value}")


def _parse_bytes(text: str) -> int:
    return int(TypeAdapter(Size).validate_python(text))


if __name__ == "__main__":
    main()
