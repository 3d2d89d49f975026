"""The Protocol by which adapters enter the decoder."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from inference_svc.model.layers import TorchLinear
from kernels.elementwise import NormWeight
from kernels.elementwise.addend import Addend
from kernels.experts import Pairs
from kernels.lora import TokenOrder


class ExpertsLora(Protocol):
    """The adapters of one layer's pairs of tokens and experts."""

    def add(self, group: str, x: Tensor, out: Tensor) -> None:
        """x: [P, in], out: [P, sum of the group's outs], both in the model's dtype."""


class Lora(Protocol):
    """One step's adapters. Changes exactly the tokens whose row has an adapter with the target, in
    place, after the base has computed.

    Groups are "layers.{i}.qkv" (out: q, k and v side by side), "layers.{i}.o",
    "layers.{i}.gate_up" (out: gate and up side by side) and "layers.{i}.down", and others by the
    names of their projections. Norms go by their modules. Of a mixture of experts "gate_up" and
    "down" are the half that all tokens share, and "experts.gate_up" and "experts.down" are the
    experts'.
    """

    @property
    def num_added_tokens(self) -> int:
        """Tokens behind the model's vocabulary that rows of this step may have; 0 if none has any.
        Their embeddings come with `add_embedding`, their logits with `add_head`."""

    def add(self, group: str, x: Tensor, out: Tensor, bias: Tensor | None) -> None:
        """x: [T, in], in the model's dtype, out: [T, sum of the group's outs], in that or in fp32;
        `bias`, [sum of the group's outs], is the base's in `out`."""

    def beside(self, group: str, x: Tensor, linear: TorchLinear) -> tuple[Tensor, Addend] | None:
        """Computes linear(x), and the adapters' addition to it at the same time; returns both, for
        the next operation, which adds them. None: nothing is computed, and `add` must add in line.
        x: [T, in], in the model's dtype."""

    def before_sum(self, group: str, x: Tensor, linear: TorchLinear) -> Tensor | None:
        """Computes linear(x), and the adapters' addition to it, as much as possible at the same
        time; returns the sum of both, which ranks sum next. None: nothing is computed, and `add`
        must add in line. x: [T, in], in the model's dtype."""

    def order_tokens(self) -> TokenOrder | None:
        """Returns the order that pairs of one expert are sorted in; None if no adapter of this step
        changes experts."""

    def of_pairs(self, order: TokenOrder, experts: Tensor, pairs: Pairs) -> ExpertsLora:
        """Returns the adapters' changes of a layer's experts. experts: int32 [T, chosen], the
        experts of each token, and `pairs` of these, sorted in that order."""

    def add_embedding(self, token_ids: Tensor, out: Tensor) -> None:
        """token_ids: int64 [T], out: [T, hidden_size], in the model's dtype."""

    def add_head(self, x: Tensor, out: Tensor) -> None:
        """x: [number of logit rows, hidden_size], out: [number of logit rows, vocab_size and
        `num_added_tokens`], both in the model's dtype; row i belongs to token `logit_rows[i]` of
        the step."""

    def norm(self, module: str, norm: NormWeight, *, logits_only: bool = False) -> NormWeight:
        """Returns the norm with a weight for each token, [T, size], or for each logit row, where an
        adapter has one; else the norm itself."""
