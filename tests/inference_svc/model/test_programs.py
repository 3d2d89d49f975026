"""The programs of native operations that compute a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from inference_svc.backends.native.adapter_ops import ADDED_TOKENS, GroupedOp
from inference_svc.backends.native.program import MAX_PROGRAMS
from inference_svc.model.operations import Rows
from kernels.attention.native import rotary_angles_op
from kernels.native.library import NativeOp
from tests.support.models.decoders import NoAdapters


class CountedAdapters(NoAdapters):
    """One operation per group, which computes nothing."""

    def __init__(self) -> None:
        self.groups = {"embed", "head"}

    @property
    def every_group(self) -> frozenset[str]:
        return frozenset({*self.groups, ADDED_TOKENS})

    def add(
        self,
        group: str,
        x: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        rows: Rows,
    ) -> Iterator[GroupedOp]:
        self.groups.add(group)
        yield group, self._nothing()

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
    decoder = load_decoder(save_model(random_model("Llama", num_hidden_layers=2)), path="native")
    ops, arrays = decoder.transformer.program(frozenset()).ops, decoder.arrays
    last = max(index for index, op in enumerate(ops) if op.name.startswith("attend_"))
    counts = {"tokens": arrays.num_tokens, "logits": arrays.num_logits}

    def counts_of(op: NativeOp) -> set[str]:
        assert isinstance(op.keep, tuple)
        found = (name for name, count in counts.items() if any(each is count for each in op.keep))
        return set(found)

    after = [counts_of(op) for op in ops[last + 1 :]]
    assert after == [{"logits"}] * len(after)
    assert len(after) > 5
    assert {"tokens"} in [counts_of(op) for op in ops[:last] if isinstance(op.keep, tuple)]
