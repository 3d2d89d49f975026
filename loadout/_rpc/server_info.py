"""What an inference server says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GenerationState = Literal["running", "paused", "asleep"]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    name: str
    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class ServerLimits:
    max_model_len: int
    max_loras: int
    max_lora_rank: int
    max_sequences: int
    max_batch_tokens: int
    max_queue: int
    memory_bytes: int = 0
    """Limit of all memory together on the computing device; 0: unknown."""
    lora_targets: tuple[str, ...] = ()
    """What adapters may change, by last components of modules' names; none: every target."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What requests get that do not say otherwise; `top_k` 0 and `top_p` 1 are off."""

    temperature: float
    top_k: int
    top_p: float
    logprobs_mode: Literal["raw", "processed"] = "raw"


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The layers that are mixtures of experts, how many experts each has, and how many of these a
    token chooses."""

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """`layout_id` is empty until the store has accepted the layout; `kernels` says what computes,
    such as "native avx512_bf16"."""

    base_model: str
    architecture: str
    dtype: str
    device: str
    layout_id: str
    limits: ServerLimits
    memory: tuple[MemoryUse, ...]
    versions: Mapping[str, str]
    kernels: str
    machine: str = ""
    """The computing device, such as "NVIDIA H200"; "": the server is too old to report it."""
    sampling_defaults: SamplingDefaults | None = None
    """None: the server is too old to report them."""
    metrics_port: int = 0
    """The port of its Prometheus metrics; 0: the server is too old to report it."""
    generation: GenerationState | None = None
    """None: the server is too old to report it."""
    experts: ExpertLayers | None = None
    """None: the model has no experts, or the server is too old to report them."""
