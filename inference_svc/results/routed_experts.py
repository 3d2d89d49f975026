"""The experts that tokens have chosen, in the layers that are mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from inference_svc.results.base import OBJECT_BYTES, Option, Scope, Server
from servicekit.errors import InvalidArgument


class ExpertLayers(NamedTuple):
    """The layers that are mixtures of experts, how many experts each has, and how many of these a
    token chooses."""

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int

    @property
    def bytes_per_id(self) -> int:
        return 1 if self.num_experts <= 256 else 2

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's choices."""
        return len(self.layers) * self.num_chosen * self.bytes_per_id


@dataclass(frozen=True, slots=True)
class ExpertsOption(Option):
    """`token_bytes` of a token's experts, once it is known which model serves the request. Of pages
    that other requests have computed it is not known which experts were chosen."""

    scope: ClassVar[Scope] = Scope.SEQUENCE
    cache_seed: ClassVar[str] = "routed\0"

    token_bytes: int = 0

    def served_by(self, server: Server) -> ExpertsOption:
        """See `Option`. Raises InvalidArgument for a model without experts."""
        if not server.expert_token_bytes:
            raise InvalidArgument(
                f"return_routed_experts: {server.base_model} has no experts",
                subject="return_routed_experts",
            )
        return replace(self, token_bytes=server.expert_token_bytes)

    def prompt_bytes(self, num_tokens: int) -> int:
        return self.token_bytes * num_tokens


class RoutedExperts(NamedTuple):
    """The experts that neighbouring tokens of a sequence have chosen, from a position on: ids of
    `bytes_per_id` bytes, little endian, [tokens, layers, chosen], the best first."""

    first_position: int
    num_layers: int
    num_chosen: int
    bytes_per_id: int
    experts: bytes

    @property
    def scope(self) -> Scope:
        return Scope.SEQUENCE

    @property
    def end(self) -> int:
        return self.first_position + self.num_tokens

    @property
    def num_bytes(self) -> int:
        return OBJECT_BYTES + len(self.experts)

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.num_chosen * self.bytes_per_id

    @property
    def num_tokens(self) -> int:
        return len(self.experts) // self.token_bytes


def joined_experts(pieces: Iterable[RoutedExperts], max_bytes: int) -> Iterator[RoutedExperts]:
    """Joins pieces that follow one another, and yields them in parts of as many whole tokens as
    `max_bytes` hold, at least one."""
    part: RoutedExperts | None = None
    held = bytearray()
    for piece in pieces:
        if part is None:
            part = piece
        size = max(1, max_bytes // part.token_bytes) * part.token_bytes
        position = part.first_position + len(held) // part.token_bytes
        assert piece.first_position == position, "a gap between positions"
        for start in range(0, len(piece.experts), size):
            held += piece.experts[start : start + size]
            if len(held) >= size:
                yield part._replace(experts=bytes(held[:size]))
                part = part._replace(first_position=part.first_position + size // part.token_bytes)
                del held[:size]
    if part is not None and held:
        yield part._replace(experts=bytes(held))
