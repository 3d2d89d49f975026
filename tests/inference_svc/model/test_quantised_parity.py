"""Logits with weights in few bits equal those of transformers with the dequantised weights."""

from __future__ import annotations

import pytest
import torch

from inference_svc.model.architectures import load_description
from tests.support.models.families import MODELS
from tests.support.models.quantised import FORMATS, dequantise, with_format

pytestmark = pytest.mark.matrix

NUM_TOKENS = 60


@pytest.mark.parametrize("path", ["torch", "native"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_logits(
    family, name, path, random_model, save_model, load_decoder, relative_rms, monkeypatch
):
    """Inputs that are rounded to INT8 are as near as these steps allow."""
    form = FORMATS[name]
    model = random_model(MODELS[family][0], **MODELS[family][1])
    folder = save_model(model)
    dequantise(model, form)
    token_ids = torch.randint(0, model.config.vocab_size, (NUM_TOKENS,)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]

    def described(folder):
        return with_format(load_description(folder), form)

    monkeypatch.setattr("tests.inference_svc.model.conftest.load_description", described)
    decoder = load_decoder(folder, path=path)
    error = relative_rms(expected, decoder.logits(token_ids, chunk=17))
    assert error <= (0.05 if name == "w8a8" else 1e-4)
