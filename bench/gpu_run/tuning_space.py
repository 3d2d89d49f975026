"""The constants that the stage `tune` tries, of our kernels and of the peers'."""

from __future__ import annotations

Constants = dict[str, int]

SPACE: dict[str, dict[str, tuple[int, ...]]] = {
    "shrink": {
        "chunk": (256, 1024),
        "split_tokens": (64, 1 << 20),
        "block_k": (128, 512),
        "tile_block_r": (16, 64),
        "tile_block_k": (32, 128),
        "num_warps": (2, 8),
        "num_stages": (2, 4),
    },
    "expand": {
        "block_n": (64, 256),
        "programs": (264, 528, 2112),
        "max_blocks": (1, 4, 16),
        "tile_block_r": (16, 64),
        "num_warps": (2, 8),
        "num_stages": (2, 4),
    },
    "decode": {
        "block_n": (32, 128),
        "programs": (264, 396, 792, 1056),
        "num_warps": (2, 8),
        "num_stages": (2, 4),
    },
    "segments": {"positions": (64, 256, 512)},
    "combine": {"block_s": (8, 32), "num_warps": (2, 8)},
    "prefill": {
        "max_registers": (168, 255),
        "block_n": (32, 128),
        "num_warps": (4,),
        "num_stages": (3,),
    },
    "add_rms_norm": {"elements_per_warp": (128, 512, 1024), "max_warps": (8, 32)},
    "swiglu": {"block": (512, 2048), "elements_per_warp": (128, 512)},
    "replaced": {
        "block": (512, 2048),
        "block_m": (32,),
        "block_n": (32, 128),
        "block_k": (64, 256),
        "num_warps": (2, 8),
    },
    "store": {"many_tokens": (64, 1024), "tokens_each": (2, 4, 16)},
    "route": {"elements_per_warp": (128, 512)},
    "sort_pairs": {
        "many_pairs": (1024, 8192),
        "block": (16, 64),
        "chunk": (128, 512),
        "count_block": (128, 512),
        "num_warps": (2, 8),
        "scan_block": (4096,),
    },
    "experts_short": {
        "block_m": (32,),
        "block_n": (128,),
        "block_k": (64, 256),
        "group": (1, 32),
        "num_warps": (8,),
        "num_stages": (3, 5),
    },
    "experts_middle": {
        "block_n": (64, 256),
        "block_k": (128,),
        "group": (1, 32),
        "num_warps": (8,),
        "num_stages": (3,),
    },
    "experts_long": {
        "block_m": (64, 256),
        "block_n": (256,),
        "group": (1, 32),
        "num_warps": (4,),
        "num_stages": (2, 4),
    },
    "quantised_narrow": {
        "block_n": (16, 64, 128),
        "row_bytes": (64, 256),
        "programs": (264, 528),
        "num_warps": (2, 8),
        "num_stages": (3, 4, 8),
    },
    "quantised_wide": {
        "block_n": (32, 64),
        "row_bytes": (128, 256),
        "programs": (264, 528),
        "num_warps": (2, 8),
        "num_stages": (3, 6),
    },
    "quantised_sum": {"block": (512, 2048), "elements_per_warp": (128,)},
    "quantised_short": {
        "block_m": (32,),
        "block_n": (128,),
        "row_bytes": (32, 128),
        "tiles": (1, 32),
        "num_warps": (8,),
        "num_stages": (3, 6),
    },
    "quantised_middle": {
        "block_n": (64,),
        "row_bytes": (32,),
        "tiles": (1, 32),
        "num_warps": (8,),
        "num_stages": (4, 6),
    },
    "quantised_long": {
        "block_m": (64, 256),
        "block_n": (64, 256),
        "row_bytes": (64,),
        "tiles": (1, 32),
        "num_warps": (4,),
        "num_stages": (3, 4),
    },
    "quantised_inputs": {"block": (2048, 8192), "elements_per_warp": (128, 512)},
    "combine_experts": {"block": (256, 1024), "elements_per_warp": (128,)},
    "plan_pairs": {"block": (128, 512), "chunk": (1024, 4096), "num_warps": (2, 8)},
    "causal_conv": {
        "many_tokens": (8, 1 << 20),
        "block_t": (4, 16),
        "block_c": (128, 512),
        "elements_per_warp": (128, 512),
    },
    "delta_step": {"block_v": (16, 64), "num_warps": (2, 8)},
    "delta_chunks": {"block_v": (16, 64), "num_warps": (8,), "num_stages": (2, 3)},
    "gated_norm": {"block_h": (1, 8), "elements_per_warp": (128, 512)},
}
"""The other values of each constant; the defaults are in the kernels' package."""

PEER_SPACES: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {
    "vllm": {
        "shrink": {
            "block_m": (16, 64),
            "block_n": (32,),
            "block_k": (32, 64, 128, 256, 512),
            "split_k": (1, 4, 16, 32),
            "num_warps": (2, 8),
            "num_stages": (3, 4),
        },
        "expand": {
            "block_m": (16, 32),
            "block_n": (32, 64, 128, 256),
            "block_k": (16, 64),
            "num_warps": (2, 8),
            "num_stages": (3, 4),
        },
    },
    "sglang": {
        "both": {"chunk": (16, 32, 64, 128)},
        "shrink": {
            "BLOCK_N": (32, 64),
            "BLOCK_K": (64, 128, 512),
            "num_warps": (2, 8),
            "num_stages": (2, 4),
        },
        "expand": {
            "BLOCK_N": (32, 128, 256),
            "BLOCK_K": (32, 64),
            "num_warps": (2, 8),
            "num_stages": (2, 4),
        },
    },
}
"""Values from vLLM's page on tuning, and from SGLang's table for Hopper."""
SGLANG_DEFAULT: dict[str, Constants] = {
    "shrink": {"BLOCK_N": 16, "BLOCK_K": 256, "num_warps": 4, "num_stages": 3},
    "expand": {"BLOCK_N": 64, "BLOCK_K": 16, "num_warps": 4, "num_stages": 3},
}
"""The constants in SGLang's launches, and Triton's defaults for the others."""
