"""Encoders in native code: their memory, and steps of rows of any lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from inference_svc.adapters.targets import build_layout
from inference_svc.backends.base import BackendFactory
from inference_svc.backends.native.backend import NativeBackend, NativeFactory
from inference_svc.backends.native.needs import held_bytes
from inference_svc.backends.select import select_backend
from inference_svc.backends.torch import TorchFactory
from inference_svc.core import Batch, BatchRow, EngineConfig, Request, SamplingParams, Sequence
from inference_svc.engine.compute.scorer import pool
from inference_svc.model.architectures import load_description
from inference_svc.results.base import Wanted
from inference_svc.results.embedding_rule import Pooling
from inference_svc.results.pooling import HiddenSum, PoolingOption, TokenStates
from tests.support.models.encoders import FAMILIES, MAX_TOKENS, save_encoder

pytestmark = pytest.mark.matrix

LENGTHS = (1, MAX_TOKENS, 2, 9, 9, 64, 65, 33)


def config_of(folder: Path, dtype: str = "float32", max_sequences: int = 4) -> EngineConfig:
    """With fewer sequences than rows have tokens, which are pooled at once."""
    return EngineConfig(
        folder,
        "model",
        dtype=dtype,
        max_model_len=MAX_TOKENS,
        max_sequences=max_sequences,
        max_batch_tokens=512,
        arena_bytes=1 << 20,
        num_threads=torch.get_num_threads(),
    )


def rows_of(folder: Path) -> tuple[BatchRow, ...]:
    size, rows = load_description(folder).hidden_size, []
    for index, length in enumerate(LENGTHS):
        option = PoolingOption([*Pooling][index % len(Pooling)], False, size, size)
        rng, sampling = np.random.default_rng(index), SamplingParams(max_tokens=0)
        ids = tuple(rng.integers(5, 120, length).tolist())
        # Half of them are pairs: tokens of the second text have another type.
        second = length // 2 if index % 2 else 0
        wanted = Wanted((option,))
        request = Request(f"{index}", ids, sampling, wanted=wanted, second_start=second)
        sequence = Sequence(request)
        sequence.page_ids = [*range(-(-length // 16))]
        rows.append(BatchRow(sequence, 0, length, samples=False))
    return tuple(rows)


def sums(factory: BackendFactory, config: EngineConfig, rows: tuple[BatchRow, ...]) -> np.ndarray:
    """Returns the means of rows' hidden states, and all of a row whose tokens are kept apart, [n,
    hidden_size]."""
    decoder = load_description(config.model_dir)
    layout = build_layout(decoder, "", getattr(torch, config.dtype))
    backend = factory.build(config, decoder, layout)
    found = []
    with torch.inference_mode():
        inputs = backend.prepare(Batch(rows, pools=True))
        assert backend.forward(inputs).values.isfinite().all()
        for made in pool(backend.pool(inputs), None):
            if isinstance(made.part, TokenStates):
                found.append(np.frombuffer(made.part.states, np.float32))
                continue
            assert isinstance(made.part, HiddenSum)
            found.append(np.frombuffer(made.part.total, np.float32) / made.part.num_tokens)
    return np.concatenate(found).reshape(-1, decoder.hidden_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_equals_the_definition(family: str, dtype: str, tmp_path: Path) -> None:
    """In bf16 it is no farther from fp32 than torch is, give or take."""
    save_encoder(family, tmp_path, "Model")
    rows, config = rows_of(tmp_path), config_of(tmp_path, dtype, len(LENGTHS))
    assert select_backend(config, load_description(tmp_path)).name == "native"
    wanted = sums(TorchFactory(), config_of(tmp_path, max_sequences=len(LENGTHS)), rows)
    found = sums(NativeFactory(), config, rows)
    if dtype == "float32":
        np.testing.assert_allclose(found, wanted, atol=2e-5)
        return
    by_torch = sums(TorchFactory(), config, rows)
    errors = [np.sqrt(((each - wanted) ** 2).mean()) for each in (found, by_torch)]
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_its_memory_is_known_before(family: str, tmp_path: Path) -> None:
    save_encoder(family, tmp_path, "Model")
    decoder = load_description(tmp_path)
    for max_sequences in (1, 16):
        config = config_of(tmp_path, max_sequences=max_sequences)
        layout = build_layout(decoder, "", torch.float32)
        backend = NativeFactory().build(config, decoder, layout)
        assert isinstance(backend, NativeBackend)
        # All norms' weights of tokens come at once, which adapters may replace.
        assert 0.9 * held_bytes(config, decoder) <= backend.workspace_bytes
        assert backend.workspace_bytes <= held_bytes(config, decoder)
