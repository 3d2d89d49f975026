"""The predicted steps of models that several GPUs share."""

from __future__ import annotations

import json

import pytest

from bench.gpu_model import ranks
from bench.gpu_model.bytes import floor_bytes, traffic
from bench.gpu_model.cost import counts_of
from bench.gpu_model.step import Workload, trace
from bench.results import FOLDER
from tools.sizing_models import LLAMA_8B

NUM_LAYERS = LLAMA_8B["num_hidden_layers"]
NUM_RANKS = [2, 4, 8]


@pytest.mark.slow
def test_predictions_are_of_this_code() -> None:
    """If they have changed for the better: python -m bench.gpu_model.ranks"""
    written = json.loads((FOLDER / "gpu_ranks.json").read_text())
    small = [case for case in ranks.cases() if case[0] == "Llama-3.1-8B"]
    assert written["steps"][: len(small)] == [ranks.predict(*case) for case in small]
    assert len(written["steps"]) == len(list(ranks.cases()))
    assert ranks.markdown(written) in FOLDER.with_name("README.md").read_text()


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_rank_reads_its_part_once(num_ranks: int) -> None:
    work = Workload(4, 2)
    step, whole = trace(work, LLAMA_8B, num_ranks), trace(work, LLAMA_8B)
    found = [traffic(launch, step) for launch in step.launches]
    assert sum(each.constant for each in found) == floor_bytes(step)
    norms_bytes = 2 * LLAMA_8B["hidden_size"] * (2 * NUM_LAYERS + 1)
    weights = [floor_bytes(each._replace(work=Workload(0, 0))) for each in (step, whole)]
    assert (weights[0] - norms_bytes) * num_ranks == weights[1] - norms_bytes


def test_sums_of_a_step() -> None:
    """After attention and the feed-forward half of each layer, and of the embedding; logits come
    from all ranks. B's products of adapters whose products are summed are in line with them."""
    rows = 3
    step = trace(Workload(rows, rows), LLAMA_8B, 2)
    hidden_bytes = 2 * rows * LLAMA_8B["hidden_size"]
    assert step.sums == (hidden_bytes,) * (2 * NUM_LAYERS + 1)
    assert step.columns == (2 * rows * LLAMA_8B["vocab_size"],)
    groups_beside, kernels, groups_before_sums = 2, 2, 2
    assert counts_of(step).beside == (groups_beside * kernels + groups_before_sums) * NUM_LAYERS


def test_time_of_exchanges() -> None:
    latency_s = ranks.LATENCY_S[4]
    assert ranks.sum_s(0, 4) == ranks.columns_s(0, 4) == latency_s
    assert ranks.sum_s(1 << 20, 4) - latency_s == pytest.approx(1.5 * (1 << 20) / 370e9)
    assert ranks.columns_s(1 << 20, 4) - latency_s == pytest.approx(0.75 * (1 << 20) / 370e9)
