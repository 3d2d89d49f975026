"""Checkpoints in few bits give the logits of transformers with the weights that they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.files import INDEX, SINGLE
from inference_svc.model.checkpoint.tensors import check_tensors
from inference_svc.model.checkpoint.wrapper import TEXT_ALONE
from inference_svc.model.description import Experts
from inference_svc.model.quantised.modules import StoredModules
from tests.support.models.families import MODELS
from tests.support.models.saved_weights import FORMATS, MODULE, pack, scheme_of

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
        ("gemma4-moe", "int8"),  # whose experts are plain, in one tensor
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


def write_quantisation(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"] |= changes
    path.write_text(json.dumps(values))


def test_routers_of_fp8_need_not_be_listed(random_model, save_model, load_decoder, relative_rms):
    """A weight without a scale is plain: published mixtures list no routers."""
    model = random_model(MODELS["qwen3-moe"][0], **MODELS["qwen3-moe"][1])
    folder = save_model(model)
    meant = type(model).from_pretrained(pack(folder, "fp8 tensor"), dtype=torch.float32).eval()
    write_quantisation(folder, modules_to_not_convert=None, activation_scheme="static")
    feed_forward = load_description(folder).blocks[-1].feed_forward
    assert isinstance(feed_forward, Experts)
    assert not any(feed_forward.router.projection.formats)
    token_ids = torch.randint(0, model.config.vocab_size, (NUM_TOKENS,)).tolist()
    with torch.no_grad():
        expected = meant(torch.tensor([token_ids])).logits[0]
    assert relative_rms(expected, load_decoder(folder).logits(token_ids, chunk=17)) <= 1e-4


@pytest.mark.parametrize(("form", "end"), [("int4", "weight_packed"), ("awq", "qweight")])
def test_a_layer_without_scales_is_plain_whatever_its_size(form, end):
    """36 inputs are no groups of 8. Configs do not list every plain layer, such as a tower's."""
    scheme = scheme_of(FORMATS[form][1], "float16")
    names = [f"{MODULE}.weight", f"{MODULE}.bias"]
    plain = StoredModules(scheme, TEXT_ALONE, {each: each for each in names})
    assert plain.matrix(MODULE, 12, 36) is None
    names += [f"{MODULE}.{end}"]
    with pytest.raises(UnsupportedModel, match="36 inputs"):
        StoredModules(scheme, TEXT_ALONE, {each: each for each in names}).matrix(MODULE, 12, 36)


@pytest.mark.parametrize("lies_of", ["quantised", "plain"])
def test_an_index_of_another_checkpoint_is_refused(lies_of, random_model, save_model):
    """A description by its names would quantise plain weights, or read bits as plain ones."""
    folder = save_model(random_model("Llama"))
    names = {"plain": [*load_file(folder / SINGLE)]}
    plain = load_file(folder / SINGLE)
    pack(folder, "int8")
    names["quantised"] = [*load_file(folder / SINGLE)]
    if lies_of == "quantised":
        save_file(plain, folder / SINGLE)
    (folder / SINGLE).rename(folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(names[lies_of], "part.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match=r"other tensors in the files than in .*index"):
        check_tensors(folder, load_description(folder))
