"""The Protocol by which adapters enter the decoder."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Lora(Protocol):
    """One step's adapters. Every method adds to `out` in place, after the base projection and its
    bias, for exactly those tokens whose row has an adapter with the target.

    Groups are "layers.{i}.qkv" (out: q, k and v side by side), "layers.{i}.o",
    "layers.{i}.gate_up" (out: gate and up side by side) and "layers.{i}.down", and others by the
    names of their projections.
    """

    def add(self, group: str, x: Tensor, out: Tensor) -> None:
        """x: [T, in], out: [T, sum of the group's outs], both in the model's dtype."""

    def add_embedding(self, token_ids: Tensor, out: Tensor) -> None:
        """token_ids: int64 [T], out: [T, hidden_size]."""

    def add_head(self, x: Tensor, out: Tensor) -> None:
        """x: [number of logit rows, hidden_size], out: [number of logit rows, vocab_size]; row i
        belongs to token `logit_rows[i]` of the step."""
