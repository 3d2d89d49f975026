"""Open settings are decided: the meaning of "auto" for a model on this machine."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import ByteSize

from inference_svc.config import InferenceSettings
from inference_svc.core import EngineConfig, Nodes, padding_pages
from inference_svc.pictures.processor import has_processor
from servicekit.errors import InvalidSetting

CPU_SEQUENCES, CPU_BATCH_TOKENS = 64, 512
ENCODER_STEP_NUMBERS = 768 << 10
"""Hidden states of a step of an encoder, by default: 2,048 tokens of 384 numbers. Small encoders
compute tokens so fast that the engine's own work between two steps counts, and none of their
requests waits for a token of each step."""
CPU_ADAPTER_MEMORY, CPU_KV_MEMORY = 256 << 20, 512 << 20
CPU_ADAPTER_SHARE = 4
"""Adapters of experts take at most one part in so many of the memory that is left, by default."""
CPU_STATE_SHARE = 16
"""The recurrent states of running sequences take at most one part in so many of the free memory by
default, and the stored ones as much: a state of Qwen3.5-0.8B has 19 MiB, and 64 sequences with two
each would take more of a laptop than the model."""
UNKNOWN_STATE_BYTES = 512 << 20
"""The same where the free memory is unknown."""
STATE_INTERVAL_TOKENS = 512
"""A prefix is computed again from the last stored state on, on average half of this. A state of
Qwen3.5 has the bytes of keys and values of 1,600 to 2,400 tokens: stored more often, states would
displace many more pages than tokens they save."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8_BYTES = 1
KV_SCALE_BYTES = 4
"""The scale of a key or value in FP8, whose elements have one byte."""
EVERY_TARGET = "all"
PROMPT_IMAGES = 8
PROMPT_IMAGE_MEMORY = 512 << 20
MAX_RANKS = 64
"""The processes of all stages."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that decide on open settings. `free_bytes` of `total_bytes` are the device's memory
    (CUDA only; the least of those that ranks will have), `host_free_bytes` the host's free memory;
    None: unknown. `why_no_device` is the reason for which a CUDA device that the machine seems to
    have cannot be used. `num_devices` are visible."""

    has_cuda: bool
    free_bytes: int = 0
    total_bytes: int = 0
    host_free_bytes: int | None = None
    why_no_device: str = ""
    num_devices: int = 1

    @property
    def speed_notes(self) -> tuple[str, ...]:
        """Sentences for operators, as `backends.speed_notes` has them."""
        why = self.why_no_device
        return (f"the CPU computes, not a GPU: {why}",) if why else ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of the model's config; `kv_elements_per_token` are keys and values of all layers, which
    have `kv_vectors_per_token` heads. `lora_targets` are the last components of the names of
    modules that adapters may change, `fused_targets` of modules that compute several of these.
    `expert_elements_per_rank` are values of A and B, of all experts. `state_bytes` has a sequence's
    recurrent state, 0 for a model without recurrent layers. Models with further tables of tokens
    have no place for tokens that adapters add. If it `is_encoder`, prompts are computed whole and
    have no keys and values; a token has `hidden_size` numbers. The largest image has
    `picture_tokens`, with embeddings of `picture_elements` each."""

    dtype: str
    max_position_embeddings: int
    kv_elements_per_token: int
    kv_vectors_per_token: int
    lora_targets: tuple[str, ...] = ()
    fused_targets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    may_add_tokens: bool = True
    expert_elements_per_rank: int = 0
    state_bytes: int = 0
    is_encoder: bool = False
    hidden_size: int = 0
    picture_tokens: int = 0
    picture_elements: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The settings of the same names, decided."""

    adapter_memory: int
    host_memory: int
    kv_memory: int
    max_sequences: int
    max_batch_tokens: int
    stored_states: int = 0


FitDevice = Callable[[InferenceSettings, Machine], Sizes]
"""Decides the sizes on a device with memory of its own; device and dtype are decided."""


def resolve(
    settings: InferenceSettings,
    machine: Machine,
    model: ModelFacts,
    fit_device: FitDevice | None = None,
) -> InferenceSettings:
    """Returns `settings` with everything decided. Without `fit_device` it is for a CPU.

    Raises InvalidSetting for a setting that this machine or this model cannot fulfil, and as
    `fit_device`.
    """
    settings = resolve_images(settings)
    device = settings.device
    if device == "auto":
        device = "cuda" if machine.has_cuda else "cpu"
    elif device == "cuda" and not machine.has_cuda:
        raise InvalidSetting(f"--device cuda: {machine.why_no_device or 'there is no CUDA device'}")
    if device == "cuda" and model.is_encoder:
        raise InvalidSetting(f"--device {settings.device}: encoders are for CPUs: set --device cpu")
    if device == "cpu" and settings.host_memory_limit is not None:
        raise InvalidSetting("host-memory-limit: on a CPU, set memory-limit: it covers all memory")
    check_sharded_loras(settings)
    if settings.num_ranks > 1:
        _check_ranks(settings)
        if device == "cuda":
            _check_devices(settings, machine.num_devices)
    settings = resolve_model(settings, model).model_copy(update={"device": device})
    _check_length(settings, model)
    if device == "cpu":
        sizes = _cpu_sizes(settings, machine, model)
    else:
        assert fit_device is not None, "a device's sizes are to be chosen"
        longest = settings.max_model_len or model.max_position_embeddings
        settings = _with_image_memory(settings, model, longest)  # of which half is the device's
        sizes = fit_device(settings, machine)
    max_model_len = _max_model_len(settings, model, sizes, device)
    settings = _with_image_memory(settings, model, max_model_len)
    return settings.model_copy(
        update={
            "adapter_memory": ByteSize(sizes.adapter_memory),
            "host_memory": ByteSize(sizes.host_memory),
            "kv_memory": ByteSize(sizes.kv_memory),
            "max_sequences": sizes.max_sequences,
            "max_batch_tokens": sizes.max_batch_tokens,
            "stored_states": sizes.stored_states,
            "max_model_len": max_model_len,
        }
    )


def _with_image_memory(
    settings: InferenceSettings, model: ModelFacts, max_model_len: int
) -> InferenceSettings:
    """Returns settings that have memory of which one half keeps the embeddings of the largest
    image."""
    if settings.prompt_image_memory is not None:
        return settings
    num_tokens = min(model.picture_tokens, max_model_len)
    largest = num_tokens * model.picture_elements * ITEM_BYTES[settings.dtype]
    memory = ByteSize(max(PROMPT_IMAGE_MEMORY, 2 * largest))
    return settings.model_copy(update={"prompt_image_memory": memory})


def resolve_images(settings: InferenceSettings) -> InferenceSettings:
    """Returns the settings with the number of images in a request decided, before the model is
    read: with images its vision tower is a part of it. Raises InvalidSetting for a setting of
    fetched images that has no effect."""
    _check_image_hosts(settings)
    if settings.max_prompt_images is not None:
        return settings
    number = PROMPT_IMAGES if has_processor(settings.model) else 0
    return settings.model_copy(update={"max_prompt_images": number})


def _check_image_hosts(settings: InferenceSettings) -> None:
    if settings.image_tls_ca_file is not None and not settings.image_hosts:
        raise InvalidSetting(
            "--image-tls-ca-file has no effect without --image-hosts",
            subject="image_tls_ca_file",
        )
    if settings.image_hosts and not settings.http:
        raise InvalidSetting(
            "--image-hosts has no effect without --http: only requests over HTTP name images by "
            "URL",
            subject="image_hosts",
        )


def _check_devices(settings: InferenceSettings, num_devices: int) -> None:
    """Raises InvalidSetting if not every rank of this machine has a device of its own."""
    num_ranks = settings.num_ranks // settings.nnodes
    if num_ranks > num_devices:
        name, number = "--tensor-parallel", str(settings.tensor_parallel)
        if settings.pipeline_parallel > 1:
            name, number = f"{name}, --pipeline-parallel", f"{number}, {settings.pipeline_parallel}"
        raise InvalidSetting(
            f"{name} {number}: each of {num_ranks} processes of a machine needs a CUDA device of "
            f"its own, and {num_devices} are visible (CUDA_VISIBLE_DEVICES counts): use fewer "
            "processes, or more devices or --nnodes"
        )


def _check_ranks(settings: InferenceSettings) -> None:
    """Raises InvalidSetting for a setting that several ranks cannot fulfil."""
    name = "--tensor-parallel" if settings.tensor_parallel > 1 else "--pipeline-parallel"
    stages, nodes = settings.pipeline_parallel, settings.nnodes
    if settings.num_ranks > MAX_RANKS:
        processes = f"--tensor-parallel times --pipeline-parallel are {settings.num_ranks}"
        raise InvalidSetting(f"{processes} processes, and at most {MAX_RANKS} are possible")
    if stages > 1 and stages % nodes and nodes % stages:
        numbers = f"--pipeline-parallel {stages} and --nnodes {nodes}"
        raise InvalidSetting(f"{numbers}: one must divide the other, or machines cut stages")
    if settings.engine != "process":
        raise InvalidSetting(f"{name} needs --engine process")
    if settings.host_memory:
        raise InvalidSetting(f"{name}: ranks have no host tier; set --host-memory 0")


def check_sharded_loras(settings: InferenceSettings) -> None:
    """Raises InvalidSetting for a setting with which ranks cannot share all of an adapter."""
    if settings.fully_sharded_loras and settings.tensor_parallel == 1:
        raise InvalidSetting("--fully-sharded-loras needs --tensor-parallel 2 or more")
    if settings.fully_sharded_loras and settings.adapter_dtype != "auto":
        reason = "each process's part of A would have a scale of its own"
        raise InvalidSetting(f"--fully-sharded-loras: {reason}; leave --adapter-dtype auto")
    parts = settings.expert_parallel
    if settings.fully_sharded_loras and 1 < parts < settings.tensor_parallel:
        reason = f"--expert-parallel {parts} has some processes share experts that others lack"
        raise InvalidSetting(f"--fully-sharded-loras: {reason}; set it to 1 or to all processes")


def resolve_model(settings: InferenceSettings, model: ModelFacts) -> InferenceSettings:
    """Returns `settings` after deciding on all that a server announces on any machine: the base
    model's name, dtype and targets. Raises InvalidSetting for a setting that the model cannot
    fulfil."""
    dtype = model.dtype if settings.dtype == "auto" else settings.dtype
    if dtype not in ITEM_BYTES:
        raise InvalidSetting(
            f"--dtype: the model's {dtype} is not supported; choose one of {', '.join(ITEM_BYTES)}"
        )
    lora_targets = _lora_targets(settings.lora_targets, model)
    return settings.model_copy(
        update={
            "base_model": settings.base_model_names[0],
            "dtype": dtype,
            "lora_targets": lora_targets,
            "state_interval_tokens": _state_interval(settings),
            "max_added_tokens": settings.max_added_tokens if model.may_add_tokens else 0,
        }
    )


def _check_length(settings: InferenceSettings, model: ModelFacts) -> None:
    longest = model.max_position_embeddings
    if settings.max_model_len > longest:
        raise InvalidSetting(
            f"--max-model-len {settings.max_model_len} exceeds the model's {longest}"
        )


def _lora_targets(asked: tuple[str, ...], model: ModelFacts) -> tuple[str, ...]:
    """Returns the targets that adapters are restricted to, sorted, a module that computes several
    targets as these; none if that is every target. Raises InvalidSetting for a name that is
    neither."""
    if asked == (EVERY_TARGET,):
        return ()
    known = (*model.lora_targets, *model.fused_targets)
    accepted: set[str] = set()
    for name in asked:
        if name not in known:
            close = difflib.get_close_matches(name.rpartition(".")[2], known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            listed = ", ".join(known)
            raise InvalidSetting(
                f"--lora-targets: the model has no target {name}, but {listed}{hint}"
            )
        accepted.update((name,) if name in model.lora_targets else model.fused_targets[name])
    return () if accepted == set(model.lora_targets) else tuple(sorted(accepted))


def _state_interval(settings: InferenceSettings) -> int:
    size = settings.page_size
    return settings.state_interval_tokens or -(-STATE_INTERVAL_TOKENS // size) * size


def _max_model_len(
    settings: InferenceSettings, model: ModelFacts, sizes: Sizes, device: str
) -> int:
    if model.is_encoder:
        longest = settings.max_model_len or model.max_position_embeddings
        if longest > sizes.max_batch_tokens:
            raise InvalidSetting(
                f"--max-batch-tokens {sizes.max_batch_tokens}: an encoder computes a prompt at "
                f"once: give it at least --max-model-len, {longest}"
            )
        return longest
    page_bytes = settings.page_size * _kv_token_bytes(settings, model)
    num_pages = max(0, sizes.kv_memory // page_bytes - padding_pages(device))
    kv_tokens = num_pages * settings.page_size
    needed = max(settings.max_model_len, 2)
    if needed > kv_tokens:
        raise InvalidSetting(f"--kv-memory holds {kv_tokens} tokens; at least {needed} are needed")
    return settings.max_model_len or min(model.max_position_embeddings, kv_tokens)


def _cpu_sizes(settings: InferenceSettings, machine: Machine, model: ModelFacts) -> Sizes:
    most = min(settings.max_batch_tokens or CPU_SEQUENCES, CPU_SEQUENCES)
    left_bytes = _left_bytes(settings, machine)
    share_bytes = UNKNOWN_STATE_BYTES if left_bytes is None else left_bytes // CPU_STATE_SHARE
    share_bytes //= settings.num_ranks // settings.nnodes
    fitting = running_within(share_bytes, model.state_bytes, most)
    max_sequences = settings.max_sequences or fitting
    kv_memory, kv_tokens, step_tokens = settings.kv_memory or CPU_KV_MEMORY, 0, CPU_BATCH_TOKENS
    if model.is_encoder:
        kv_memory, longest = 0, settings.max_model_len or model.max_position_embeddings
        step_tokens = max(step_tokens, longest, ENCODER_STEP_NUMBERS // max(model.hidden_size, 1))
    else:
        kv_tokens = kv_memory // _kv_token_bytes(settings, model)
    return Sizes(
        adapter_memory=settings.adapter_memory or _cpu_adapter_memory(settings, machine, model),
        host_memory=settings.host_memory or 0,
        kv_memory=kv_memory,
        max_sequences=max_sequences,
        max_batch_tokens=settings.max_batch_tokens or max(step_tokens, max_sequences),
        stored_states=stored_within(
            share_bytes,
            model.state_bytes,
            settings,
            kv_tokens=kv_tokens,
            max_sequences=max_sequences,
        ),
    )


def _kv_token_bytes(settings: InferenceSettings, model: ModelFacts) -> int:
    """Returns the size of a token's keys and values; the dtype is decided."""
    if settings.kv_dtype == "fp8":
        return model.kv_elements_per_token + KV_SCALE_BYTES * model.kv_vectors_per_token
    return model.kv_elements_per_token * ITEM_BYTES[settings.dtype]


def running_within(num_bytes: int, state_bytes: int, most: int) -> int:
    """Returns how many sequences, `most` at most and at least one, have room for their recurrent
    states, two each, in so many bytes."""
    return max(1, min(most, num_bytes // (2 * state_bytes))) if state_bytes else most


def stored_within(
    num_bytes: int,
    state_bytes: int,
    settings: InferenceSettings,
    *,
    kv_tokens: int,
    max_sequences: int,
) -> int:
    """Returns how many states the prefix cache stores, in so many bytes unless the settings say the
    number: no more than prefixes in the pages can have, one for each interval, and one at the end
    of each running sequence's prompt."""
    if not (state_bytes and settings.prefix_cache):
        return 0
    if settings.stored_states is not None:
        return settings.stored_states
    useful = kv_tokens // settings.state_interval_tokens + max_sequences
    return min(num_bytes // state_bytes, useful)


def _cpu_adapter_memory(settings: InferenceSettings, machine: Machine, model: ModelFacts) -> int:
    """Returns the default memory for adapters: of a mixture of experts space for one that changes
    all of them, within a part of the machine's free memory."""
    item_bytes = FP8_BYTES if settings.adapter_dtype == "fp8" else ITEM_BYTES[settings.dtype]
    largest = settings.max_rank * model.expert_elements_per_rank * item_bytes
    left_bytes = _left_bytes(settings, machine)
    if left_bytes is not None:
        largest = min(largest, left_bytes // (CPU_ADAPTER_SHARE * settings.num_ranks))
    return CPU_ADAPTER_MEMORY + largest


def _left_bytes(settings: InferenceSettings, machine: Machine) -> int | None:
    """Returns the memory that defaults follow from; None if it is not known, or not the same: ranks
    of several machines must have equal sizes."""
    if settings.nnodes > 1:
        return None
    return settings.memory_limit or machine.host_free_bytes


def to_engine_config(settings: InferenceSettings) -> EngineConfig:
    """Returns the engine's part of resolved settings."""
    assert settings.kv_memory is not None, "the settings are resolved"
    assert settings.host_memory is not None, "the settings are resolved"
    assert settings.adapter_memory is not None, "the settings are resolved"
    assert settings.stored_states is not None, "the settings are resolved"
    return EngineConfig(
        model_dir=settings.model,
        base_model=settings.base_model_names[0],
        dtype=settings.dtype,
        quantize=settings.quantize,
        adapter_dtype=settings.adapter_dtype,
        kv_dtype=settings.kv_dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        max_sequences=settings.max_sequences,
        max_batch_tokens=settings.max_batch_tokens,
        max_prefill_chunk=settings.max_batch_tokens,
        max_queue=settings.max_queue,
        max_tenant_queue=_max_tenant_queue(settings),
        fair_quantum=settings.fair_quantum_tokens,
        fair_ageing_s=settings.fair_ageing_seconds,
        tenant_share=settings.share,
        page_size=settings.page_size,
        kv_bytes=int(settings.kv_memory),
        state_pages=settings.state_interval_tokens // settings.page_size,
        num_stored_states=settings.stored_states,
        arena_bytes=int(settings.adapter_memory),
        host_bytes=int(settings.host_memory),
        memory_limit_bytes=int(settings.memory_limit or 0),
        host_limit_bytes=int(settings.host_memory_limit or 0),
        max_loras=settings.max_loras,
        max_lora_rank=settings.max_rank,
        lora_targets=settings.lora_targets,
        max_added_tokens=settings.max_added_tokens,
        classifiers=settings.classifiers,
        adapter_wait_s=settings.adapter_wait_seconds,
        pull_workers=settings.pull_workers,
        prefetch=settings.prefetch,
        prefix_cache=settings.prefix_cache,
        num_threads=settings.num_threads,
        native_kernels=settings.native_kernels,
        tensor_parallel=settings.tensor_parallel,
        fully_sharded_loras=settings.fully_sharded_loras,
        expert_parallel=settings.expert_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        nodes=_nodes(settings),
        record_steps=settings.cuda_graphs,
        max_prompt_images=settings.max_prompt_images or 0,
        prompt_image_bytes=picture_bytes(settings),
    )


def picture_bytes(settings: InferenceSettings) -> int:
    """Returns the memory for embeddings of images, and as much for pixels, of resolved settings."""
    return int(settings.prompt_image_memory or PROMPT_IMAGE_MEMORY) // 2


def _nodes(settings: InferenceSettings) -> Nodes | None:
    if settings.nnodes == 1:
        return None
    assert settings.rendezvous_token is not None, "the settings are valid"
    return Nodes(
        settings.nnodes,
        settings.node_rank,
        settings.rendezvous,
        settings.rendezvous_timeout_seconds,
        settings.rendezvous_token.get_secret_value(),
    )


def _max_tenant_queue(settings: InferenceSettings) -> int:
    return math.ceil(settings.max_queue * settings.share)
