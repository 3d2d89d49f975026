"""The inference service's settings: environment `LOADOUT_INFERENCE_*`, then the command line.

The command line wins over the environment. `auto` values are decided once, by `resolve`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from servicekit.settings import check_endpoint, split_address

MIB = 1 << 20
BATCH_TOKENS = {"cpu": 512, "cuda": 2048}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class InferenceSettings(BaseSettings):
    """Serve one base model with any mix of its LoRA adapters over gRPC and HTTP."""

    model_config = SettingsConfigDict(
        env_prefix="LOADOUT_INFERENCE_",
        cli_prog_name="python -m inference_svc",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_implicit_flags=True,
        use_attribute_docstrings=True,
        frozen=True,
        extra="forbid",
    )

    model: Path
    """Directory of the base model: config.json, safetensors, tokenizer.json."""

    base_model: str = ""
    """Name under which adapters know the base model. Default: the model directory's name."""

    aliases: Annotated[tuple[str, ...], NoDecode] = ()
    """Further names of the base model, separated by commas."""

    store: str = ""
    """Address of the adapter store, host:port; several replicas are separated by commas, or are
    what the host's name resolves to. Empty: serve the base model only."""

    store_token_file: Path | None = None
    """File with the bearer token that the store knows this server by, read again on changes."""

    store_tls_ca_file: Path | None = None
    """CA certificates, PEM, that sign the store's certificate. None: no TLS to the store."""

    store_tls_cert_file: Path | None = None
    """Certificate chain, PEM, shown to a store that asks for client certificates."""

    store_tls_key_file: Path | None = None
    """Private key of store_tls_cert_file, PEM."""

    store_allow_insecure_token: bool = False
    """Send the token also without TLS to a store that is not on this machine."""

    listen: str = "127.0.0.1:7080"
    """Address of the gRPC server. Port 0: any free one."""

    http: str = ""
    """Address of the HTTP front, which is compatible with OpenAI's. Port 0: any free one. Empty:
    none."""

    http_open_metrics: bool = False
    """Answer /metrics of the HTTP front also without a token, with what gateways route by: the
    vllm:* families, which name the adapters of all tenants."""

    policy_file: Path | None = None
    """TOML file with tokens; read again on SIGHUP. None: everybody who reaches this server may do
    everything."""

    allow_open_access: bool = False
    """Listen without policy_file also where other machines can connect."""

    tls_cert_file: Path | None = None
    """Certificate chain of this server, PEM; read again on SIGHUP. None: no TLS."""

    tls_key_file: Path | None = None
    """Private key of tls_cert_file, PEM."""

    tls_client_ca_file: Path | None = None
    """CA certificates, PEM: callers need a client certificate that one of them signed."""

    audit_file: Path | None = None
    """File to append a JSON line to for every load, unload, pin and unpin that is asked for;
    opened anew on SIGHUP."""

    metrics_listen: str = "127.0.0.1:7081"
    """Address of the Prometheus endpoint. Port 0: any free one."""

    metrics_adapters: int = Field(default=50, ge=0, le=200)
    """How many adapters, the busiest, have series of their own; the others are counted together."""

    otlp_endpoint: str = ""
    """Where spans are sent over OTLP with gRPC, http(s)://HOST:PORT. Empty: where
    OTEL_EXPORTER_OTLP_ENDPOINT says; without that there is no tracing. Needs the extra otel."""

    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the requests that are traced, 0 to 1, of those whose callers do not say whether they
    are. None: as OTEL_TRACES_SAMPLER says, else all."""

    ready_file: Path | None = None
    """Written once serving, as JSON: {"grpc": "host:port", "metrics": "host:port"}, and "http" if
    it is served."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. auto: as the model's config says."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute. auto: CUDA if there is one."""

    max_model_len: int = Field(default=0, ge=0)
    """Longest prompt plus output, in tokens. 0: as the model's config says, and kv_memory holds."""

    max_sequences: int = Field(default=64, ge=1)
    """Most requests that run at once."""

    max_batch_tokens: int = Field(default=0, ge=0)
    """Most tokens computed in one step: a larger one is better used, and generation waits for it.
    0: 512 on CPU, 2048 on CUDA, and at least max_sequences."""

    max_queue: int = Field(default=1024, ge=0)
    """Most requests that wait; more are refused with RESOURCE_EXHAUSTED."""

    tenant_queue_share: float = Field(default=0.5, gt=0, le=1)
    """Most of max_queue that one tenant's requests may take, where policy_file tells tenants
    apart."""

    fair_quantum_tokens: int = Field(default=1024, ge=1)
    """Tenants, and within a tenant its adapters, take turns of so many tokens. More: longer turns,
    fewer changes of adapters."""

    fair_ageing_seconds: float = Field(default=2.0, ge=0)
    """How long others may pass a waiting request because their adapters are resident, their
    priority is higher or it is their adapter's turn. From then on half of its tenant's tokens go to
    such requests, the oldest first, and the other half by priority and turns of adapters as before,
    so that it waits at most twice as long as for those that came before it; and its adapter gets
    room from others that are in use."""

    page_size: int = Field(default=16, ge=1)
    """Tokens per page of keys and values."""

    kv_memory: ByteSize | None = Field(default=None, gt=0)
    """Bytes for keys and values, such as 512MiB. Unset: 512MiB on CPU; on CUDA what the weights,
    the arena and a tenth for activations leave."""

    adapter_memory: ByteSize = Field(default=ByteSize(256 * MIB), gt=0)
    """Bytes of the arena, where resident adapters lie: 256MiB if not set."""

    host_memory: ByteSize | None = Field(default=None, ge=0)
    """Bytes of host memory that keeps adapters one copy away from the arena. Unset: 1GiB on CUDA; 0
    on CPU, where adapters are pulled straight into the arena."""

    memory_limit: ByteSize | None = Field(default=None, gt=0)
    """Bytes that all of it may take together on the device that computes; more is refused at start.
    Unset: on CPU what the machine and its container leave, on CUDA what the device has."""

    max_loras: int = Field(default=64, ge=1)
    """Most adapters resident at once."""

    max_lora_rank: int = Field(default=64, ge=1)
    """Adapters of a larger rank are refused."""

    adapter_wait_seconds: float = Field(default=10.0, gt=0)
    """A request whose adapter is not resident by then ends UNAVAILABLE."""

    name_ttl_seconds: float = Field(default=300.0, ge=0)
    """How long adapter names keep resolving while the store is unreachable."""

    pull_workers: int = Field(default=4, ge=1)
    """Adapters pulled at once."""

    prefetch: bool = True
    """Load adapters that recent traffic suggests before they are asked for, with a quarter of the
    bandwidth and into free memory or in place of what is less popular."""

    prefix_cache: bool = True
    """Share the keys and values of equal prefixes between requests."""

    grace_seconds: float = Field(default=30.0, ge=0)
    """After SIGTERM, how long running requests may take to finish."""

    engine: Literal["process", "thread"] = "process"
    """Where the engine runs: in a process of its own, or in a thread beside the gRPC server."""

    num_threads: int = Field(default=0, ge=0)
    """Threads that compute on CPU. 0: one per core, of those that the process is bound to and that
    its container's CPU quota pays for."""

    native_kernels: bool = True
    """Compute on CPU with the kernels in C++, where there are any; else in torch."""

    cuda_graphs: bool = True
    """On CUDA record decode steps once, at start, and replay them."""

    log_format: Literal["text", "json"] = "text"
    """One line per event, for people or for machines."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important event that is logged."""

    log_prompts: bool = False
    """Write the prompt into the line that is logged of each finished request."""

    @field_validator("aliases", mode="before")
    @classmethod
    def _split_aliases(cls, value: object) -> object:
        return _split(value) if isinstance(value, str) else value

    @field_validator("store")
    @classmethod
    def _check_store(cls, value: str) -> str:
        for address in _split(value):
            split_address(address)
        return value

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _check_address(cls, value: str) -> str:
        split_address(value)
        return value

    @field_validator("http")
    @classmethod
    def _check_http(cls, value: str) -> str:
        if value:
            split_address(value)
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_otlp(cls, value: str) -> str:
        return check_endpoint(value)

    @field_validator("model")
    @classmethod
    def _check_model(cls, value: Path) -> Path:
        if not (value / "config.json").is_file():
            raise ValueError(f"{value} holds no config.json")
        return value

    @model_validator(mode="after")
    def _check_base_model(self) -> Self:
        if not self.base_model and not self.model.resolve().name:
            raise ValueError("base_model is needed: the model directory has no name")
        return self

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        if 0 < self.max_batch_tokens < self.max_sequences:
            raise ValueError(
                f"--max-sequences {self.max_sequences} exceeds --max-batch-tokens "
                f"{self.max_batch_tokens}: each takes at least one token of a step"
            )
        return self

    @property
    def store_addresses(self) -> tuple[str, ...]:
        """The addresses in `store`, each once."""
        return tuple(dict.fromkeys(_split(self.store)))

    @property
    def base_model_names(self) -> tuple[str, ...]:
        """The base model's name, then its aliases, each once."""
        name = self.base_model or self.model.resolve().name
        return tuple(dict.fromkeys((name, *self.aliases)))


def _split(value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


def parse_command_line(args: list[str]) -> InferenceSettings:
    """Settings from the environment and `args`. Help, or what is wrong in one line, exits."""
    try:
        return InferenceSettings(_cli_parse_args=args)  # type: ignore[call-arg]
    except ValidationError as error:
        raise SystemExit(f"error: {_one_line(error)}") from None


def _one_line(error: ValidationError) -> str:
    problems = []
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0]) if problem["loc"] else ""
        message = problem["msg"].removeprefix("Value error, ")
        problems.append(f"--{name.replace('_', '-')}: {message}" if name else message)
    return "; ".join(problems)


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides "auto": `free_bytes` of device memory beside the weights (CUDA only)."""

    has_cuda: bool
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the model's config says; `kv_elements_per_token` are the keys and values it keeps."""

    dtype: str
    max_position_embeddings: int
    kv_elements_per_token: int


def resolve(config: InferenceSettings, machine: Machine, model: ModelFacts) -> InferenceSettings:
    """`config` with every "auto" decided.

    Raises ValueError when a setting asks for what is not there.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if machine.has_cuda else "cpu"
    elif device == "cuda" and not machine.has_cuda:
        raise ValueError("device is cuda, and there is none")
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {dtype} of the model is not supported: choose one")
    host_memory = config.host_memory
    if host_memory is None:
        host_memory = ByteSize(0 if device == "cpu" else 1024 * MIB)
    kv_memory = config.kv_memory or _kv_memory(config, device, machine)
    page_bytes = config.page_size * model.kv_elements_per_token * ITEM_BYTES[dtype]
    num_pages = max(0, kv_memory // page_bytes - padding_pages(device))
    kv_tokens = num_pages * config.page_size
    return config.model_copy(
        update={
            "base_model": config.base_model_names[0],
            "device": device,
            "dtype": dtype,
            "max_batch_tokens": config.max_batch_tokens
            or max(BATCH_TOKENS[device], config.max_sequences),
            "max_model_len": _max_model_len(config, model, kv_tokens),
            "kv_memory": ByteSize(kv_memory),
            "host_memory": host_memory,
        }
    )


def _max_model_len(config: InferenceSettings, model: ModelFacts, kv_tokens: int) -> int:
    longest = model.max_position_embeddings
    if config.max_model_len > longest:
        raise ValueError(f"max_model_len {config.max_model_len} exceeds the model's {longest}")
    needed = max(config.max_model_len, 2)
    if needed > kv_tokens:
        raise ValueError(f"kv_memory holds {kv_tokens} tokens; at least {needed} are needed")
    return config.max_model_len or min(longest, kv_tokens)


def _kv_memory(config: InferenceSettings, device: str, machine: Machine) -> int:
    if device == "cpu":
        return 512 * MIB
    left = int(machine.free_bytes * 0.9) - config.adapter_memory
    if left <= 0:
        raise ValueError(
            f"adapter_memory leaves no room for pages in {machine.free_bytes} free bytes"
        )
    return left


def padding_pages(device: str) -> int:
    """Pages of keys and values that no sequence may own: on a device what padding writes goes to
    one of them."""
    return int(device != "cpu")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`dtype` and `device` are resolved ("float32", "cpu"); sizes in bytes.

    `host_bytes` 0: no host tier, pulls write straight into the arena (CPU only).
    `num_threads` 0: one per core that this process may use.
    `memory_limit_bytes` 0: on CPU what the machine leaves, on CUDA what the device has.
    `frontend_bytes` is what the process takes that the engine serves from a process of its own,
    `tokenizer_bytes` what it will take beside that when its tokenizer is loaded.
    """

    model_dir: Path
    base_model: str
    aliases: tuple[str, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    max_model_len: int = 2048
    max_sequences: int = 64
    max_batch_tokens: int = 1024
    max_prefill_chunk: int = 1024
    max_queue: int = 1024
    max_tenant_queue: int = 1024
    page_size: int = 16
    kv_bytes: int = 256 << 20
    arena_bytes: int = 256 << 20
    host_bytes: int = 0
    memory_limit_bytes: int = 0
    frontend_bytes: int = 0
    tokenizer_bytes: int = 0
    max_loras: int = 256
    max_lora_rank: int = 64
    adapter_wait_s: float = 10.0
    fair_quantum: int = 1024
    fair_ageing_s: float = 2.0
    pull_workers: int = 4
    prefetch: bool = True
    prefix_cache: bool = True
    num_threads: int = 0
    native_kernels: bool = True
    cuda_graphs: bool = True
