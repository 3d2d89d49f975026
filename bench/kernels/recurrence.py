"""Times the native kernels of gated delta nets, against the read of as many bytes as they move.

    python -m bench.kernels.recurrence [--threads 2] [--repeats 20] [--out FILE]

A time is the minimum of the repetitions, for all gated delta nets of one step of bench-qwen3_5.
Between two repetitions the processor's caches are overwritten, as a step's weights would do. The
floor of a step reads and writes each state once, at the machine's rate for reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.kernels.attention import EVICTED_BYTES, least_seconds
from bench.kernels.roofline import read_rate
from bench.models import decoder
from bench.results import show, write
from inference_svc.model.mixers.gated_delta import GatedDelta
from inference_svc.model.recurrent_states import RecurrentStates, slot_bytes
from kernels.native.library import Library, NativeOp, load
from kernels.recurrence.native import StateRows, causal_conv_op, delta_rule_op, gated_norm_op

MODEL = "bench-qwen3_5"
WORK = {
    "decode 1": [1],
    "decode 4": [1] * 4,
    "decode 16": [1] * 16,
    "decode 64": [1] * 64,
    "prompts 16 x 64": [64] * 16,
    "prompt 1024": [1024],
}


class Step:
    """The operations of a step whose rows have so many tokens, kind by kind."""

    def __init__(self, counts: Sequence[int]) -> None:
        described = decoder(MODEL)
        self.num_tokens = sum(counts)
        self._states = RecurrentStates.allocate(described, 2 * len(counts), torch.device("cpu"))
        starts = torch.tensor([0, *counts]).cumsum(0)
        tensors = (
            torch.tensor([len(counts)]),
            torch.arange(len(counts) + 1),
            starts,
            torch.arange(1, len(counts) + 1),
            torch.arange(len(counts) + 1, 2 * len(counts) + 1),
        )
        self._rows = StateRows(*(each.to(torch.int32) for each in tensors))
        self.ops: dict[str, list[NativeOp]] = {}
        for layer, mixer in described.recurrences.items():
            assert isinstance(mixer, GatedDelta)
            self._add(layer, mixer)

    def _add(self, layer: int, mixer: GatedDelta) -> None:
        num_tokens, count = self.num_tokens, torch.tensor([self.num_tokens], dtype=torch.int32)
        made = torch.randn(num_tokens, mixer.into.out_features).bfloat16()
        _, z, b, a = made.split(mixer.parts, dim=1)
        qkv = torch.empty(num_tokens, mixer.conv_size, dtype=torch.bfloat16)
        out = torch.empty(num_tokens, mixer.value_size, dtype=torch.bfloat16)
        weight = torch.randn(mixer.conv_size, mixer.kernel_size)
        rate, bias = -torch.rand(mixer.num_value_heads), torch.rand(mixer.num_value_heads)
        norm = torch.ones(mixer.value_head_dim, dtype=torch.bfloat16)
        convolved, states = self._states.layers[layer]
        ops = {
            "convolution": causal_conv_op(made, qkv, weight, convolved, self._rows),
            "delta rule": delta_rule_op(
                qkv, b, a, out, rate, bias, states, self._rows, mixer.heads
            ),
            "gated norm": gated_norm_op(out, z, norm, count, eps=1e-6),
        }
        for kind, op in ops.items():
            self.ops.setdefault(kind, []).append(op)


def measure(library: Library, counts: Sequence[int], repeats: int) -> dict[str, float]:
    """Returns the seconds of all layers' operations, by their kind."""
    step, evict = Step(counts), torch.zeros(EVICTED_BYTES, dtype=torch.uint8)
    return {
        kind: least_seconds(library.program(ops).run, repeats, evict)
        for kind, ops in step.ops.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = load()
    if library is None:
        raise SystemExit("there are no native kernels to measure")
    read, state_bytes = read_rate(), slot_bytes(decoder(MODEL))
    found = {name: measure(library, counts, options.repeats) for name, counts in WORK.items()}
    floors = {name: 2 * len(counts) * state_bytes / read for name, counts in WORK.items()}
    kinds = list(next(iter(found.values())))
    rows = [
        [name, *(1e3 * one[kind] for kind in kinds), 1e3 * floors[name]]
        for name, one in found.items()
    ]
    show(f"{library.variant}, ms of a step of {MODEL}", ("", *kinds, "states' floor"), rows)
    if options.out:
        write(options.out, "recurrence", {"model": MODEL, "seconds": found, "floors": floors})


if __name__ == "__main__":
    main()
