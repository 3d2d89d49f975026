"""The programs of native operations that compute a step."""

from __future__ import annotations

import torch

from inference_svc.backends.native_program import MAX_PROGRAMS
from kernels.attention.native import rotary_angles_op
from kernels.native.library import NativeOp
from tests.support.models.decoders import NoAdapters
from tests.support.models.whole_models import SHAPE


class CountedAdapters(NoAdapters):
    """One operation per group, which computes nothing."""

    def __init__(self) -> None:
        self.groups = {"embed", "head"}

    def add(
        self,
        group: str,
        x: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        logits_only: bool,
    ) -> list[NativeOp]:
        self.groups.add(group)
        return [self._nothing()]

    def add_embedding(self, token_ids: torch.Tensor, out: torch.Tensor) -> list[NativeOp]:
        return [self._nothing()]

    def _nothing(self) -> NativeOp:
        angles, count = torch.zeros(1, 1), torch.zeros(1, dtype=torch.int32)
        positions = torch.zeros(1, dtype=torch.int64)
        return rotary_angles_op(positions, angles[0], angles, angles, count, scaling=1.0)


def test_programs_are_few(random_model, save_model, load_decoder) -> None:
    adapters = CountedAdapters()
    folder = save_model(random_model("Llama", num_hidden_layers=8))
    decoder = load_decoder(folder, path="native", adapters=adapters)
    transformer = decoder.transformer
    decoder.step([(decoder.add([1, 2, 3]), 0, 3, True)])
    expected = transformer.forward().clone()
    num_base = len(transformer.program(frozenset()).ops)
    sizes = []
    for group in sorted(adapters.groups):
        assert torch.equal(transformer.forward(frozenset({group})), expected)
        sizes.append(len(transformer.program(frozenset({group})).ops) - num_base)
        assert transformer.num_ops(frozenset({group})).total() == sizes[-1]
    num_own = MAX_PROGRAMS - 2  # beside that of no group and that of all
    assert sizes == [1] * num_own + [len(adapters.groups)] * (len(sizes) - num_own)
    assert len(sizes) > num_own
    assert transformer.num_ops(frozenset()).total() == 0
    assert len(transformer.program(frozenset()).ops) == num_base


def test_last_layer_computes_last_tokens_only(random_model, save_model, load_decoder) -> None:
    """For a row's other tokens it computes keys and values, which is all that later steps read."""
    decoder = load_decoder(save_model(random_model("Llama", num_hidden_layers=1)), path="native")
    first, second, third = ([1, 2, 3], [4, 5, 6, 7], [8, 9])
    rows = [(decoder.add(tokens), 0, len(tokens), True) for tokens in (first, second, third)]
    expected = decoder.step(rows)
    work = decoder.transformer._workspace
    size = SHAPE["intermediate_size"]
    gate_up, gated = work.rows_of(work.gate_up, 2 * size), work.rows_of(work.gated, size)
    buffers = (gate_up, gated, work.last_hidden, work.last_mixed)
    for buffer in buffers:
        buffer.fill_(torch.nan)
    got = decoder.step([rows[0], (*rows[1][:3], False), rows[2]])
    assert torch.equal(got, expected)
    for buffer in buffers:
        assert not buffer[:3].isnan().any()
        assert buffer[3:].isnan().all()
