"""What ranks on CUDA devices are said to take is what their operations allocate and launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_model.launches import META, launches, noted_kernels
from bench.gpu_model.step import Exchanged
from inference_svc.adapters.targets import lora_groups
from inference_svc.backends.cuda import needs as cuda_needs
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape
from inference_svc.backends.cuda.rank_needs import NCCL_BYTES, STAGE_PAIR_BYTES
from inference_svc.model.description import Decoder, Rank
from inference_svc.model.sharding.description import of_rank
from inference_svc.model.sharding.stages import of_stage
from tests.support.gpu.features import FEATURES
from tests.support.gpu.models import MAX_ROWS, Model, make_decoder
from tests.support.gpu.needs import (
    MOST,
    SPARED_NODES,
    choose_the_first,
    config_of,
    num_kernels,
    peak_bytes,
)

pytestmark = pytest.mark.matrix
COUNT = 2
CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("llama", {}, {}),
    ("llama", {"vocab_size": 8191}, {}),
    ("qwen3, norms", {"num_attention_heads": 16}, {"fully_sharded_loras": True}),
    ("olmo2", {"num_attention_heads": 16}, {}),
    ("qwen3 experts", {"moe_intermediate_size": 256}, {}),
    ("qwen3 experts", {}, {"fully_sharded_loras": True}),
    ("qwen3.5", {}, {}),
    ("qwen3 experts", {"moe_intermediate_size": 256}, {"expert_parallel": 2}),
    ("llama", {"vocab_size": 8191}, {"pipeline_parallel": 2}),
    ("llama", {"vocab_size": 8191}, {"pipeline_parallel": 2, "stage": 1}),
    ("qwen3 experts", {}, {"pipeline_parallel": 2, "stage": 1}),
    ("qwen3.5", {}, {"pipeline_parallel": 2}),
]
"""Logits that are padded, shrunk rows, norms of all heads, and sums of experts are exchanged; pairs
of other ranks are left out, and stages hand values on. `stage`: the one that is looked at."""


class Copying(Exchanged):
    """Lays rows side by side that have come one rank's behind the other's, as ranks do."""

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        found = super().side_by_side(x)
        return found.view(COUNT, len(x), -1).transpose(0, 1).reshape(len(x), -1)

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.num_handed = 0

    def clear(self) -> None:
        super().clear()
        self.num_handed = 0

    def agree(self, is_done: bool, /) -> bool:
        return is_done

    def sum_stages(self, x: torch.Tensor) -> None:
        self.sum(x)

    def broadcast_stages(self, x: torch.Tensor) -> None:
        self.broadcast(x)

    def send(self, x: torch.Tensor, stage: int) -> None:
        assert x.is_contiguous()
        self.num_handed += 1

    def receive(self, x: torch.Tensor, stage: int) -> None:
        self.send(x, stage)


def part_of(
    folder: Path, begins: str, changes: dict[str, int], settings: dict[str, Any]
) -> Decoder:
    name = next(each for each in FEATURES if each.startswith(begins))
    stage, num_stages = settings.get("stage", 0), settings.get("pipeline_parallel", 1)
    part = of_stage(make_decoder(name, folder, **changes), stage, num_stages)
    return of_rank(part, Rank(0, COUNT), settings.get("expert_parallel", 1))


def model_of(decoder: Decoder, dtype: torch.dtype, device: str, settings: dict[str, Any]) -> Model:
    return Model.make(
        decoder,
        dtype,
        torch.device(device),
        exchange=Copying(COUNT),
        is_fully_sharded=settings.get("fully_sharded_loras", False),
    )


@pytest.mark.parametrize("num_tokens", [MAX_ROWS, 512])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_takes_no_more(tmp_path, case, num_tokens):
    begins, changes, settings = case
    decoder = part_of(tmp_path, begins, changes, settings)
    model = model_of(decoder, torch.float32, "cpu", settings)
    with noted_kernels(choose_the_first):
        backend = model.fixed(None, is_warm=False, max_tokens=num_tokens)
        peak = peak_bytes(backend, num_tokens, has_decodes=True)
    of_engine = {name: each for name, each in settings.items() if name != "stage"}
    config = config_of(num_tokens, tensor_parallel=COUNT, **of_engine)
    planned = cuda_needs.step_bytes(config, decoder, num_tokens)
    assert peak <= planned <= MOST * peak, (peak, planned)
    needs = cuda_needs.memory_needs(config, decoder)
    # The first rank of two stages hands values on to one other rank, and gets some from one.
    has_stages = decoder.stage is not None
    groups_bytes = NCCL_BYTES * (1 + has_stages) + 2 * STAGE_PAIR_BYTES * has_stages
    assert needs.libraries_bytes == cuda_needs.LIBRARIES_BYTES + groups_bytes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_recorded_kernels_are_counted(tmp_path, case):
    begins, changes, settings = case
    decoder = part_of(tmp_path, begins, changes, settings)
    model = model_of(decoder, torch.bfloat16, "meta", settings)
    assert model.arena.device == META
    num_groups = len(lora_groups(model.arena.layout))
    num_shared = len(model.arena.layout.shared_groups)
    assert (num_shared > 0) == settings.get("fully_sharded_loras", False)
    backend = model.fixed(lambda compute: None, is_warm=False)
    exchanged = model.exchange
    for kind in StepKind:
        exchanged.clear()
        with launches() as noted:
            backend.compute(StepShape.of_decodes(kind, 1))
        names = [launch.name for launch in noted.launches]
        counted = num_kernels(names)
        # Rows of all ranks come, and a copy that is not noted lays them side by side.
        counted += len(exchanged.sums) + 2 * len(exchanged.columns) + exchanged.num_handed
        planned = cuda_needs.recorded_nodes(decoder, kind, num_groups, num_shared=num_shared)
        # The first stage alone has the tokens as they were sampled, and the largest logits.
        spared = SPARED_NODES + 2 * (decoder.stage is not None)
        assert counted <= planned <= counted + spared, names
