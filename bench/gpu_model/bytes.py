"""Counts the bytes that the launches of a decode step read and write, and the step's minimum.

A launch reads each input once, even if several of its programs read it, because later reads come
from the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from bench.gpu_model.launches import Launch
from bench.gpu_model.step import Step
from bench.gpu_run.model import context_bytes
from inference_svc.model.recurrent_states import slot_bytes
from kernels.attention.plan import segment_starts

CACHE_BYTES = 25 << 20
"""Half of an H200's L2 cache. A smaller tensor is still there when the next launch reads it."""


class Traffic(NamedTuple):
    """Bytes of one launch. `constant` counts weights, keys and values, adapters, and recurrent
    states, read and written, which are in memory before the step. `read` and `written` have the
    size of each tensor that passes from one launch to another."""

    constant: int
    read: tuple[int, ...]
    written: tuple[int, ...]

    @property
    def all_bytes(self) -> int:
        return self.constant + sum(self.read) + sum(self.written)

    @property
    def memory_bytes(self) -> int:
        """All bytes except tensors that stay in the cache."""
        between = (*self.read, *self.written)
        return self.constant + sum(each for each in between if each > CACHE_BYTES)


def traffic(launch: Launch, step: Step) -> Traffic:
    """Counts one launch of `step`. Raises KeyError for an unknown kernel."""
    if launch.name in ELEMENTWISE:
        weights = {id(tensor) for tensor in step.weights}
        constant = sum(each.nbytes for each in launch.tensors if id(each) in weights)
        read = (each for each in launch.tensors if id(each) not in weights)
        return Traffic(constant, _sizes(*read), _sizes(*launch.outputs))
    return COUNTS[launch.name](launch.arguments, step)


def floor_bytes(step: Step) -> int:
    """Returns the bytes that any implementation of the step reads: the weights except tables by
    token, the keys and values that every row sees in each layer, and each adapter once. It also
    reads and writes each recurrent state."""
    work = step.work
    tables = {id(table) for table in step.tables}
    weights = sum(tensor.nbytes for tensor in step.weights if id(tensor) not in tables)
    contexts = work.rows * context_bytes(step.decoder, work.context, step.item_bytes)
    states = 2 * work.rows * slot_bytes(step.decoder)
    return weights + contexts + states + work.adapters * step.adapter_bytes


Arguments = dict[str, Any]


def _sizes(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(tensor.nbytes for tensor in tensors if tensor is not None)


def _linear(a: Arguments, step: Step) -> Traffic:
    x, weight = a["0"], a["1"]
    constant = sum(_sizes(weight, a.get("2")))
    return Traffic(constant, _sizes(x), (len(x) * len(weight) * x.itemsize,))


def _mm(a: Arguments, step: Step) -> Traffic:
    x, weight = a["0"], a["1"]
    return Traffic(weight.nbytes, _sizes(x), (4 * len(x) * weight.shape[1],))


def _index_select(a: Arguments, step: Step) -> Traffic:
    num_bytes = a["2"].numel() * a["0"].shape[1] * a["0"].itemsize
    return Traffic(0, (num_bytes, *_sizes(a["2"])), (num_bytes,))


def _route(a: Arguments, step: Step) -> Traffic:
    constant = sum(_sizes(a["bias"], a["expert_scales"]))
    return Traffic(constant, _sizes(a["logits"]), _sizes(a["experts"], a["weights"]))


def _rank_pairs(a: Arguments, step: Step) -> Traffic:
    return Traffic(0, _sizes(a["experts"]), _sizes(a["tokens"], a["starts"], a["rows"]))


def _describe_pairs(a: Arguments, step: Step) -> Traffic:
    return Traffic(0, _sizes(a["experts"], a["rows"]), _sizes(a["items"], a["slots"]))


def _plan_items(a: Arguments, step: Step) -> Traffic:
    return Traffic(0, _sizes(a["keys"], a["experts"]), _sizes(a["items"]))


def _experts_linear(a: Arguments, step: Step) -> Traffic:
    """Counts all experts: many rows read all of them, and only the routing of few rows tells
    which."""
    num_experts, itemsize = a["NUM_EXPERTS"], a["weight"].itemsize
    constant = num_experts * a["weight"].stride(0) * itemsize
    if a["bias"] is not None:
        constant += num_experts * a["bias"].stride(0) * itemsize
    return Traffic(constant, _sizes(a["x"], a["starts"]), _sizes(a["out"]))


def _combine_experts(a: Arguments, step: Step) -> Traffic:
    read = _sizes(a["x"], a["rows"], a["weights"], a["shared"], a["shared_logits"])
    return Traffic(0, read, _sizes(a["out"]))


def _embedding(a: Arguments, step: Step) -> Traffic:
    rows = a["1"].numel() * a["0"].shape[1] * a["0"].itemsize
    return Traffic(0, (rows, *_sizes(a["1"])), (rows,))


def _index_copy(a: Arguments, step: Step) -> Traffic:
    return Traffic(0, _sizes(a["2"], a["3"]), _sizes(a["3"]))


def _copy(a: Arguments, step: Step) -> Traffic:
    return Traffic(0, _sizes(a["1"]), _sizes(a["0"]))


def _argmax(a: Arguments, step: Step) -> Traffic:
    return Traffic(0, _sizes(a["0"]), _sizes(a["out"]))


def _rotary_angles(a: Arguments, step: Step) -> Traffic:
    return Traffic(0, _sizes(a["positions"], a["inverse_frequencies"]), _sizes(a["cos"], a["sin"]))


def _add_rms_norm(a: Arguments, step: Step) -> Traffic:
    hidden, delta, rows = a["hidden"], a["delta"], a["rows"]
    each = len(a["out"]) * a["SIZE"] * hidden.itemsize
    keeps_sum = delta is not None and rows is None
    read = (each,) * (1 + (delta is not None) + (a["addend"] is not None))
    return Traffic(a["weight"].nbytes, (*read, *_sizes(rows)), (each,) * (1 + keeps_sum))


def _norm_rows(a: Arguments, step: Step) -> Traffic:
    return Traffic(a["weight"].nbytes, _sizes(a["x"]), _sizes(a["x"]))


def _swiglu(a: Arguments, step: Step) -> Traffic:
    return Traffic(0, _sizes(a["gate"], a["up"], a.get("addend")), _sizes(a["out"]))


def _store(a: Arguments, step: Step) -> Traffic:
    constant = sum(_sizes(a["q_norm"], a["k_norm"], a["v_norm"]))
    read = _sizes(a["qkv"], a["cells"], a["cos"], a["sin"], a["q_scale"], a["addend"])
    return Traffic(constant, read, _sizes(a["qkv"]))


def num_segments(step: Step) -> int:
    """Returns the number of segments of all contexts."""
    rows = step.work.rows
    counts, contexts = np.ones(rows, np.int64), np.full(rows, step.work.context, np.int64)
    return int(segment_starts(counts, contexts)[-1])


def _part_sizes(a: Arguments, step: Step) -> tuple[int, ...]:
    """Returns the bytes of the parts of all segments, and of the parts' weights."""
    heads, head_dim = a["parts"].shape[1:]
    weights = num_segments(step) * heads * a["parts"].itemsize
    return weights * head_dim, weights


def _decode(a: Arguments, step: Step) -> Traffic:
    work = step.work
    num_seen = min(work.context, a["WINDOW"] or work.context)
    constant = work.rows * num_seen * 2 * a["NUM_KV_HEADS"] * a["D"] * a["kv"].itemsize
    num_pages = work.rows * -(-num_seen // a["PAGE_SIZE"])
    read = (*_sizes(a["q"]), num_pages * a["page_table"].itemsize)
    return Traffic(constant, read, _part_sizes(a, step))


def _combine(a: Arguments, step: Step) -> Traffic:
    return Traffic(sum(_sizes(a["sinks"])), _part_sizes(a, step), _sizes(a["out"]))


def _causal_conv(a: Arguments, step: Step) -> Traffic:
    num_tokens, states = len(a["out"]), a["states"]
    constant = a["weight"].nbytes + 2 * step.work.rows * states[0].nbytes
    x = num_tokens * a["CHANNELS"] * (3 if a["IS_GATED"] else 1) * a["x"].itemsize
    return Traffic(constant, (x, *_sizes(a["tokens"])), _sizes(a["out"]))


def _delta_step(a: Arguments, step: Step) -> Traffic:
    rows, gates = step.work.rows, step.work.rows * a["NUM_VALUE_HEADS"] * a["b"].itemsize
    constant = sum(_sizes(a["log_rate"], a["bias"])) + 2 * rows * a["states"][0].nbytes
    places = _sizes(a["firsts"], a["starts"], a["read"], a["written"])
    return Traffic(constant, (*_sizes(a["qkv"]), gates, gates, *places), _sizes(a["out"]))


def _gated_norm(a: Arguments, step: Step) -> Traffic:
    (x,) = _sizes(a["x"])
    return Traffic(a["weight"].nbytes, (x, x), (x,))


def _gate_heads(a: Arguments, step: Step) -> Traffic:
    return Traffic(0, _sizes(a["x"], a["gate"]), _sizes(a["x"]))


def targets(a: Arguments, step: Step) -> list[int]:
    """Returns the launch's targets that the adapters have, by their place in the group."""
    first = a["first_target"]
    return [k for k, i in enumerate(a["TARGET_STEPS"]) if first + i in step.adapter_targets]


def _shrunk_bytes(a: Arguments, step: Step) -> int:
    """Returns the bytes of the shrunk rows: ranks in vectors of 16, for each split of the input."""
    ranks = -(-step.work.rank // 16) * 16
    num_rows = step.num_adapter_rows * len(targets(a, step))
    return a["SPLITS"] * num_rows * ranks * a["y"].itemsize


def _shrink(a: Arguments, step: Step) -> Traffic:
    work, num_targets = step.work, len(targets(a, step))
    if not num_targets:
        return Traffic(0, _sizes(a["items"]), ())
    constant = work.adapters * num_targets * work.rank * a["IN"] * a["arena"].itemsize
    x = step.num_adapter_rows * a["IN"] * a["x"].itemsize
    return Traffic(constant, (x, *_sizes(a["items"])), (_shrunk_bytes(a, step),))


def _expand(a: Arguments, step: Step) -> Traffic:
    work, width = step.work, sum(a["OUT_FEATURES"][k] for k in targets(a, step))
    if not width:
        return Traffic(0, _sizes(a["items"]), ())
    constant = work.adapters * work.rank * width * a["arena"].itemsize
    out = step.num_adapter_rows * width * a["out"].itemsize
    read = (_shrunk_bytes(a, step), *_sizes(a["items"]))
    return Traffic(constant, read if a["BESIDE"] else (*read, out), (out,))


ELEMENTWISE = {"add", "add_", "mul", "mul_", "div", "tanh", "floor", "log1p", "to"}
ELEMENTWISE |= {"sub", "lt", "ge", "__or__", "clamp", "masked_fill_", "pad"}
"""Operations of torch that read and write each element once."""
COUNTS: dict[str, Callable[[Arguments, Step], Traffic]] = {
    "linear": _linear,
    "mm": _mm,
    "index_select": _index_select,
    "route_kernel": _route,
    "rank_pairs_kernel": _rank_pairs,
    "describe_pairs_kernel": _describe_pairs,
    "plan_items_kernel": _plan_items,
    "experts_linear_kernel": _experts_linear,
    "combine_experts_kernel": _combine_experts,
    "clamped_swiglu_kernel": _swiglu,
    "embedding": _embedding,
    "index_copy_": _index_copy,
    "copy_": _copy,
    "argmax": _argmax,
    "rotary_angles_kernel": _rotary_angles,
    "add_rms_norm_kernel": _add_rms_norm,
    "norm_rows_kernel": _norm_rows,
    "swiglu_kernel": _swiglu,
    "store_kernel": _store,
    "decode_kernel": _decode,
    "combine_kernel": _combine,
    "causal_conv_kernel": _causal_conv,
    "delta_step_kernel": _delta_step,
    "gated_norm_kernel": _gated_norm,
    "gate_heads_kernel": _gate_heads,
    "shrink_kernel": _shrink,
    "expand_kernel": _expand,
}
