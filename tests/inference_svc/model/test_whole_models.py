"""The text part of models of several towers is served from the whole checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.base_hashes import hashing_base
from inference_svc.model.checkpoint.headers import stored_tensors, tower_modules
from inference_svc.model.checkpoint.parameters import weights_bytes
from inference_svc.model.checkpoint.weights import load_weights
from inference_svc.model.layers import TorchProjections
from tests.support.models.whole_models import WHOLE, make_whole
from tests.support.pictures.models import make_reader

pytestmark = pytest.mark.matrix


@pytest.fixture
def whole(tmp_path: Path):
    """`whole(name)`: a random model, and its folder."""

    return lambda name: (make_whole(name, tmp_path / name), tmp_path / name)


def renamed(folder: Path, prefixes: dict[str, str]) -> None:
    """Names the tensors of a checkpoint otherwise."""
    saved = load_file(folder / "model.safetensors")
    named = {}
    for name, tensor in saved.items():
        before = next((each for each in prefixes if name.startswith(each)), "")
        named[prefixes.get(before, "") + name.removeprefix(before)] = tensor
    save_file(named, folder / "model.safetensors")


OLDER = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}
NEWER = {old: new for new, old in OLDER.items()}


@pytest.mark.parametrize("names", [OLDER, NEWER], ids=["older names", "newer names"])
@pytest.mark.parametrize("path", ["torch", "native"])
@pytest.mark.parametrize("name", WHOLE)
def test_logits(name, path, names, whole, load_decoder, relative_rms):
    model, folder = whole(name)
    renamed(folder, names)
    token_ids = torch.randint(1, 79, (60,)).tolist()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([token_ids])).logits[0]
    decoder = load_decoder(folder, path=path)
    assert relative_rms(expected, decoder.logits(token_ids, chunk=60)) <= 1e-4


@pytest.mark.parametrize("name", WHOLE)
def test_only_the_text_part_is_read(name, whole):
    model, folder = whole(name)
    description = load_description(folder)
    assert description.architecture == model.config.architectures[0]
    assert 80 in description.placeholder_ids
    assert not {1, 79}.intersection(description.placeholder_ids)
    weights = load_weights(folder, description, torch.float32, "cpu", TorchProjections())
    parts = {name: each.nbytes for name, each in model.named_parameters()}
    text = {name for name in parts if name.startswith(("model.language_model.", "lm_head."))}
    assert parts.keys() - text
    text_bytes = sum(parts[name] for name in text)
    assert weights.num_bytes == weights_bytes(description, torch.float32)
    if description.mixtures:  # whose rows are padded
        assert text_bytes <= weights.num_bytes <= 1.1 * text_bytes
    else:
        assert weights.num_bytes == text_bytes
    with hashing_base(folder, description, 1) as base:
        assert {"model.embed_tokens", "lm_head", "model.norm"} <= base().keys()


@pytest.mark.parametrize("names", [OLDER, NEWER], ids=["older names", "newer names"])
@pytest.mark.parametrize("name", WHOLE)
def test_linear_layers_of_other_towers_are_known_by_their_names(name, names, whole):
    """Those of the installed transformers first, whose adapters have them; and of checkpoints."""
    model, folder = whole(name)
    renamed(folder, names)
    found = {
        each.names[0]: each for each in tower_modules(folder, load_description(folder).wrapper)
    }
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".language_model." not in name
    }
    del layers["lm_head"]
    assert layers
    for name, module in layers.items():
        expected = module.in_features, module.out_features
        assert (found[name].in_features, found[name].out_features) == expected
        assert name.removeprefix("model.") in found[name].names
        assert found[name].tower == name.split(".")[1]


def test_layers_that_bitsandbytes_packed_have_their_sizes(whole):
    """Their tensors are bytes in one row; an adapter of them is accepted all the same."""
    _, folder = whole("Gemma3")
    wrapper = load_description(folder).wrapper
    before = tower_modules(folder, wrapper)
    tensors = load_file(folder / "model.safetensors")
    name = next(each for each in tensors if "vision_tower" in each and "q_proj.weight" in each)
    shape = [*tensors[name].shape]

    def state(facts: str) -> torch.Tensor:
        return torch.tensor([*facts.encode()]).byte()

    facts = json.dumps({"shape": shape})
    tensors[name] = torch.zeros(math.prod(shape) // 2, 1, dtype=torch.uint8)
    state_name = f"{name}.quant_state.bitsandbytes__nf4"
    save_file(tensors | {state_name: state(facts)}, folder / "model.safetensors")
    assert tower_modules(folder, wrapper) == before
    num_all = len(tower_modules(folder, wrapper, with_norms=True))
    minus_one = json.dumps({"shape": [shape[0], -1]})
    for broken in (facts[1:], minus_one, facts + " " * 4096):
        save_file(tensors | {state_name: state(broken)}, folder / "model.safetensors")
        assert len(tower_modules(folder, wrapper, with_norms=True)) == num_all - 1


@pytest.mark.parametrize("offsets", [[1, 0], [-1, 0], [0, 1 << 70], [1 << 70] * 2, [0, 0.5]])
def test_a_tensor_outside_of_its_file_is_refused(offsets, tmp_path):
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": offsets}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        list(stored_tensors(tmp_path))


def test_a_tower_of_a_published_checkpoint_has_its_present_names(whole):
    """Before release 5, transformers had another module in between."""
    wrapper = load_description(whole("Gemma3")[1]).wrapper
    old, new = "vision_tower.vision_model.encoder.x", "vision_tower.encoder.x"
    for stored in (old, f"model.{old}", new, f"model.{new}"):
        names = wrapper.tower_names(stored)
        assert names == (f"model.{new}", new, f"model.{old}", old)


def test_a_head_of_its_own_is_found_where_config_json_does_not_say(whole):
    _, folder = whole("Ministral3")
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert not load_description(folder).head.is_tied
    saved = load_file(folder / "model.safetensors")
    head = next(name for name in saved if name.endswith("lm_head.weight"))
    save_file({k: v for k, v in saved.items() if k != head}, folder / "model.safetensors")
    assert load_description(folder).head.is_tied


def test_a_head_that_differs_is_served(whole, load_decoder, relative_rms, caplog):
    """The config that transformers saves says that it is the embedding; transformers does as we."""
    model, folder = whole("Ministral3")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    token_ids = torch.randint(1, 79, (60,)).tolist()
    with torch.no_grad():
        again = type(model).from_pretrained(folder).eval()
        expected = again(input_ids=torch.tensor([token_ids])).logits[0]
    assert not load_description(folder).head.is_tied
    assert "lm_head.weight has other values: these are served" in caplog.text
    decoder = load_decoder(folder)
    assert relative_rms(expected, decoder.logits(token_ids, chunk=60)) <= 1e-4
    saved = load_file(folder / "model.safetensors")
    head, embedding = (
        next(name for name in saved if name.endswith(end))
        for end in ("lm_head.weight", "embed_tokens.weight")
    )
    save_file(saved | {head: saved[embedding].clone()}, folder / "model.safetensors")
    assert load_description(folder).head.is_tied


@pytest.mark.parametrize("path", ["torch", "native"])
def test_experts_of_published_files_are_transposed(path, tmp_path, load_decoder, relative_rms):
    """transformers writes the ones that it has made as it computes with them."""
    model = make_reader("Qwen3VLMoe", tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in saved.items()
    }
    assert sum(".experts." in name for name in saved) == 4
    token_ids = torch.randint(4, 300, (60,)).tolist()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([token_ids])).logits[0]
    for tensors in (saved, turned):
        save_file(tensors, tmp_path / "model.safetensors")
        decoder = load_decoder(tmp_path, path=path)
        assert relative_rms(expected, decoder.logits(token_ids, chunk=60)) <= 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config = None: must describe the text part"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type = 'llama': supported"),
        (
            {"text_config": {"model_type": "mistral", "residual_scale": 2}},
            "text_config: residual_scale = 2: not known for MistralForCausalLM",
        ),
        ({"residual_scale": 2}, "residual_scale = 2: not known for Mistral3ForConditional"),
    ],
)
def test_refused_by_name(changes, message, tmp_path):
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedModel, match=message):
        load_description(tmp_path)


def test_a_tensor_of_no_part_is_refused(whole):
    _, folder = whole("Mistral3")
    saved = load_file(folder / "model.safetensors")
    save_file(saved | {"audio_tower.weight": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"unexpected tensors: audio_tower\.weight"):
        load_weights(folder, load_description(folder), torch.float32, "cpu", TorchProjections())
