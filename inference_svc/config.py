"""Settings of the inference service: flags, environment LOADOUT_INFERENCE_*, or a TOML file.

`auto_settings.resolve` decides once on all settings that are left open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, ByteSize, Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from contract.base_model_names import name_of_files
from inference_svc.pictures.fetching.hosts import checked_entries
from servicekit.settings.service import (
    BASICS,
    MEMORY,
    NETWORK,
    PROCESS,
    SECURITY,
    TELEMETRY,
    ServiceSettings,
)
from servicekit.settings.types import (
    Address,
    Addresses,
    Bytes,
    Group,
    Level,
    Meeting,
    Metavar,
    Names,
    OptionalAddress,
    OptionalBytes,
    PositiveSeconds,
    Seconds,
    Size,
    split_commas,
)
from servicekit.telemetry.redact import redact

MIB = 1 << 20
_PART = r"\w(?:\w|[.-](?=\w)){0,95}"
_HUB_NAME = re.compile(rf"({_PART}/{_PART})(?:@({_PART}(?:/{_PART}){{0,3}}))?", re.ASCII)
NO_MODEL = (
    "{} is neither a folder nor a model's name on the hub, such as Qwen/Qwen3-0.6B, "
    "or with a revision Qwen/Qwen3-0.6B@main"
)

ToolParser = Literal[  # noqa: RUF041 (one name a line is too long for this file)
    Literal["auto", "none", "command_r", "function_gemma", "gemma", "glm", "granite"],
    Literal["harmony", "hermes", "llama3", "mistral", "phi", "qwen_coder"],
]
"""The names of syntaxes in `text.answers`."""

MODEL = Group("Model")
STORE = Group("Adapter store")
DEVICE = Group("Device")
NODES = Group("Several machines")
SCHEDULING = Group("Scheduling")
ADAPTERS = Group("Adapters")

MIN_TOKEN_CHARS = 16
"""The length of the secret of several machines."""

ORIGINS = Metavar("HOST[:PORT],...")
Count = Annotated[int, Field(ge=1)]
OptionalCount = Annotated[int, Field(ge=0)]


class InferenceSettings(ServiceSettings):
    """Runs the inference service: it serves one base model and any mix of its LoRA adapters in one
    batch, over gRPC and HTTP."""

    model_config = SettingsConfigDict(env_prefix="LOADOUT_INFERENCE_")

    command = "loadout serve"
    module = "inference_svc"
    example = "loadout serve --model ./Qwen3-0.6B --store 127.0.0.1:7070 --max-loras 128"
    former: ClassVar[Mapping[str, str]] = {
        "max_lora_rank": "max_rank",
        "tenant_queue_share": "tenant_share",
    }
    groups = (
        *(BASICS, NETWORK, SECURITY, MEMORY, SCHEDULING, ADAPTERS, MODEL, DEVICE),
        *(NODES, STORE, TELEMETRY, PROCESS),
    )

    model: Annotated[Path, Metavar("MODEL"), Level.COMMON, BASICS]
    """Folder of the base model as Hugging Face saves it (config.json, safetensors files,
    tokenizer.json), or its name on the Hub, such as Qwen/Qwen3-0.6B or NAME@REVISION for a commit,
    tag or branch. A GGUF file, or a folder with one, is a model too. A model named on the Hub must
    be in the Hub's cache: run loadout download first; loadout up does so itself."""

    base_model: Annotated[str, Level.COMMON, BASICS] = ""
    """Name that adapters use for the base model. Default: the model's name on the Hub, or the name
    of its folder or file."""

    tokenizer: Annotated[bool, MODEL] = True
    """Load the model's tokenizer. If off, requests and responses contain token ids only; text,
    chats and stop strings are refused."""

    tool_parser: Annotated[ToolParser, MODEL] = "auto"
    """Syntax in which the model writes calls of tools. auto: the syntax that the chat template
    teaches. none: requests with tools are refused. An adapter's own chat template counts more."""

    aliases: Annotated[Names, MODEL] = ()
    """Additional names of the base model."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Level.COMMON, MODEL] = (
        "auto"
    )
    """Data type of weights and activations. auto: the type in the model's config."""

    quantize: Annotated[Literal["none", "int4", "int8", "fp8"], Level.COMMON, MODEL] = "none"
    """Hold the weights of the model's layers in this type, and quantise them while they are read.
    int4: in groups of up to 128. Leave it out for a checkpoint that is quantised."""

    kv_dtype: Annotated[Literal["auto", "fp8"], MODEL] = "auto"
    """Data type of keys and values. auto: as --dtype. fp8: E4M3 with a scale for each token and key
    head, about half the memory of bfloat16; answers may differ slightly."""

    max_model_len: Annotated[OptionalCount, Level.COMMON, MODEL] = 0
    """Maximum length of prompt and output together, in tokens. 0: the length in the model's config,
    or as many tokens as --kv-memory holds if that is less."""

    generation_defaults: Annotated[Literal["model", "none"], MODEL] = "model"
    """Default temperature, top_p and top_k. model: as in generation_config.json in the model's
    folder, as far as it has them. none: 1, 1 and off. Values in a request override these."""

    logprobs_mode: Annotated[Literal["raw_logprobs", "processed_logprobs"], MODEL] = "raw_logprobs"
    """Default distribution for log probabilities of generated tokens. raw_logprobs: the model's own
    distribution. processed_logprobs: the distribution that tokens are sampled from, after
    penalties, temperature, top_k, top_p and min_p."""

    listen: Annotated[Address, Level.COMMON, BASICS] = "127.0.0.1:7080"
    """Address of the gRPC server. Port 0 picks a free port; --ready-file shows which."""

    http: Annotated[OptionalAddress, Level.COMMON, BASICS] = ""
    """Address of the HTTP server with an OpenAI-compatible API. Port 0 picks a free port. If unset,
    there is no HTTP server."""

    metrics_listen: Annotated[Address, Level.COMMON, NETWORK] = "127.0.0.1:7081"
    """Address of the HTTP server for Prometheus metrics. Port 0 picks a free port."""

    store: Annotated[Addresses, Level.COMMON, BASICS] = ""
    """Addresses of the adapter store's replicas, or one host name that resolves to all of them. If
    unset, only the base model is served."""

    store_share_socket: Annotated[Path | None, STORE] = None
    """Unix socket of a store on this machine (its --share-socket), to map its images."""

    store_token_file: Annotated[Path | None, Level.COMMON, STORE] = None
    """File with the bearer token for the store. The service reads it again when it changes."""

    store_tls_ca_file: Annotated[Path | None, Level.COMMON, STORE] = None
    """CA certificates, PEM, that sign the store's certificate. If unset, the service calls the
    store without TLS."""

    store_tls_cert_file: Annotated[Path | None, STORE] = None
    """Client certificate chain, PEM, for a store that requires one."""

    store_tls_key_file: Annotated[Path | None, STORE] = None
    """Private key of --store-tls-cert-file, PEM."""

    store_allow_insecure_token: Annotated[bool, STORE] = False
    """Send the token without TLS even to a store on another machine."""

    name_ttl_seconds: Annotated[Seconds, STORE] = 300.0
    """Time for which adapter names still resolve while the store is unreachable."""

    max_loras: Annotated[Count, Level.COMMON, ADAPTERS] = 64
    """Maximum number of adapters resident at once."""

    max_rank: Annotated[Count, Level.COMMON, ADAPTERS] = 64
    """Maximum rank of an adapter. Adapters of a higher rank are refused."""

    max_added_tokens: Annotated[OptionalCount, ADAPTERS] = 1024
    """Maximum number of tokens that an adapter may add to the model's vocabulary, with rows of the
    embedding and the head. Adapters with more are refused. 0: none."""

    classifiers: Annotated[bool, ADAPTERS] = False
    """Accept adapters with a classification head of their own (`modules_to_save=["score"]`), and
    apply it to requests that classify. A model that classifies accepts them without this."""

    lora_targets: Annotated[Names, ADAPTERS] = ()
    """Modules that adapters may change, by the last part of their names, such as q_proj,v_proj.
    Adapters that change other modules are refused, and no work is done for those modules. A fused
    module means its parts: qkv_proj means q_proj, k_proj and v_proj. Default or all: any module."""

    adapter_wait_seconds: Annotated[PositiveSeconds, ADAPTERS] = 10.0
    """Maximum time that a request waits for its adapter before it fails with UNAVAILABLE. Once the
    adapter's size is known, the request gets one more second per 16 MiB."""

    adapter_dtype: Annotated[Literal["auto", "fp8"], ADAPTERS] = "auto"
    """Data type of adapters' A and B in memory and between store and server. auto: the model's
    type. fp8: E4M3 with a scale for each matrix, half the bytes of bfloat16, at a small loss of
    accuracy. On CUDA, it needs compute capability 8.9 or later."""

    pull_workers: Annotated[Count, Level.FILE, ADAPTERS] = 4
    """Number of adapters pulled at once."""

    prefetch: Annotated[bool, ADAPTERS] = True
    """Load adapters that recent traffic makes likely, before a request needs them. Prefetching uses
    a quarter of the bandwidth, and either free memory or the place of less popular adapters."""

    adapter_memory: Annotated[Bytes | None, Level.COMMON, MEMORY] = None
    """Size of the arena, the memory of resident adapters. Default on CPU: 256 MiB; for a mixture of
    experts additionally the size of one adapter of --max-rank on all experts, up to a quarter of
    free memory. Default on CUDA: a tenth of the memory that the weights leave, at least two
    adapters of --max-rank (for a mixture of experts at most a quarter of that memory), at most
    --max-loras adapters."""

    host_memory: Annotated[OptionalBytes | None, Level.COMMON, MEMORY] = None
    """Size of the host tier, which keeps adapters one copy away from the arena. Default on CUDA:
    four times the arena, at most a quarter of the host's available memory. Default on CPU: 0,
    because adapters are pulled directly into the arena."""

    kv_memory: Annotated[Bytes | None, Level.COMMON, MEMORY] = None
    """Memory for keys and values. Default on CPU: 512 MiB. Default on CUDA: all device memory that
    nothing else needs, less one percent of the device."""

    memory_limit: Annotated[Bytes | None, Level.FILE, MEMORY] = None
    """Maximum memory on the device that computes; the service refuses to start if it needs more.
    Default on CPU: the memory that machine and container leave. On CUDA: the device's memory."""

    host_memory_limit: Annotated[Bytes | None, Level.FILE, MEMORY] = None
    """Maximum memory on the host of a CUDA device; the service refuses to start if it needs more.
    Set it on machines whose memory grows with use. Default: the memory that the machine and
    container leave. On CPU, use memory-limit, which covers all memory."""

    page_size: Annotated[Count, MEMORY] = 16
    """Number of tokens per page of keys and values."""

    prefix_cache: Annotated[bool, MEMORY] = True
    """Share the keys and values of equal prompt prefixes between requests, and the recurrent states
    of models that have them."""

    state_interval_tokens: Annotated[OptionalCount, MEMORY] = 0
    """For models with recurrent layers: distance of the prompt positions at which the prefix cache
    stores a state, in tokens; a multiple of --page-size. A shared prefix is reused up to the last
    stored state. A lower value stores more states for each prompt. 0: 512, rounded up to whole
    pages. Other models ignore it."""

    stored_states: Annotated[OptionalCount | None, MEMORY] = None
    """For models with recurrent layers: number of states for the prefix cache, in addition to two
    for each request that may run; loadout info shows the size of one. While fewer requests run, the
    cache uses their states, too. 0: prefixes are not reused. Default: as many as --kv-memory has
    tokens for, within a part of the memory: on CPU a sixteenth of the free memory, on CUDA an
    eighth of the memory that the weights leave. Other models ignore it."""

    max_sequences: Annotated[OptionalCount, SCHEDULING] = 0
    """Maximum number of requests that run at once. 0: 64 on CPU; on CUDA 256, halved until a step
    needs at most an eighth of the memory that the weights leave. For models with recurrent layers
    at most as many as have room for their states in a sixteenth of the free memory (CPU), or a
    quarter of the memory that the weights leave (CUDA)."""

    max_batch_tokens: Annotated[OptionalCount, SCHEDULING] = 0
    """Maximum tokens per step, at least --max-sequences. More make prompts faster and each step
    longer. 0: 512 on CPU, more for small encoders; on CUDA 8192, halved as --max-sequences."""

    max_queue: Annotated[OptionalCount, SCHEDULING] = 1024
    """Maximum number of waiting requests. Further requests fail with RESOURCE_EXHAUSTED."""

    tenant_share: Annotated[float, Field(gt=0, le=1), SCHEDULING] = 0.5
    """Maximum share of --max-queue that one tenant may use, if --policy-file defines tenants. The
    same share applies to the part that other tenants leave free of --request-memory,
    --answer-memory, HTTP connections, threads for parsing and tokenization, and, for pinned
    adapters, --max-loras and --adapter-memory."""

    request_memory: Annotated[Size, Field(ge=4 * MIB), MEMORY] = ByteSize(64 * MIB)
    """Maximum memory for requests that are being received, parsed and tokenized. Further requests
    wait up to 10 seconds, then fail with RESOURCE_EXHAUSTED. At least 4 MiB, the largest request.
    --tenant-share limits each tenant."""

    answer_memory: Annotated[Size, Field(ge=4 * MIB), MEMORY] = ByteSize(256 * MIB)
    """Maximum memory for output that callers have not read yet; a request counts at least 16 KiB,
    and ends with RESOURCE_EXHAUSTED if it does not fit. --tenant-share limits each tenant."""

    max_prompt_images: Annotated[OptionalCount | None, MODEL] = None
    """For models that read images: maximum number of images in a request. 0: text alone. Default: 8
    if the model has a processor's file, otherwise 0."""

    prompt_image_memory: Annotated[Size | None, Field(ge=2 * MIB), MEMORY] = None
    """For models that read images: one half for pixels of open requests, on the host, and one for
    embeddings, on the device; a quarter more, on the host, for uploaded files. Default: 512 MiB, or
    as the largest image's embeddings need."""

    image_hosts: Annotated[Names, AfterValidator(checked_entries), ORIGINS, SECURITY] = ()
    """Hosts from which the HTTP server may fetch images that callers name by URL: HOST or HOST:PORT
    for https, http://HOST:PORT for plain HTTP. Default: none."""

    image_tls_ca_file: Annotated[Path | None, SECURITY] = None
    """CA certificates, PEM, that sign certificates of --image-hosts. If unset, the system's."""

    fair_quantum_tokens: Annotated[Count, Level.FILE, SCHEDULING] = 1024
    """Number of tokens per turn of a tenant, and of an adapter within its tenant. A higher value
    makes turns longer and switches between adapters rarer."""

    fair_ageing_seconds: Annotated[Seconds, Level.FILE, SCHEDULING] = 2.0
    """Time for which a waiting request may be overtaken because another request's adapter is
    resident, its priority is higher or it is its adapter's turn. After that, half of the tenant's
    tokens go to such waiting requests, oldest first, and their adapters may take memory from
    adapters in use."""

    device: Annotated[Literal["auto", "cpu", "cuda"], Level.COMMON, DEVICE] = "auto"
    """Device for computation. auto: CUDA if there is a device, otherwise CPU."""

    num_threads: Annotated[OptionalCount, DEVICE] = 0
    """Number of compute threads on CPU. 0: one per core that the process may use, within the
    container's CPU quota. Hyperthreads of one core count once."""

    tensor_parallel: Annotated[int, Field(ge=1, le=64), DEVICE] = 1
    """Number of processes that compute the model together, each with a part of its weights, on CPUs
    or on a CUDA device each, of one machine or of --nnodes machines. Each takes --kv-memory and
    --adapter-memory for itself. Attention heads, heads or channels of recurrent layers, and
    feed-forward sizes must divide by it. Adapters of every kind work as with one process."""

    fully_sharded_loras: Annotated[bool, DEVICE] = False
    """With --tensor-parallel, cut A and B of all projections over the processes, so that none is
    held or pulled twice. It costs a sum over processes for each group of projections and step with
    adapters, of --max-rank numbers per token and projection. Adapters with DoRA are refused."""

    expert_parallel: Annotated[int, Field(ge=1, le=64), DEVICE] = 1
    """Number of parts into which a mixture's experts are divided. 1: each process of
    --tensor-parallel has a slice of every expert. As many as processes: each has some of the
    experts, whole. It must divide --tensor-parallel and the number of experts."""

    pipeline_parallel: Annotated[int, Field(ge=1, le=64), DEVICE] = 1
    """Number of stages, each with some of the layers, and --tensor-parallel processes for these."""

    nnodes: Annotated[int, Field(ge=1, le=64), NODES] = 1
    """Number of machines on which the processes of --tensor-parallel and --pipeline-parallel run,
    as many on each. Start the same command on each machine, with its --node-rank."""

    node_rank: Annotated[OptionalCount, NODES] = 0
    """Number of this machine: 0 to --nnodes - 1. Machine 0 serves; the others compute for it, and
    have nothing but a page for probes and metrics at --metrics-listen."""

    rendezvous: Annotated[Meeting, NODES] = ""
    """Address of machine 0, at which the other machines reach it. All of them need
    rendezvous-token, too. The machines also connect to further ports of each other, which no token
    protects: give them a network of their own."""

    rendezvous_timeout_seconds: Annotated[PositiveSeconds, NODES] = 600.0
    """Maximum time that machines wait for each other at the start."""

    rendezvous_token: Annotated[SecretStr | None, Metavar("TOKEN"), Level.FILE, NODES] = None
    """Secret of at least 16 characters by which the machines of --nnodes know each other; the same
    on all of them. Set it in the environment."""

    native_kernels: Annotated[bool, Level.FILE, DEVICE] = True
    """Compute on CPU with the C++ kernels if they are built, otherwise with torch."""

    cuda_graphs: Annotated[bool, DEVICE] = True
    """Record decode steps, and steps with prompts of up to 2,048 tokens, as CUDA graphs."""

    engine: Annotated[Literal["process", "thread"], DEVICE] = "process"
    """Where the engine runs: in its own process, or in a thread of the server's process."""

    step_timeout_seconds: Annotated[Seconds, DEVICE] = 150.0
    """Time without a response from the engine after which it counts as hung: its requests end with
    UNAVAILABLE and the server exits. Health is NOT_SERVING after 120 seconds. Compilation and
    recording at start do not count. 0: never."""

    fault_hold_seconds: Annotated[Seconds, DEVICE] = 30.0
    """Time that a server stays up, without serving, after its device has failed. Prometheus can
    then record why, and a broken device is not retried at once. 0: none."""

    http_open_metrics: Annotated[bool, SECURITY] = False
    """Serve /metrics of --http without a token. It contains the vllm:* metrics that gateways route
    by, which name the adapters of all tenants."""

    metrics_adapters: Annotated[int, Field(ge=0, le=200), TELEMETRY] = 50
    """Number of adapters (busiest first) exported as separate series; the others are aggregated."""

    log_prompts: Annotated[bool, TELEMETRY] = False
    """Include the prompt in the log line of each finished request."""

    @field_validator("model", mode="before")
    @classmethod
    def _check_model(cls, value: object) -> object:
        if not isinstance(value, str | Path):
            return value
        if Path(value).is_dir():
            is_model = (Path(value) / "config.json").is_file() or any(Path(value).glob("*.gguf"))
            if not is_model:
                raise ValueError(
                    f"{value} has no config.json and no .gguf file: name the folder of a model"
                )
        elif Path(value).suffix == ".gguf":
            if not Path(value).is_file():
                raise ValueError(f"there is no file {value}")
        else:
            split_hub_name(str(value))
        return value

    @model_validator(mode="after")
    def _check_base_model(self) -> Self:
        if not self.base_model and not name_of_files(self.model):
            raise ValueError("--base-model is required: the model's folder has no name")
        return self

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        if 0 < self.max_batch_tokens < self.max_sequences:
            raise ValueError(
                f"--max-sequences {self.max_sequences} exceeds --max-batch-tokens "
                f"{self.max_batch_tokens}: each takes at least one token of a step"
            )
        return self

    @model_validator(mode="after")
    def _check_state_interval(self) -> Self:
        interval, size = self.state_interval_tokens, self.page_size
        if interval % size:
            raise ValueError(
                f"--state-interval-tokens {interval} is not a multiple of --page-size {size}: "
                f"states are stored at the ends of pages; use {-(-interval // size) * size}"
            )
        return self

    @model_validator(mode="after")
    def _check_expert_parallel(self) -> Self:
        parts, ranks = self.expert_parallel, self.tensor_parallel
        if ranks % parts:
            fits = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            raise ValueError(
                f"--expert-parallel {parts} does not divide --tensor-parallel {ranks}; "
                f"numbers that do: {fits}"
            )
        return self

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.num_ranks % self.nnodes:
            raise ValueError(
                f"{self.num_ranks} processes (--tensor-parallel, --pipeline-parallel) do not "
                f"divide by --nnodes {self.nnodes}: each machine has as many"
            )
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"--node-rank {self.node_rank} is not below --nnodes {self.nnodes}: machines are "
                "counted from 0"
            )
        if self.nnodes == 1:
            return self
        if not self.rendezvous:
            raise ValueError("--rendezvous is required with --nnodes: machine 0's address")
        if self.rendezvous_token is None:
            raise ValueError(
                "LOADOUT_INFERENCE_RENDEZVOUS_TOKEN is required with --nnodes: a secret that all "
                f"machines have, of at least {MIN_TOKEN_CHARS} characters, such as "
                "`openssl rand -hex 32` prints"
            )
        return self

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @field_validator("rendezvous_token")
    @classmethod
    def _check_token(cls, value: SecretStr | None) -> SecretStr | None:
        # Files of Secrets often end in a line break.
        text = "" if value is None else value.get_secret_value().strip()
        if text and len(text) < MIN_TOKEN_CHARS:
            raise ValueError(f"must have at least {MIN_TOKEN_CHARS} characters")
        return SecretStr(text) if text else None

    @property
    def store_addresses(self) -> tuple[str, ...]:
        """The addresses in `store`, each once."""
        return tuple(dict.fromkeys(split_commas(self.store)))

    @property
    def share(self) -> float:
        """One tenant's share of each limited resource. Without a policy all callers are one
        tenant."""
        return 1.0 if self.policy_file is None else self.tenant_share

    @property
    def base_model_names(self) -> tuple[str, ...]:
        """The base model's name, then its aliases, each once."""
        name = self.base_model or name_of_files(self.model)
        return tuple(dict.fromkeys((name, *self.aliases)))


def split_hub_name(model: str) -> tuple[str, str | None]:
    """Returns a model's name on the Hugging Face Hub and its revision, of NAME or NAME@REVISION.
    Raises ValueError for any other form."""
    found = _HUB_NAME.fullmatch(model)
    if found is None:
        raise ValueError(NO_MODEL.format(redact(model)))
    return found[1], found[2]
