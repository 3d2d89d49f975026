"""A folder that is not whole is refused at once, by the name of the file and with what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.files import check_files, missing_files, weight_files

TOKENIZER = '{"model": {"type": "BPE", "vocab": {"a": 0}}}'
INDEX = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 130\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return tmp_path


def test_a_whole_folder(folder: Path) -> None:
    check_files(folder)
    (folder / "tokenizer_config.json").unlink()
    check_files(folder)


@pytest.mark.parametrize("vocabulary", ["tokenizer.model", "vocab.json"])
def test_vocabularies_of_other_forms_are_for_the_library(folder: Path, vocabulary: str) -> None:
    (folder / "tokenizer.json").rename(folder / vocabulary)
    check_files(folder)
    (folder / vocabulary).write_text(POINTER)
    with pytest.raises(UnsupportedModel, match=f"{vocabulary} is a pointer of Git LFS"):
        check_files(folder)


def test_shards(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    assert weight_files(folder) == [folder / "model.safetensors"], "which is read first"
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    assert missing_files(folder) == ["model-2.safetensors"]
    with pytest.raises(
        UnsupportedModel, match=r"has no model-2.safetensors: copy it from the model's source"
    ):
        check_files(folder)
    (folder / "model-2.safetensors").write_bytes(b"")
    check_files(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pickled_weights_are_seen(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    save = rf"from_pretrained\('{folder}'\)\.save_pretrained\('{folder}'\)"
    how = f"but {name}: .*safetensors; .* in Python with {save} of the model's class"
    with pytest.raises(UnsupportedModel, match=how):
        check_files(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "has no config.json: copy it from the model's source"),
        ("config.json", POINTER, "config.json is a pointer of Git LFS"),
        ("tokenizer_config.json", POINTER, "tokenizer_config.json is a pointer of Git LFS"),
        ("model.safetensors", None, "has no model.safetensors and no model.safetensors.index.json"),
        ("model.safetensors", POINTER, "model.safetensors is a pointer of Git LFS .* git lfs pull"),
        ("tokenizer.json", None, r"has no tokenizer.json: put .*save_pretrained\('{folder}'\)"),
        (
            "tokenizer.json",
            "",
            r"tokenizer.json cannot be read: .*; copy it from the model's source",
        ),
        ("tokenizer.json", TOKENIZER[:-9], "tokenizer.json cannot be read: .* column"),
        ("tokenizer.json", POINTER, "tokenizer.json is a pointer of Git LFS in place of the file"),
        ("tokenizer.json", "[" * 200_000, "tokenizer.json cannot be read: "),
        ("tokenizer.json", "[]", "tokenizer.json does not hold a JSON object; copy it"),
        (
            "tokenizer.json",
            "{}",
            "tokenizer.json has no vocabulary: copy it from the model's source",
        ),
        ("tokenizer.json", '{"model": {"vocab": {}}}', "tokenizer.json has no vocabulary"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read: "),
    ],
)
def test_what_is_missing_or_broken_is_named(
    folder: Path, name: str, content: str | None, message: str
) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(UnsupportedModel, match=message.format(folder=folder)) as caught:
        check_files(folder)
    assert "\n" not in str(caught.value)
