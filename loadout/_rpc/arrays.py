"""Results that the client returns as arrays: the server's bytes, without a copy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Experts chosen for consecutive tokens. A generation has them for all positions except the
    last token's."""

    first_position: int
    """Position of the first of these tokens, from 0 at the start of the prompt."""
    num_tokens: int
    num_layers: int
    """Number of layers with experts; `ServerInfo.experts` lists them."""
    num_chosen: int
    """Experts chosen per token and layer."""
    bytes_per_id: int
    """Bytes of an expert's number, 1 or 2."""
    experts: bytes
    """Experts' numbers, unsigned and little-endian, [num_tokens, num_layers, num_chosen]."""

    def ids(self) -> memoryview:
        """Returns the experts' numbers without a copy, for `numpy.asarray`.

        Returns:
            Array [num_tokens, num_layers, num_chosen] of uint8 or uint16, the router's first choice
            first.
        """
        shape = self.num_tokens, self.num_layers, self.num_chosen
        return memoryview(self.experts).cast("B" if self.bytes_per_id == 1 else "H", shape)


@dataclass(frozen=True, slots=True)
class PackedLogprobs:
    """Natural log probabilities of consecutive tokens, and of the most likely tokens at each
    position. The arrays are views without a copy, for `numpy.asarray`."""

    first_position: int
    """Position of the first of these tokens, from 0 at the start of the prompt or of the output.
    The prompt's first token has no log probability."""
    num_tokens: int
    top_k: int
    """Number of most likely tokens per position."""
    token_ids: memoryview[int]
    """The tokens, int32 [num_tokens]."""
    logprobs: memoryview[float]
    """Their log probabilities, float32 [num_tokens]."""
    ranks: memoryview[int]
    """How many tokens are at least as likely as each, int32 [num_tokens]. 1: the most likely."""
    top_token_ids: memoryview[int]
    """The most likely tokens, int32 [num_tokens, top_k], most likely first."""
    top_logprobs: memoryview[float]
    """Their log probabilities, float32 [num_tokens, top_k]."""
