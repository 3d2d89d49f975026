"""What the client returns as arrays: bytes as the server has sent them, without a copy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that neighbouring tokens have chosen, from `first_position` on, which counts from
    the first token of the prompt: `num_chosen` in each of `num_layers` (see ExpertLayers), the
    router's first choice first. A generation has them of all positions but its last token's."""

    first_position: int
    num_tokens: int
    num_layers: int
    num_chosen: int
    bytes_per_id: int
    experts: bytes
    """Their numbers, unsigned and little endian, of [tokens, layers, chosen]."""

    def ids(self) -> memoryview:
        """Returns the experts as [num_tokens, num_layers, num_chosen], without a copy:
        `numpy.asarray` takes it."""
        shape = self.num_tokens, self.num_layers, self.num_chosen
        return memoryview(self.experts).cast("B" if self.bytes_per_id == 1 else "H", shape)


@dataclass(frozen=True, slots=True)
class PackedLogprobs:
    """Natural log probabilities of neighbouring tokens, and of the `top_k` most likely ones at each
    position. Positions of a prompt count from its first token, which has none; those of an output
    from its first. All fields are arrays without a copy: `numpy.asarray` takes them."""

    first_position: int
    num_tokens: int
    top_k: int
    token_ids: memoryview[int]
    """The tokens, int32 [num_tokens]."""
    logprobs: memoryview[float]
    """Theirs, float32 [num_tokens]."""
    ranks: memoryview[int]
    """How many tokens are at least as likely, int32 [num_tokens]: 1 is the most likely one."""
    top_token_ids: memoryview[int]
    """int32 [num_tokens, top_k], most likely first."""
    top_logprobs: memoryview[float]
    """float32 [num_tokens, top_k]"""
