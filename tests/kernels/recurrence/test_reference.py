"""The definitions of recurrences, against transformers' functions, in chunks of any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNormGated,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from kernels.recurrence import Segments, causal_conv, gated_delta, gated_norm

KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE = 2, 6, 8, 12
CHANNELS, KERNEL = 10, 4
NUM_TOKENS = 150


def in_steps(chunks: list[int]) -> list[Segments]:
    """Segments of one sequence, in slots 1 and 2 in turns; 0 is the empty state."""
    found, read = [], 0
    for number, count in enumerate(chunks):
        written = 1 + number % 2
        found.append(Segments((read,), (written,), (count,)))
        read = written
    return found


def cuts(size: int) -> list[int]:
    return [min(size, NUM_TOKENS - start) for start in range(0, NUM_TOKENS, size)]


def delta_inputs(num_tokens: int = NUM_TOKENS) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    q, k = (torch.randn(num_tokens, KEY_HEADS, KEY_SIZE) for _ in range(2))
    v = torch.randn(num_tokens, VALUE_HEADS, VALUE_SIZE)
    decay = -torch.rand(num_tokens, VALUE_HEADS)
    return q, k, v, decay, torch.rand(num_tokens, VALUE_HEADS)


def empty_states() -> Tensor:
    return torch.zeros(9, VALUE_HEADS, KEY_SIZE, VALUE_SIZE)


@pytest.mark.parametrize("size", [1, 7, 64, 65, NUM_TOKENS])
def test_gated_delta(size: int) -> None:
    inputs, states, start, out = delta_inputs(), empty_states(), 0, []
    for rows in in_steps(cuts(size)):
        end = start + rows.counts[0]
        out.append(gated_delta(*(each[start:end] for each in inputs), states, rows))
        start = end
    for oracle in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        q, k, v, decay, beta = (each.unsqueeze(0) for each in inputs)
        wanted, state = oracle(
            q,
            k,
            v,
            g=decay,
            beta=beta,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(torch.cat(out), wanted[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(states[rows.written[0]], state[0], atol=1e-5, rtol=1e-4)
    assert not states[0].any()


def test_rows_do_not_depend_on_each_other() -> None:
    """Segments of one token, and of several, in any order: each gives bits as it does alone."""
    counts, inputs, states = (1, 5, 1, 70, 1), delta_inputs(78), empty_states()
    before = states[4:7] = torch.randn(3, VALUE_HEADS, KEY_SIZE, VALUE_SIZE)
    read, written = (4, 0, 5, 6, 0), (1, 2, 3, 7, 8)
    both = gated_delta(*inputs, states, Segments(read, written, counts))
    assert torch.equal(states[4:7], before)
    start = 0
    for index, count in enumerate(counts):
        end, alone = start + count, states.clone()
        row = Segments(read[index : index + 1], written[index : index + 1], (count,))
        out = gated_delta(*(each[start:end] for each in inputs), alone, row)
        assert torch.equal(out, both[start:end])
        assert torch.equal(alone, states)
        start = end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 7, NUM_TOKENS])
def test_causal_conv(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(NUM_TOKENS, CHANNELS).to(dtype), torch.randn(CHANNELS, KERNEL).to(dtype)
    states, start, out = torch.zeros(3, KERNEL - 1, CHANNELS), 0, []
    for rows in in_steps(cuts(size)):
        end = start + rows.counts[0]
        out.append(causal_conv(x[start:end], weight.float(), states, rows))
        start = end
    wanted = causal_conv1d_fn(x.t().unsqueeze(0), weight, activation="silu")[0].t()
    bounds = (
        {"atol": 1e-6, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.02, "rtol": 0.02}
    )
    torch.testing.assert_close(torch.cat(out), wanted, **bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, gate = (torch.randn(5, VALUE_HEADS, VALUE_SIZE).to(dtype) for _ in range(2))
    module = Qwen3_5RMSNormGated(VALUE_SIZE, eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight)
    found = gated_norm(x.float(), gate, module.weight.detach(), 1e-5)
    torch.testing.assert_close(found, module(x, gate).detach())
