"""Checkpoints in few bits give the logits of transformers with the weights that they mean."""

from __future__ import annotations

import pytest
import torch

from tests.support.models.families import MODELS
from tests.support.models.saved_weights import FORMATS, pack

pytestmark = pytest.mark.matrix

NUM_TOKENS = 40
APART = [name for name in FORMATS if name != "mxfp4"]
WHOLE = {"hidden_size": 64, "intermediate_size": 32}
"""Sizes of whole blocks of MXFP4."""


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, name) for family in ("llama", "qwen3-moe") for name in APART),
        ("gpt-oss", "mxfp4"),
    ],
)
def test_logits(family, name, random_model, save_model, load_decoder, relative_rms):
    sizes = WHOLE if name == "mxfp4" else {}
    model = random_model(MODELS[family][0], **{**MODELS[family][1], **sizes})
    folder = save_model(model)
    meant = type(model).from_pretrained(pack(folder, name), dtype=torch.float32).eval()
    token_ids = torch.randint(0, model.config.vocab_size, (NUM_TOKENS,)).tolist()
    with torch.no_grad():
        expected = meant(torch.tensor([token_ids])).logits[0]
        other = model(torch.tensor([token_ids])).logits[0]
    got = load_decoder(folder, path="torch").logits(token_ids, chunk=17)
    assert relative_rms(expected, got) <= 1e-4
    assert relative_rms(other, got) > 1e-3
