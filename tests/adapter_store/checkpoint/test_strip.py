"""An adapter without the base weights that PEFT saves beside it, as its user makes one."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from adapter_store.__main__ import main
from adapter_store.checkpoint.open import open_checkpoint

WEIGHTS = "adapter_model.safetensors"
EMBEDDING = "base_model.model.model.embed_tokens.base_layer.weight"
CONFIG = LlamaConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def folders(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in bf16, and an adapter of it in fp32, saved as PEFT does by default."""
    folder = tmp_path_factory.mktemp("strip")
    CONFIG.tie_word_embeddings = request.param
    model = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    model.save_pretrained(folder / "model")
    targets = ["q_proj", "embed_tokens", *([] if request.param else ["lm_head"])]
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of what it saves along
        adapted = get_peft_model(model.float(), LoraConfig(r=4, target_modules=targets))
        adapted.save_pretrained(str(folder / "adapter"))
    return folder / "model", folder / "adapter"


def test_a_default_save_and_its_copy_have_the_same_a_and_b(folders, tmp_path: Path, capsys) -> None:
    """What servers say of the first is in tests/system/test_trained_adapters.py."""
    model, adapter = folders
    saved = open_checkpoint(adapter)
    assert all(each.is_copy for each in saved.replacements)
    assert len(saved.replacements) == len(
        [key for key in load_file(adapter / WEIGHTS) if "base_layer" in key]
    )
    assert main(["strip", str(adapter), str(tmp_path / "out"), str(model)]) == 0
    printed = capsys.readouterr().out
    assert "stripped model.embed_tokens.weight [48, 16]: equals the base\n" in printed
    before, after = load_file(adapter / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    stripped = open_checkpoint(tmp_path / "out")
    assert (stripped.replacements, stripped.targets.keys()) == ((), saved.targets.keys())
    assert after.keys() == {key for key in before if ".lora_" in key}
    assert all(torch.equal(after[key], before[key]) for key in after)
    num_stripped = len(before) - len(after)
    assert printed.endswith(f"{num_stripped} stripped, {len(after)} kept in {tmp_path / 'out'}\n")


def test_what_was_trained_is_stripped_by_force_only(folders, tmp_path: Path, capsys) -> None:
    model, adapter = folders
    weights = load_file(adapter / WEIGHTS)
    weights[EMBEDDING][[3, 5]] += 1
    changed = tmp_path / "changed"
    changed.mkdir()
    save_file(weights, changed / WEIGHTS)
    (changed / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    arguments = ["strip", str(changed), str(tmp_path / "out"), str(model)]
    assert main(arguments) == 1
    assert "model.embed_tokens.weight differs from the base's in 2 of 48" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*arguments, "--force"]) == 0
    assert open_checkpoint(tmp_path / "out").rank == 4


def test_a_resized_vocabulary_differs(folders, tmp_path: Path, capsys) -> None:
    model, adapter = folders
    smaller = tmp_path / "smaller"
    smaller.mkdir()
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:40].clone()
    save_file(weights, smaller / "model.safetensors")
    assert main(["strip", str(adapter), str(tmp_path / "out"), str(smaller)]) == 1
    assert "is [48, 16], and the base's [40, 16]" in capsys.readouterr().err


def test_without_a_model_nothing_is_compared(folders, tmp_path: Path, capsys) -> None:
    assert main(["strip", str(folders[1]), str(tmp_path / "out")]) == 0
    assert "[48, 16]: not compared" in capsys.readouterr().out


def test_its_tokenizer_and_its_template_are_copied(folders, tmp_path: Path, capsys) -> None:
    folder, out = tmp_path / "adapter", tmp_path / "out"
    shutil.copytree(folders[1], folder)
    texts = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}"}
    for name, text in {**texts, "README.md": "x"}.items():
        (folder / name).write_text(text)
    assert main(["strip", str(folder), str(out)]) == 0
    others = {file.name for file in out.iterdir()} - {"adapter_config.json", WEIGHTS}
    assert {name: (out / name).read_text() for name in others} == texts
    (folder / "chat_template.jinja").write_bytes(b"x" * (2 << 20))
    assert main(["strip", str(folder), str(tmp_path / "again")]) == 1
    assert "chat_template.jinja has more than 1048576 bytes" in capsys.readouterr().err


def test_bad_folders_are_named(folders, tmp_path: Path, capsys) -> None:
    model, adapter = folders
    for arguments, message in (
        ([str(tmp_path / "none"), str(tmp_path / "out")], "none is no folder: give one "),
        ([str(adapter), str(model)], f"{model} exists: nothing is overwritten"),
        ([str(adapter), str(tmp_path / "out"), str(tmp_path)], f"{tmp_path} has no *.safetensors"),
        ([str(adapter)], "usage: "),
    ):
        assert main(["strip", *arguments]) in (1, 2)
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_mlx_has_nothing_to_strip_and_its_copy_is_the_same_adapter(tmp_path: Path, capsys) -> None:
    mlx, out = Path(__file__).parent / "trainers" / "mlx", tmp_path / "out"
    assert main(["strip", str(mlx), str(out)]) == 0
    assert "0 stripped, 8 kept in " in capsys.readouterr().out
    assert open_checkpoint(out).digest == open_checkpoint(mlx).digest


def test_weights_beside_the_adapter_are_not_left_out_in_silence(folders, tmp_path: Path, capsys):
    folder = tmp_path / "adapter"
    shutil.copytree(folders[1], folder)
    (folder / "new_embeddings.safetensors").write_bytes(b"x")
    assert main(["strip", str(folder), str(tmp_path / "out")]) == 1
    assert "new_embeddings.safetensors: rows of added tokens" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
