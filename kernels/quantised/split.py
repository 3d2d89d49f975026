"""How a product with few rows is cut into programs, and the memory that this takes; no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kernels import tuning
from kernels.quantised.formats import Activations, WeightFormat
from kernels.quantised.weight import BLOCK_BYTES

FEW_ROWS = 16
"""Rows that tensor cores multiply at once: up to so many have a kernel of their own."""


def few_constants(form: WeightFormat, out_features: int, itemsize: int) -> Mapping[str, int]:
    """Returns the constants of few rows: of wide outputs, programs can have more."""
    facts = {"itemsize": itemsize, "bits": form.codes.num_bits}
    narrow = tuning.constants("quantised_narrow", **facts)
    if out_features <= narrow["max_out"]:
        return narrow
    return tuning.constants("quantised_wide", **facts)


class Split(NamedTuple):
    """How a weight's inputs are cut for few rows. Each split has `steps_each` of the `num_steps`
    steps, and each step `unroll` chunks of `chunk` words or bytes."""

    num_splits: int
    num_steps: int
    steps_each: int
    chunk: int
    unroll: int

    @classmethod
    def of(
        cls, form: WeightFormat, out_features: int, in_features: int, tuned: Mapping[str, int]
    ) -> Split:
        """Returns as many splits as make `programs` programs of the constants `tuned`."""
        chunk = chunk_of(form, tuned["row_bytes"])
        chunk_bytes = chunk * item_bytes(form)
        unroll = max(1, tuned["row_bytes"] // chunk_bytes)
        num_steps = -(-form.code_bytes(in_features) // (chunk_bytes * unroll))
        most = max(1, tuned["programs"] // -(-out_features // tuned["block_n"]))
        steps_each = -(-num_steps // most)
        return cls(-(-num_steps // steps_each), num_steps, steps_each, chunk, unroll)


def workspace_bytes(
    form: WeightFormat, num_rows: int, out_features: int, in_features: int, itemsize: int
) -> int:
    """Returns the most bytes that `linear` takes beside its inputs and outputs, with the constants
    of any device."""
    num_bytes = 0
    if form.activations is Activations.INT8:
        num_bytes += num_rows * (in_features * itemsize + 4)
    names = ("quantised_narrow", "quantised_wide")
    most_splits = max(
        Split.of(form, out_features, in_features, tuned).num_splits
        for name in names
        for tuned in tuning.all_constants(name)
    )
    return num_bytes + 4 * most_splits * min(num_rows, FEW_ROWS) * out_features


def chunk_of(form: WeightFormat, row_bytes: int) -> int:
    """Returns the words or bytes of an output's chunk, in `row_bytes`: of one group at most, in
    each plane."""
    if form.codes.num_bits == 8:
        return min(row_bytes, form.group_size or row_bytes)
    return max(BLOCK_BYTES, min(row_bytes, form.group_size // 2 or row_bytes)) // 4


def item_bytes(form: WeightFormat) -> int:
    """Returns the bytes of the items in which kernels read codes."""
    return 1 if form.codes.num_bits == 8 else 4
