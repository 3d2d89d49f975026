"""What the engine is built from: one frozen object, everything resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
