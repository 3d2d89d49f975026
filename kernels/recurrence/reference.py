"""The definitions, in torch, with the rounding of transformers' modules."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrence.segments import NOWHERE, Segments

CHUNK = 64
"""Tokens that the delta rule computes at once."""
L2_EPS = 1e-6
MAX_KERNEL, MAX_KEY_SIZE, MAX_VALUE_SIZE = 8, 256, 1024
"""The largest convolution, and the largest heads of keys and values, that kernels compute."""


class DeltaHeads(NamedTuple):
    """The heads of the gated delta rule."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, segments: Segments) -> Tensor:
    """Convolves each channel of a sequence with its own kernel, and applies silu: out[t] =
    silu(round(sum over j of weight[:, j] * x[t - size + 1 + j])).

    Args:
        x: [T, channels].
        weight: float32 [channels, size].
        states: float32 [slots, size - 1, channels], the last inputs of a sequence.
        segments: The step's; their tokens are x's.

    Returns:
        [T, channels] of x's dtype.
    """
    mixed = _convolve(x, weight, states, segments)
    return F.silu(mixed.float()).to(x.dtype)


def gated_conv(x: Tensor, weight: Tensor, states: Tensor, segments: Segments) -> Tensor:
    """Convolves each channel of a sequence with its own kernel, between two gates: out[t] = c[t] *
    round(sum over j of weight[:, j] * bx[t - size + 1 + j]), where bx = round(b * x).

    Args:
        x: b, c and x side by side, [T, 3 * channels].
        weight: float32 [channels, size].
        states: float32 [slots, size - 1, channels], the last bx of a sequence.
        segments: The step's; their tokens are x's.

    Returns:
        [T, channels] of x's dtype.
    """
    before, after, inputs = x.chunk(3, dim=1)
    return after * _convolve(before * inputs, weight, states, segments)


def _convolve(x: Tensor, weight: Tensor, states: Tensor, segments: Segments) -> Tensor:
    out = torch.empty_like(x)
    size = weight.shape[1]
    for part, tokens in segments.parts():
        new = x[tokens].float()
        # [rows, channels, tokens of each]
        new = new.unsqueeze(2) if len(part.counts) == len(new) else new.t().unsqueeze(0)
        inputs = torch.cat((states[list(part.read)].transpose(1, 2), new), dim=2)
        _store(states, part, inputs[:, :, inputs.shape[2] - size + 1 :].transpose(1, 2))
        mixed = F.conv1d(inputs, weight.unsqueeze(1), groups=len(weight)).to(x.dtype)
        out[tokens] = mixed.transpose(1, 2).reshape(-1, len(weight))
    return out


def _store(states: Tensor, part: Segments, values: Tensor) -> None:
    """Stores the states of segments that have slots for them."""
    if NOWHERE not in part.written:
        states[list(part.written)] = values
        return
    kept = [index for index, slot in enumerate(part.written) if slot != NOWHERE]
    states[[part.written[index] for index in kept]] = values[kept]


def delta_rule(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    states: Tensor,
    segments: Segments,
    heads: DeltaHeads,
) -> Tensor:
    """`gated_delta` of what projections make: beta is sigmoid(b), and the decay is -exp(log_rate) *
    softplus(a + bias).

    Args:
        qkv: [T, q, k and v of all heads].
        b, a: [T, value heads].
        log_rate, bias: float32 [value heads].
        states: float32 [slots, value heads, key size, value size].
        segments: The step's; their tokens are qkv's.
        heads: Numbers and sizes.

    Returns:
        [T, value heads * value size] of qkv's dtype.
    """
    num_keys, num_values, key_size, value_size = heads
    keys = num_keys * key_size
    q, k, v = qkv.split((keys, keys, num_values * value_size), dim=1)
    mixed = gated_delta(
        q.unflatten(1, (num_keys, -1)),
        k.unflatten(1, (num_keys, -1)),
        v.unflatten(1, (num_values, -1)),
        -log_rate.exp() * F.softplus(a.float() + bias),
        torch.sigmoid(b),
        states,
        segments,
    )
    return mixed.flatten(1).to(qkv.dtype)


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    segments: Segments,
) -> Tensor:
    """The gated delta rule (Yang, Kautz and Hatamizadeh, 2024), in fp32; per token of a sequence,
    with queries and keys of length 1, and queries divided by sqrt(key size):

        state = exp(decay) * state
        state += outer(key, beta * (value - key @ state))
        out = query @ state

    Args:
        query, key: [T, key heads, key size]; each is of value heads that follow each other.
        value: [T, value heads, value size].
        decay: Logarithms, float32 [T, value heads].
        beta: [T, value heads].
        states: float32 [slots, value heads, key size, value size].
        segments: The step's; their tokens are the values'.

    Returns:
        float32 [T, value heads, value size].
    """
    out = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    group = value.shape[1] // key.shape[1]
    for part, tokens in segments.parts():
        q, k = (_normed(each[tokens]).repeat_interleave(group, dim=1) for each in (query, key))
        q = q * q.shape[-1] ** -0.5
        inputs = q, k, value[tokens].float(), decay[tokens], beta[tokens].float()
        if len(part.counts) == len(q):
            out[tokens] = _step(*inputs, states, part)
        else:
            out[tokens] = _chunks(*inputs, states, part)
    return out


def _normed(x: Tensor) -> Tensor:
    """Returns heads [T, heads, size] in fp32, of length 1 each."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)


def _step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, part: Segments
) -> Tensor:
    """Computes one token of each segment."""
    state = states[list(part.read)] * decay.exp()[..., None, None]
    delta = (v - torch.einsum("thk,thkv->thv", k, state)) * beta[..., None]
    state += k.unsqueeze(-1) * delta.unsqueeze(-2)
    _store(states, part, state)
    return torch.einsum("thk,thkv->thv", q, state)


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, part: Segments
) -> Tensor:
    """Computes the tokens of one segment, `CHUNK` at once: the corrections of a chunk's tokens
    solve a triangular system (Yang, Wang, Zhang, Shen and Kim, 2024)."""
    state, out = states[part.read[0]], []
    for start in range(0, len(q), CHUNK):
        q_, k_, v_, decay_, beta_ = (
            each[start : start + CHUNK].transpose(0, 1) for each in (q, k, v, decay, beta)
        )
        state, made = _chunk(q_, k_, v_, decay_, beta_, state)
        out.append(made)
    _store(states, part, state.unsqueeze(0))
    return torch.cat(out, dim=1).transpose(0, 1)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """[heads, tokens, ...]; returns the state after the chunk, and the outputs."""
    total = decay.cumsum(-1)
    # From token j to token i, also of i itself; later ones have no part in earlier ones.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    from_start = total.exp().unsqueeze(-1)
    weighted = k * beta.unsqueeze(-1)
    system = (weighted @ k.transpose(-1, -2)) * between
    wanted = v * beta.unsqueeze(-1) - (weighted * from_start) @ state
    deltas = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (q * from_start) @ state + ((q @ k.transpose(-1, -2)) * between) @ deltas
    to_end = (total[..., -1:] - total).exp().unsqueeze(-1)
    state = state * from_start[:, -1:] + (k * to_end).transpose(-1, -2) @ deltas
    return state, out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * round(x / sqrt(mean(x^2) + eps)) * silu(gate), rounded once more.

    Args:
        x: [T, heads, size]; rounded to the gate's dtype first.
        gate: [T, heads, size].
        weight: [size] of the gate's dtype, or [T, size] for each token.
        eps: Added to the mean square.

    Returns:
        [T, heads, size] of the gate's dtype.
    """
    wide = x.to(gate.dtype).float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled = (weight[:, None] if weight.dim() == 2 else weight) * normed.to(gate.dtype)
    return (scaled * F.silu(gate.float())).to(gate.dtype)


def gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """x *= sigmoid(gate), rounded first. Both: [T, size] of one float dtype."""
    return x.mul_(torch.sigmoid(gate))
