"""How a product with few rows is cut into programs, and the memory that this takes; no Triton."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    splits = (
        Split.of(form, out_features, in_features, tuned).num_splits
        for tuned in _possible_constants(form, out_features, itemsize)
    )
    most = max(splits)
    sums_bytes = 4 * most * min(num_rows, FEW_ROWS) * out_features if most > 1 else 0
    return inputs_bytes(form, num_rows, in_features, itemsize) + sums_bytes


def _possible_constants(
    form: WeightFormat, out_features: int, itemsize: int
) -> Iterator[Mapping[str, int]]:
    """Yields constants that `few_constants` may return on any device."""
    facts = {"itemsize": itemsize, "bits": form.codes.num_bits}
    narrow = tuning.all_constants("quantised_narrow", **facts)
    yield from (tuned for tuned in narrow if out_features <= tuned["max_out"])
    if any(out_features > tuned["max_out"] for tuned in narrow):
        yield from tuning.all_constants("quantised_wide", **facts)


def inputs_bytes(form: WeightFormat, num_rows: int, in_features: int, itemsize: int) -> int:
    """Returns the bytes of inputs that are rounded, with a factor of each row: all that
    `experts_linear` takes beside its inputs and outputs."""
    if form.activations is Activations.EXACT:
        return 0
    return num_rows * (in_features * itemsize + 4)


def chunk_of(form: WeightFormat, row_bytes: int) -> int:
    """Returns the words or bytes of an output's chunk, in `row_bytes`: of one group at most, in
    each plane."""
    if form.codes.num_bits == 8:
        return min(row_bytes, form.group_size or row_bytes)
    return max(BLOCK_BYTES, min(row_bytes, form.group_size // 2 or row_bytes)) // 4


def item_bytes(form: WeightFormat) -> int:
    """Returns the bytes of the items in which kernels read codes."""
    return 1 if form.codes.num_bits == 8 else 4
