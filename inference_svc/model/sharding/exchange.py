"""The sums and rows that ranks exchange within a step: with all ranks of their stage, and with one
of another stage."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


class Exchange(Protocol):
    """What one rank computes together with all others of its stage, which call the same in the same
    order. The results are equal on all ranks, bit by bit. Raises RuntimeError if another rank has
    failed, or does not answer in time."""

    @property
    def name(self) -> str:
        """Names the way of values between ranks, for status: "shared memory", "gloo", "NCCL"."""

    @property
    def seconds(self) -> float:
        """The time that this rank has spent in exchanges, most of it waiting for others."""

    def sum(self, x: Tensor) -> None:
        """Replaces x, of any shape and float dtype, by the sum over ranks. x is contiguous."""

    def side_by_side(self, x: Tensor) -> Tensor:
        """Returns the columns of all ranks, [rows, ranks * columns], in their order. x: [rows,
        columns], of equal shapes and one float dtype."""

    def broadcast(self, x: Tensor) -> None:
        """Overwrites x, of any shape and float dtype, with the values of the stage's first rank,
        which leaves its own as they are. x is contiguous."""


@runtime_checkable
class StagedExchange(Exchange, Protocol):
    """An `Exchange` of a model in several stages."""

    def sum_stages(self, x: Tensor) -> None:
        """Replaces x, as in `sum`, by the sum over the ranks of all stages."""

    def broadcast_stages(self, x: Tensor) -> None:
        """Overwrites x, as in `broadcast`, with the values of the first rank of all."""

    def send(self, x: Tensor, stage: int) -> None:
        """Hands x, of any shape and float or integer dtype, to the rank with the same index in
        another stage, which receives it. x is contiguous."""

    def receive(self, x: Tensor, stage: int) -> None:
        """Overwrites x with the values that the rank with the same index in another stage sends, of
        this shape and dtype. x is contiguous."""
