"""A batch becomes the tensors it describes."""

from __future__ import annotations

import torch

from inference_svc.core import Batch, BatchRow, Request, SamplingParams, Sequence
from inference_svc.model.inputs import StepInputs


def sequence(token_ids: list[int], page_ids: list[int]) -> Sequence:
    made = Sequence(Request("r", tuple(token_ids), SamplingParams()))
    made.page_ids = page_ids
    return made


def test_build():
    decoding = sequence([10, 11, 12], [2])
    decoding.token_ids += [13, 14]
    decoding.page_ids.append(0)
    chunked = sequence([20, 21, 22, 23, 24, 25, 26], [5, 1])
    fresh = sequence([30, 31], [3])
    batch = Batch(
        (
            BatchRow(chunked, 2, 3, samples=False),
            BatchRow(decoding, 4, 1, samples=True),
            BatchRow(fresh, 0, 2, samples=True),
        )
    )
    inputs = StepInputs.build(batch, page_size=4)
    assert inputs.token_ids.tolist() == [22, 23, 24, 14, 30, 31]
    assert inputs.positions.tolist() == [2, 3, 4, 4, 0, 1]
    assert inputs.logit_rows.tolist() == [2, 3, 5]
    assert inputs.attention.cells.tolist() == [22, 23, 4, 0, 12, 13]
    assert inputs.attention.context_lengths.tolist() == [5, 5, 2]
    for tensor in (inputs.token_ids, inputs.positions, inputs.logit_rows):
        assert tensor.dtype == torch.int64
