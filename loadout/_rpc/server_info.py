"""The types that describe an inference server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GenerationState = Literal["running", "paused", "asleep"]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """One use of memory; docs/api.md lists the names."""

    name: str
    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a server."""

    max_model_len: int
    """Longest prompt plus output, in tokens."""
    max_loras: int
    """Most adapters resident at once."""
    max_lora_rank: int
    max_sequences: int
    """Most requests that run at once."""
    max_batch_tokens: int
    """Most tokens in one step."""
    max_queue: int
    """Most requests that wait."""
    memory_bytes: int = 0
    """Total memory that the server may use on the computing device; 0: unknown."""
    lora_targets: tuple[str, ...] = ()
    """Targets that adapters may change, by the last components of their names. Empty: all."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults of sampling parameters; `top_k` 0 and `top_p` 1 are off."""

    temperature: float
    top_k: int
    top_p: float
    logprobs_mode: Literal["raw", "processed"] = "raw"


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The mixture-of-experts layers of a model."""

    layers: tuple[int, ...]
    """The layers' numbers, ascending."""
    num_experts: int
    """Experts per layer."""
    num_chosen: int
    """Experts that a token chooses per layer."""


@dataclass(frozen=True, slots=True)
class RecurrentStates:
    """The states of a model's recurrent layers, which requests have besides keys and values."""

    state_bytes: int
    """Bytes of one state, of all recurrent layers."""
    interval_tokens: int
    """Distance of the prompt positions at which the prefix cache stores a state."""
    capacity: int
    """States that there is memory for: two for each request that may run, and `max_stored`."""
    max_stored: int
    """States that the prefix cache can store while all requests run that may."""
    used: int
    """States that requests hold."""
    stored: int
    """States, held by requests or not, that a prefix can match."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor of a server's machine, as far as the server may use it."""

    name: str
    """Such as "Intel(R) Xeon(R) Processor"."""
    num_cores: int
    """Cores: processors that share one, its hyperthreads, count once."""
    num_processors: int
    """Processors: hyperthreads count each."""
    quota: float = 0.0
    """The container's CPU quota in processors, such as 2.5; 0: there is none."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of weights in few bits."""

    format: str
    """Such as "int4, groups of 128"."""
    kernels: str
    """The code that multiplies by these weights: "native"; a GPU's kernel, such as "triton W4A16";
    "dequantised", which is slow; or such as "held in bfloat16", if weights are made plain when they
    are read."""


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """How a server embeds, unless a request says otherwise."""

    pooling: str
    """Which tokens are pooled: "last", "mean" or "first"."""
    normalized: bool
    """Whether vectors have length 1."""
    size: int
    """Numbers of a vector."""
    dimensions: tuple[int, ...]
    """The other lengths that a vector may be cut to; empty: any."""
    prompt_names: tuple[str, ...]
    """The model's prompts, sorted."""
    default_prompt_name: str
    """The prompt that goes before each text; "": none."""
    max_tokens: int
    """Most tokens of an input."""


@dataclass(frozen=True, slots=True)
class ClassifierInfo:
    """How a server classifies."""

    labels: tuple[str, ...]
    """The labels of the model's own head; empty: it has none, and adapters bring theirs."""
    per_token: bool
    """Whether the model's own head labels each token."""
    scores_pairs: bool = False
    """Whether the model's own head scores pairs of texts."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One of the processes that compute a model together, as of its last answer to rank 0, which
    asks every second."""

    index: int
    """Rank 0 leads the others."""
    process_id: int
    answers: bool
    """Whether it has answered within ten seconds."""
    resident_bytes: int
    weights_bytes: int
    """Bytes of its part of the weights."""
    kv_bytes: int
    """Bytes allocated for its part of keys and values."""
    arena_bytes: int
    """Bytes allocated for its parts of adapters."""
    num_steps: int
    step_seconds: float
    """Seconds of its steps."""
    exchange_seconds: float
    """Seconds of these in exchanges with other ranks, mostly of waiting for them."""
    pulled_bytes: int
    running_pulls: int
    num_threads: int
    """Threads that compute."""
    processors: tuple[int, ...]
    """The processors that it may use."""
    stage: int = 0
    """The stage that it is of: each has some of the layers."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The model of a server, its limits, and its use of memory."""

    base_model: str
    """Name by which adapters know the model."""
    architecture: str
    dtype: str
    device: str
    """Either "cpu" or "cuda"."""
    layout_id: str
    """Empty until the store has accepted the layout."""
    limits: ServerLimits
    memory: tuple[MemoryUse, ...]
    versions: Mapping[str, str]
    """Versions of Loadout and its dependencies."""
    kernels: str
    """The kernels that compute, such as "native avx512_bf16"."""
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
    num_threads: int = 0
    """Threads that compute on the CPU, of each rank; 0: a GPU computes, or the server is too old to
    report it."""
    speed_notes: tuple[str, ...] = ()
    """Why the machine computes more slowly than it could, and which setting helps."""
    recurrent_states: RecurrentStates | None = None
    """None: the model has no recurrent layers, or the server is too old to report them."""
    adapter_dtype: str = ""
    """The type of adapters' A and B in memory: `dtype`, or "float8_e4m3fn"; "": the server is too
    old to report it."""
    kv_dtype: str = ""
    """The type of keys and values, `dtype` or "fp8"; "": the server is too old to report it."""
    weight_form: str = ""
    """The form of the base model's weights, such as "nf4" or "gguf q4_k"; "": plain, in `dtype`."""
    weight_formats: tuple[WeightFormat, ...] = ()
    """Empty: the model has no weights in few bits, or the server is too old to report them."""
    processor: Processor | None = None
    """The machine's, also if a GPU computes; None: the server is too old to report it."""
    ranks: tuple[RankStatus, ...] = ()
    """The processes that compute the model together; empty: there is one, or the server is too old
    to report them."""
    generates: bool | None = None
    """Whether it generates and scores; None: the server is too old to report it."""
    embedding: EmbeddingInfo | None = None
    """None: it does not embed, or is too old to report it."""
    classifier: ClassifierInfo | None = None
    """None: it does not classify, or is too old to report it."""
