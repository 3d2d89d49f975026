"""The sizes of the stages' measurements: Llama-3-8B, or tiny ones in emulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kernels.recurrence import DeltaHeads

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
"""16 bits as on the device, but fp16, because the interpreter's products of bf16 are wrong."""


QWEN_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
QWEN_PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor"}


def _reader(text: dict[str, Any], vision: dict[str, Any], sections: list[int]) -> dict[str, Any]:
    """Returns the config of a model like Qwen2.5-VL with a text part of these sizes, which the
    other stages have compiled kernels for."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    others = {"model_type": "qwen2_5_vl_text", "rope_parameters": rope}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": text["torch_dtype"],
        "image_token_id": 0,
        "tie_word_embeddings": False,
        "text_config": {k: v for k, v in text.items() if k != "architectures"} | others,
        "vision_config": vision | {"out_hidden_size": text["hidden_size"]},
    }


class Mixture(NamedTuple):
    """The experts of one layer, some of which compute each token."""

    num_experts: int
    num_chosen: int
    hidden: int
    intermediate: int


QWEN3_30B = Mixture(128, 8, 2048, 768)
"""The experts of Qwen3-30B-A3B."""


QWEN3_5_4B = DeltaHeads(16, 32, 128, 128)
"""The heads of the gated delta nets of Qwen3.5-4B."""


class ServiceSizes(NamedTuple):
    """Sizes of the loads over gRPC, and the inference service's memory for keys and values, for
    adapters on the device, and on the host."""

    adapters: int
    prompt_tokens: int
    new_tokens: int
    streams: tuple[int, ...]
    long_streams: int
    """Streams with long prompts, at most as many as there are adapters."""
    long_prompt_tokens: int
    kv_bytes: int
    adapter_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stages' measurements. Contexts and prompts are in tokens."""

    config: dict[str, Any]
    dtype: torch.dtype
    page_size: int
    max_tokens: int
    """Maximum tokens of a step."""
    rank: int
    """The rank of the adapters in whole steps."""
    rows: tuple[int, ...]
    """Numbers of decode rows, the largest last."""
    goal_rows: tuple[int, ...]
    contexts: tuple[int, ...]
    long_context: int
    """The context of one row whose other rows have the first of `contexts`."""
    warm_up_steps: int
    steps: int
    loop_rows: tuple[int, ...]
    """Rows of the whole engine's loop."""
    prompts: tuple[int, ...]
    load_rows: int
    load_images: int
    """Adapters in host memory; half of them decode while the others are loaded."""
    load_steps: int
    copy_bytes: int
    """Bytes to copy within the device's memory, to measure its rate."""
    host_copy_bytes: int
    square: int
    """Rows and columns of the matrices whose product measures the peak."""
    nodes: int
    """Nodes of the graph of empty kernels."""
    kernel_rows: tuple[int, ...]
    kernel_tokens: tuple[int, ...]
    """Lengths of prompts."""
    quantised_rows: tuple[int, ...]
    """Rows of products with weights in few bits."""
    ranks: tuple[int, ...]
    max_groups: int
    """Maximum groups of projections with adapters, including the output head's."""
    case_bytes: int
    """Memory that the calls of one measurement touch, many times the size of a cache."""
    max_calls: int
    parity_requests: int
    """Maximum requests from the pack."""
    parity_tokens: int
    """Maximum tokens of each request."""
    mixture: Mixture
    delta: DeltaHeads
    services: ServiceSizes
    reader: dict[str, Any]
    """The config of a model that reads pictures."""
    reader_processor: dict[str, Any]
    picture: tuple[int, int]
    """The sides of a picture, in pixels."""
    picture_steps: int
    """Decode steps beside pictures."""
    tune_configs: int
    """Maximum configurations of a kernel."""
    tune_problems: int
    """Maximum problems for each kernel."""


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
    quantised_rows=(1, 4, 16, 256),
    ranks=(16, 8, 64),
    max_groups=5,
    case_bytes=512 << 20,
    max_calls=128,
    parity_requests=200,
    parity_tokens=64,
    mixture=QWEN3_30B,
    delta=QWEN3_5_4B,
    services=ServiceSizes(
        adapters=16,
        prompt_tokens=64,
        new_tokens=64,
        streams=(32, 128),
        long_streams=8,
        long_prompt_tokens=1000,
        kv_bytes=16 << 30,
        adapter_bytes=4 << 30,
        host_bytes=4 << 30,
    ),
    reader=_reader(LLAMA_8B, QWEN_VISION, [16, 24, 24]),
    reader_processor=QWEN_PROCESSOR,
    picture=(1036, 1036),
    picture_steps=400,
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
    quantised_rows=(1, 20),
    ranks=(4,),
    max_groups=2,
    case_bytes=1,
    max_calls=2,
    parity_requests=3,
    parity_tokens=2,
    mixture=Mixture(4, 2, 32, 16),
    delta=DeltaHeads(1, 2, 16, 16),
    services=ServiceSizes(
        adapters=2,
        prompt_tokens=5,
        new_tokens=4,
        streams=(2, 3),
        long_streams=2,
        long_prompt_tokens=20,
        kv_bytes=8 << 20,
        adapter_bytes=8 << 20,
        host_bytes=0,
    ),
    reader=_reader(
        TINY,
        QWEN_VISION
        | {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
        | {"window_size": 56, "fullatt_block_indexes": [1]},
        [2, 3, 3],
    ),
    reader_processor=QWEN_PROCESSOR,
    picture=(56, 56),
    picture_steps=2,
    tune_configs=1,
    tune_problems=1,
)
