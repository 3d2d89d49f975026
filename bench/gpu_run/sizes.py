"""How much the stages measure: of Llama-3-8B, or of next to nothing in emulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TINY: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "torch_dtype": "float16",
}
"""16 bits as on the device: the interpreter's products of bf16 are wrong."""


class Mixture(NamedTuple):
    """Experts of one layer, of which each token has some."""

    num_experts: int
    num_chosen: int
    hidden: int
    intermediate: int


QWEN3_30B = Mixture(128, 8, 2048, 768)
"""Of Qwen3-30B-A3B."""


@dataclass(frozen=True)
class Sizes:
    """What the stages measure. Contexts and prompts are in tokens."""

    config: dict[str, Any]
    dtype: torch.dtype
    page_size: int
    max_tokens: int
    """The most tokens of a step."""
    rank: int
    """The rank of the adapters in whole steps."""
    rows: tuple[int, ...]
    """Decode rows, of which the last are the most."""
    goal_rows: tuple[int, ...]
    contexts: tuple[int, ...]
    long_context: int
    """The context of one row among others of the first of `contexts`."""
    warm_up_steps: int
    steps: int
    loop_rows: tuple[int, ...]
    """Rows of the whole engine's loop."""
    prompts: tuple[int, ...]
    load_rows: int
    load_images: int
    """Adapters in host memory: half of them decode while the others are loaded."""
    load_steps: int
    copy_bytes: int
    """Of the device's own memory, copied to learn how fast it is."""
    host_copy_bytes: int
    square: int
    """Of the matrices that are multiplied to learn the peak."""
    nodes: int
    """Of the graph of empty kernels."""
    kernel_rows: tuple[int, ...]
    kernel_tokens: tuple[int, ...]
    """Lengths of prompts."""
    ranks: tuple[int, ...]
    max_groups: int
    """Of projections with adapters, the output head's among them."""
    case_bytes: int
    """Memory that the calls of one measurement touch, many times a cache's."""
    max_calls: int
    parity_requests: int
    """At most so many of those in the pack."""
    parity_tokens: int
    """At most so many tokens of each."""
    mixture: Mixture
    tune_configs: int
    """At most so many configurations of a kernel."""
    tune_problems: int
    """At most so many problems for each."""


REAL = Sizes(
    config=LLAMA_8B,
    dtype=torch.bfloat16,
    page_size=16,
    max_tokens=4096,
    rank=16,
    rows=(1, 8, 32, 64, 128, 256),
    goal_rows=(1, 32),
    contexts=(512, 4096),
    long_context=32768,
    warm_up_steps=5,
    steps=30,
    loop_rows=(1, 32, 128),
    prompts=(32, 128, 512, 2048, 4096),
    load_rows=32,
    load_images=32,
    load_steps=600,
    copy_bytes=1 << 31,
    host_copy_bytes=1 << 28,
    square=8192,
    nodes=1000,
    kernel_rows=(1, 8, 32, 128),
    kernel_tokens=(128, 2048),
    ranks=(16, 8, 64),
    max_groups=5,
    case_bytes=512 << 20,
    max_calls=128,
    parity_requests=200,
    parity_tokens=64,
    mixture=QWEN3_30B,
    tune_configs=64,
    tune_problems=32,
)

EMULATED = Sizes(
    config=TINY,
    dtype=torch.float16,
    page_size=4,
    max_tokens=12,
    rank=4,
    rows=(1, 2),
    goal_rows=(1, 2),
    contexts=(6,),
    long_context=20,
    warm_up_steps=0,
    steps=1,
    loop_rows=(2,),
    prompts=(2, 8),
    load_rows=2,
    load_images=4,
    load_steps=2,
    copy_bytes=1 << 16,
    host_copy_bytes=1 << 16,
    square=64,
    nodes=3,
    kernel_rows=(1, 2),
    kernel_tokens=(8,),
    ranks=(4,),
    max_groups=2,
    case_bytes=1,
    max_calls=2,
    parity_requests=3,
    parity_tokens=2,
    mixture=Mixture(4, 2, 32, 16),
    tune_configs=1,
    tune_problems=1,
)
