"""Models the time of a decode step on an H200, from the launches that it makes.

The host's time comes first, and the device waits for it. Launches of the critical path then run one
after the other. A launch takes its latency, for which the device waits, and its work: bytes, FLOPs
and programs. On the side stream, latencies are hidden, because every product takes longer; work is
not, because the product next to it needs the same memory and SMs.

One set of constants reproduces the measured steps (`results/h200/steps.json`); a test compares. The
constants come from three sources: the ceilings of that machine, kernels measured apart, and a fit
of the six others to all 64 steps (least squares of relative errors, then rounded). Reading the
tokens back is not modelled apart: the fitted latencies include it.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from bench.gpu_model.bytes import num_segments, targets, traffic
from bench.gpu_model.launches import COMPUTE, Launch
from bench.gpu_model.step import Step, Workload
from kernels.lora.plan import ROWS_TOKENS

BYTES_PER_S = 4.67e12
"""Reading alone. Source: ceilings."""
FLOP_PER_S = 790e12
"""A large product in bf16. Source: ceilings."""
NODE_S = 0.85e-6
"""An empty kernel as a node of a graph. Source: ceilings."""
EXPOSED_SHARE = 0.3
"""Share of a product's bytes or FLOPs, of the shorter, that does not overlap with the longer.
Source: cuBLAS apart, at 1 to 256 rows."""
SHRINK_BYTES_PER_S = 2.6e12
"""Reading A. Source: shrink apart."""
BLOCK_S = 2.13e-9
"""A block of 16 ranks of B and 128 columns, on the whole device: 4 KB that pass through shared
memory, the pipe of which limits expand. Source: expand apart."""
WAVE_S = 2e-6
"""A LoRA program before its first product: loads of its item, its adapter's place, and the first
block, each of which needs the one before. Source: shrink and expand apart."""
MOST_WAVES = 2
"""From the third wave on, programs wait while others compute. Source: shrink and expand apart."""
KERNEL_S = 2.7e-6
"""A short kernel from its first load to its last store, beyond an empty one. Source: fit."""
PRODUCT_S = 4.2e-6
"""A product of matrices that fills and drains the device, beyond an empty kernel. Source: fit."""
CONTEXT_BYTES_PER_S = 4.1e12
"""Attention reading keys and values. Source: fit."""
BETWEEN_BYTES_PER_S = 2.9e12
"""Values that one launch writes and another reads, most of them in the L2 cache. Source: fit."""
EMPTY_PROGRAM_S = 1.0e-9
"""A program without work, on the whole device. It waits for one load, so this is latency. Source:
fit."""
FORK_S = 1.1e-6
"""A fork to the side stream and the join. Source: fit."""

NUM_SMS = 132
CTAS_PER_SM = {
    "route_kernel": 32,
    "rank_pairs_kernel": 4,
    "describe_pairs_kernel": 16,
    "plan_items_kernel": 4,
    "experts_linear_kernel": 2,
    "combine_experts_kernel": 21,
    "clamped_swiglu_kernel": 16,
    "add_rms_norm_kernel": 4,
    "norm_rows_kernel": 4,
    "swiglu_kernel": 16,
    "rotary_angles_kernel": 32,
    "store_kernel": 32,
    "decode_kernel": 4,
    "combine_kernel": 12,
    "causal_conv_kernel": 4,
    "delta_step_kernel": 5,
    "gated_norm_kernel": 16,
    "gate_heads_kernel": 8,
    "shrink_kernel": 6,
    "expand_kernel": 5,
}
"""Programs of a decode step's launches that fit an SM at least, from the assembler; a test
compares."""
PRODUCTS = ("linear", "mm")


class Time(NamedTuple):
    """Seconds of a launch. Latency is hidden next to a longer launch, work is not."""

    latency_s: float
    work_s: float

    @property
    def whole_s(self) -> float:
        return self.latency_s + self.work_s


def device_s(step: Step) -> float:
    """Returns the seconds that the device needs for a step."""
    critical_s = beside_s = 0.0
    for launch in step.launches:
        time = launch_time(launch, step)
        if launch.stream == COMPUTE:
            critical_s += time.whole_s
        else:
            beside_s += time.work_s
    return critical_s + beside_s + num_forks(step) * FORK_S


def num_forks(step: Step) -> int:
    """Returns how often the side stream waits for the critical path, to compute beside it."""
    return len({launch.after[COMPUTE] for launch in step.launches if launch.stream != COMPUTE})


def launch_time(launch: Launch, step: Step) -> Time:
    """Returns the time of one launch. Raises KeyError for an unknown kernel."""
    constant, read, written = traffic(launch, step)
    between_s = (sum(read) + sum(written)) / BETWEEN_BYTES_PER_S
    if launch.name in PRODUCTS:
        work_s = product_s(constant, len(launch.arguments["0"]), step.item_bytes)
        return Time(NODE_S + PRODUCT_S, work_s + between_s)
    if "first_target" in launch.arguments:
        latency_s, work_s = _lora_s(launch, step, constant)
        return Time(NODE_S + latency_s, work_s + between_s)
    rate = CONTEXT_BYTES_PER_S if launch.name == "decode_kernel" else BYTES_PER_S
    return Time(NODE_S + KERNEL_S, constant / rate + between_s)


def product_s(weight_bytes: int, rows: int, item_bytes: int) -> float:
    """Returns the seconds for a weight's bytes and the FLOPs of `rows`, which overlap in part."""
    bytes_s = weight_bytes / BYTES_PER_S
    flops_s = 2 * rows * weight_bytes / item_bytes / FLOP_PER_S
    return max(bytes_s, flops_s) + EXPOSED_SHARE * min(bytes_s, flops_s)


def _lora_s(launch: Launch, step: Step, constant: int) -> tuple[float, float]:
    """Returns the latency and the work of a launch of shrink or expand."""
    tasks = num_tasks(launch, step)
    latency_s = EMPTY_PROGRAM_S * (math.prod(launch.grid or ()) - tasks)
    if not tasks:
        return latency_s, 0.0
    waves = tasks / (CTAS_PER_SM[launch.name] * NUM_SMS)
    latency_s += WAVE_S * min(max(waves, 1), MOST_WAVES)
    if launch.name == "shrink_kernel":
        return latency_s, constant / SHRINK_BYTES_PER_S
    return latency_s, num_blocks(launch, step) * BLOCK_S


def num_blocks(launch: Launch, step: Step) -> int:
    """Returns the number of blocks of B that a launch of expand multiplies by."""
    a = launch.arguments
    columns = sum(-(-a["OUT_FEATURES"][k] // a["BLOCK_N"]) for k in targets(a, step))
    return num_items(step.work) * columns * -(-step.work.rank // 16)


def num_tasks(launch: Launch, step: Step) -> int:
    """Returns the number of programs with work: in attention one for each segment and key head, in
    LoRA the programs of targets that adapters have."""
    a = launch.arguments
    if launch.name == "decode_kernel":
        return num_segments(step) * int(a["NUM_KV_HEADS"])
    if "first_target" in a:
        return num_items(step.work) * math.prod((launch.grid or ())[1:]) * bool(targets(a, step))
    return math.prod(launch.grid or ())


def num_items(work: Workload) -> int:
    """Returns the number of LoRA's items with rows."""
    counts = Counter(row * work.adapters // work.rows for row in range(work.rows))
    return sum(-(-count // ROWS_TOKENS) for count in counts.values()) if work.adapters else 0
