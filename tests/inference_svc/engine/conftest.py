"""Engines on torch's backend, and the model that they serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.inference.stepped import Engine


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(shape).save_pretrained(made)
    return made


@pytest.fixture
def make(model_folder: Path) -> Iterator[Callable[[], Engine]]:
    before, made = torch.get_num_threads(), list[Engine]()

    def make_one() -> Engine:
        made.append(Engine(model_folder))
        return made[-1]

    yield make_one
    for each in made:
        each.built.puller.close()
    torch.set_num_threads(before)
