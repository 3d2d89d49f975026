"""The way of embeddings from the first rank to others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from inference_svc.backends.pictures import hand_out, handed_bytes, take_in
from inference_svc.model.architectures import load_description
from inference_svc.model.description import Decoder, Rank
from inference_svc.model.inputs import PlacedRows
from inference_svc.model.sharding.description import of_rank
from tests.support.inference.ranks import ThreadExchange, exchanges, on_ranks
from tests.support.pictures.models import save_config

CPU = torch.device("cpu")


@pytest.fixture
def whole(tmp_path: Path) -> Decoder:
    return load_description(save_config("Mistral3", tmp_path / "model"), with_pictures=True)


@pytest.mark.parametrize("tokens", [(), ((3, 7),), ((0, 2), (3, 4), (9, 14))])
def test_a_step_is_one_broadcast(
    whole: Decoder, tokens: Sequence[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all runs of all pictures; a step of texts has none."""
    assert whole.pictures is not None
    size = whole.pictures.row_size
    placed = [PlacedRows(start, torch.randn(end - start, size)) for start, end in tokens]
    sent: list[int] = []
    broadcast = ThreadExchange.broadcast

    def noted(exchange: ThreadExchange, x: torch.Tensor) -> None:
        sent.append(x.nbytes)
        broadcast(exchange, x)

    monkeypatch.setattr(ThreadExchange, "broadcast", noted)
    both = exchanges(2)

    def run(index: int) -> Sequence[PlacedRows]:
        part = of_rank(whole, Rank(index, 2))
        if index:
            return take_in(tokens, part, both[index], torch.float32, CPU)
        hand_out(placed, part, both[index])
        return placed

    _, found = on_ranks(2, run)
    assert [each.start for each in found] == [start for start, _ in tokens]
    for own, other in zip(placed, found, strict=True):
        assert torch.equal(own.rows, other.rows)
    count = sum(end - start for start, end in tokens)
    num_bytes = handed_bytes(of_rank(whole, Rank(1, 2)), count, torch.float32)
    assert sent == [num_bytes] * (2 if tokens else 0)
