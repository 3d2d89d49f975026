"""Launches of the Triton kernels. Grids follow from the sizes of tensors alone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernels import tuning
from kernels.elementwise.triton_ops import power_of_2
from kernels.experts.reference import Pairs
from kernels.experts.triton_ops import first_of_each, most_tiles, tiles_launch
from kernels.quantised import triton_kernels as kernels
from kernels.quantised.formats import Activations, Codes, WeightFormat
from kernels.quantised.split import FEW_ROWS, Split, chunk_of, few_constants
from kernels.quantised.weight import BLOCK_BYTES, QuantisedWeight

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def linear(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Launches `reference.linear`: x [T, in] with rows of unit stride, bias [out] give [T, out].

    Up to FEW_ROWS rows have one kernel, and a second where outputs are so few that inputs are
    split; more have another. Inputs that are rounded to INT8 take one more.
    """
    num_rows, num_out = len(x), len(weight.codes)
    out = torch.empty((num_rows, num_out), dtype=dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    x, x_scales = _inputs(x, weight)
    if num_rows <= FEW_ROWS:
        _few_rows(out, x, weight, bias, x_scales)
    else:
        _many_rows(out, x, weight, bias, x_scales, None, num_out)
    return out


def experts_linear(
    x: Tensor,
    weight: QuantisedWeight,
    pairs: Pairs,
    bias: Tensor | None,
    step: int,
    out_features: int,
) -> Tensor:
    """Launches `cpu.experts_linear`: x [P, in] with rows of unit stride, bias [experts,
    out_features] give [P, out_features]. The launch has as many tiles as any routing of so many
    pairs."""
    num_pairs, num_experts = len(x), len(pairs.starts) - 1
    assert len(pairs.tokens) == num_pairs, "tiles are of all pairs"
    assert len(weight.codes) == num_experts * step
    assert bias is None or bias.stride(-1) == 1
    out = torch.empty((num_pairs, out_features), dtype=x.dtype, device=x.device)
    if num_pairs == 0:
        return out
    x, x_scales = _inputs(x, weight)
    _many_rows(out, x, weight, bias, x_scales, pairs, step)
    return out


def tile_constants(
    num_rows: int, num_experts: int, itemsize: int, form: WeightFormat
) -> Mapping[str, int]:
    """Returns the constants of tiles as long as experts have rows, on average: they change in how
    many pieces terms are added up, and not in which order."""
    facts = {"itemsize": itemsize, "bits": form.codes.num_bits}
    short = tuning.constants("quantised_short", **facts)
    if num_rows <= short["max_rows"] * num_experts:
        return short
    middle = tuning.constants("quantised_middle", **facts)
    if num_rows <= middle["max_rows"] * num_experts:
        return middle
    return tuning.constants("quantised_long", **facts)


def sizes_to_warm_up(
    max_tokens: int, num_experts: int, num_chosen: int, itemsize: int, form: WeightFormat
) -> list[int]:
    """Returns numbers of tokens, up to `max_tokens`, that launch whatever any number launches."""

    def launches(num_tokens: int) -> Hashable:
        num_pairs = num_tokens * num_chosen
        tuned = tile_constants(num_pairs, num_experts, itemsize, form)
        return tiles_launch(num_pairs, num_experts, tuned)

    return first_of_each(max_tokens, launches)


def _inputs(x: Tensor, weight: QuantisedWeight) -> tuple[Tensor, Tensor | None]:
    """Returns the inputs as the format has them, and factors of rows, fp32 [T]."""
    assert x.dtype in DTYPES
    assert not weight.format.has_odd_groups
    assert x.shape[1] == weight.in_features
    assert x.stride(1) == 1
    if weight.format.activations is Activations.EXACT:
        return x, None
    codes = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    tuned = tuning.constants("quantised_inputs")
    block = min(tuned["block"], power_of_2(x.shape[1]))
    kernels.int8_inputs_kernel[(len(x),)](
        codes,
        scales,
        x,
        x.stride(0),
        SIZE=x.shape[1],
        BLOCK=block,
        num_warps=max(1, block // tuned["elements_per_warp"]),
    )
    return codes, scales


def _few_rows(
    out: Tensor,
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    x_scales: Tensor | None,
) -> None:
    num_rows, num_out = out.shape
    tuned = few_constants(weight.format, num_out, x.itemsize)
    split = Split.of(weight.format, num_out, weight.in_features, tuned)
    parts = out
    if split.num_splits > 1:
        shape = (split.num_splits, num_rows, num_out)
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    is_split = parts is not out
    kernels.few_rows_kernel[(-(-num_out // tuned["block_n"]), split.num_splits)](
        parts,
        x,
        _codes(weight),
        weight.scales,
        weight.offsets,
        None if is_split else bias,
        None if is_split else x_scales,
        weight.table,
        num_rows,
        split.num_steps,
        split.steps_each,
        x.stride(0),
        **_sizes(weight, x, num_out),
        IS_SPLIT=is_split,
        CHUNK=split.chunk,
        UNROLL=split.unroll,
        BLOCK_M=FEW_ROWS,
        BLOCK_N=tuned["block_n"],
        STAGES=tuned["num_stages"],
        num_warps=tuned["num_warps"],
    )
    if is_split:
        block = min(tuning.constants("quantised_sum")["block"], power_of_2(num_out))
        kernels.sum_splits_kernel[(num_rows, -(-num_out // block))](
            out,
            parts,
            bias,
            x_scales,
            num_rows,
            split.num_splits,
            OUT=num_out,
            BLOCK=block,
            num_warps=max(1, block // tuning.constants("quantised_sum")["elements_per_warp"]),
        )


def _many_rows(
    out: Tensor,
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    x_scales: Tensor | None,
    pairs: Pairs | None,
    expert_rows: int,
) -> None:
    num_rows, num_out = out.shape
    num_experts = 1 if pairs is None else len(pairs.starts) - 1
    tuned = tile_constants(num_rows, num_experts, x.itemsize, weight.format)
    block_m, block_n = tuned["block_m"], tuned["block_n"]
    most = -(-num_rows // block_m) if pairs is None else most_tiles(num_rows, num_experts, tuned)
    num_tiles = min(num_rows, most)
    codes = _codes(weight)
    # Of tiles of all lengths the same: the order of terms follows from it.
    chunk = chunk_of(weight.format, BLOCK_BYTES)
    unroll = max(1, tuned["row_bytes"] // BLOCK_BYTES)
    kernels.many_rows_kernel[(num_tiles * -(-num_out // block_n),)](
        out,
        x,
        codes,
        weight.scales,
        weight.offsets,
        bias,
        x_scales,
        weight.table,
        None if pairs is None else pairs.starts,
        num_rows,
        -(-codes.shape[1] // (chunk * unroll)),
        num_tiles,
        x.stride(0),
        expert_rows,
        0 if bias is None or pairs is None else bias.stride(0),
        NUM_EXPERTS=num_experts,
        OF_PAIRS=num_rows <= most,
        BLOCK_E=power_of_2(num_experts),
        **_sizes(weight, x, num_out),
        CHUNK=chunk,
        UNROLL=unroll,
        TILES=tuned["tiles"],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=tuned["num_stages"],
        num_warps=tuned["num_warps"],
    )


def _codes(weight: QuantisedWeight) -> Tensor:
    """Returns codes of eight bits as bytes, and words of codes of four."""
    return weight.codes if weight.format.codes.num_bits == 8 else weight.codes.view(torch.int32)


def _sizes(weight: QuantisedWeight, x: Tensor, num_out: int) -> dict[str, Any]:
    """Returns the constants of both kernels that follow from the weight."""
    form = weight.format
    is_linear = form.codes in (Codes.INT4, Codes.UINT4)
    return {
        "OUT_ROWS": len(weight.codes),
        "IN": weight.in_features,
        "OUT": num_out,
        "ROW": _codes(weight).shape[1],
        "CODES": form.codes.value,
        "GROUP": form.group_size,
        "NUM_GROUPS": len(weight.scales),
        "FACTOR": 2.0 ** kernels.INT4_SHIFTS[x.dtype] if is_linear else 1.0,
        # fp32 models are promised fp32 products; for 16-bit ones the choice has no effect.
        "PRECISION": "ieee",
    }
