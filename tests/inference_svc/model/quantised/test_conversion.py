"""A checkpoint that `loadout quantize` writes has the weights that a server quantises itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.weights import load_weights
from inference_svc.model.layers import TorchProjections
from inference_svc.model.quantised import conversion
from inference_svc.model.quantised.chosen import weight_form
from tests.support.models.families import MODELS

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def convert(model: Path, out: Path, codes: str) -> list[tuple[int, int]]:
    reports: list[tuple[int, int]] = []
    conversion.convert(model, out, codes, lambda *report: reports.append(report))
    return reports


@pytest.fixture
def plain(random_model, save_model):
    def make(family: str = "Qwen3", dtype: torch.dtype = torch.bfloat16, **changes) -> Path:
        return save_model(random_model(family, **SIZES, **changes).to(dtype))

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codes", ["int4", "int8", "fp8"])
def test_weights_are_the_ones_of_a_server_that_quantises(codes, dtype, plain, tmp_path):
    folder, out = plain(dtype=dtype), tmp_path / "parts" / "out"
    reports = convert(folder, out, codes)
    assert reports[-1] == (len(reports) - 1,) * 2
    chosen, stored = load_description(folder, codes), load_description(out)
    assert chosen.config_sha256 == stored.config_sha256
    assert chosen.blocks == stored.blocks
    assert weight_form(chosen, codes) == weight_form(stored, "none") == codes
    own, read = (
        load_weights(each, description, torch.float32, "cpu", TorchProjections())
        for each, description in ((folder, chosen), (out, stored))
    )
    assert own.num_bytes == read.num_bytes
    for key, projection in own.projections.items():
        rows = projection.out_features
        assert torch.equal(projection.rows(0, rows), read.projections[key].rows(0, rows)), key


def test_files_beside_the_weights_are_copied(plain, tmp_path):
    folder = plain()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"left")
    convert(folder, tmp_path / "out", "int8")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in folder.iterdir()} - {"pytorch_model.bin"}
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, "out"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]


def test_large_results_have_several_files_and_an_index(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "SHARD_BYTES", 20_000)
    folder, out = plain(), tmp_path / "out"
    convert(folder, out, "fp8")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert {path.name for path in files} == set(index["weight_map"].values())
    sizes = (each.nbytes for path in files for each in load_file(path).values())
    assert sum(sizes) == index["metadata"]["total_size"]
    load_weights(out, load_description(out), torch.bfloat16, "cpu", TorchProjections())


def test_experts_are_quantised_and_their_router_is_not(plain, tmp_path):
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder, out = plain("Qwen3Moe", **mixture), tmp_path / "out"
    convert(folder, out, "int4")
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.gate" in ignored
    tensors = load_file(out / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.down_proj.weight_packed" in tensors
    assert load_description(out).blocks == load_description(folder, "int4").blocks


def test_nothing_is_left_of_a_conversion_that_fails(plain, tmp_path):
    folder = plain()
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(UnsupportedModel, match=r"missing tensors: model\.layers\.1\.mlp\.up_proj"):
        convert(folder, tmp_path / "out", "int4")
    assert [each.name for each in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("codes", ["int4", "fp8"])
def test_weights_are_finite(codes, value, plain, tmp_path):
    folder, name = plain(), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 5] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=f"{name} has NaN or infinite values"):
        convert(folder, tmp_path / "out", codes)
    assert not (tmp_path / "out").exists()


def test_a_folder_is_never_written_over(plain, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="out exists"):
        convert(plain(), tmp_path / "out", "int4")


def test_a_quantised_checkpoint_is_refused(plain, tmp_path):
    convert(plain(), tmp_path / "out", "int8")
    with pytest.raises(UnsupportedModel, match=r"--quantize int4: .* quantised already \(compress"):
        convert(tmp_path / "out", tmp_path / "again", "int4")


def test_experts_in_one_tensor_stay_plain_where_groups_do_not_divide(
    random_model, save_model, tmp_path
):
    """No config can list them one by one."""
    family, changes = MODELS["gemma4-moe"]
    folder = save_model(random_model(family, **changes))
    convert(folder, tmp_path / "out", "int4")
    assert load_description(tmp_path / "out").blocks == load_description(folder, "int4").blocks


def test_a_model_of_which_nothing_would_be_quantised_is_refused(random_model, save_model):
    """The one layer whose inputs groups divide has few outputs, and stays plain."""
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 576}
    folder = save_model(random_model("Llama", **sizes, **heads))
    with pytest.raises(UnsupportedModel, match=r"--quantize int4: every layer would stay plain"):
        load_description(folder, "int4")


def test_int4_needs_groups(random_model, save_model, tmp_path):
    folder = save_model(random_model("Llama", hidden_size=48, intermediate_size=80))
    with pytest.raises(UnsupportedModel, match="no layer has a multiple of 32 inputs"):
        convert(folder, tmp_path / "out", "int4")
