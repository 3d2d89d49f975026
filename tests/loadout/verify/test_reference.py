"""Where the reference's base model is read, and the next step where it is another form of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from loadout.demo.adapters import MODEL
from loadout.verify import reference
from loadout.verify.reference import BadReference, Reference
from loadout.verify.run import _hint

pytest.importorskip("peft")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").touch()
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.gguf").touch()
    return folder


def test_a_folder_of_several_files_is_refused(adapter: Path, model: Path) -> None:
    (model / "b.GGUF").touch()
    with pytest.raises(BadReference, match="has 2 GGUF files: name one of them with --model"):
        Reference(adapter, str(model), "float32")


def test_gguf_needs_its_package(
    adapter: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "find_spec", lambda name: None)
    for place in (model, model / "a.gguf"):
        with pytest.raises(BadReference, match=r"needs gguf: pip install 'loadout\[verify\]'"):
            Reference(adapter, str(place), "float32")


def test_a_library_that_is_missing_is_named(adapter: Path, tmp_path: Path) -> None:
    """Of a quantised checkpoint."""
    model = shutil.copytree(MODEL, tmp_path / "quantised")
    path = model / "config.json"
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantised}))
    with pytest.raises(BadReference, match=r"cannot be computed: .*gptqmodel"):
        Reference(adapter, str(model), "float32")


@pytest.mark.parametrize(
    ("form", "is_quantised", "hint"),
    [
        ("", False, ""),
        ("", True, "The service holds plain weights: give the plain model"),
        ("int4", False, "The service holds weights in int4: give the same checkpoint"),
        ("nf4", True, "The service holds weights in nf4. The library that computes"),
    ],
)
def test_base_models_of_other_forms(form: str, is_quantised: bool, hint: str) -> None:
    found = _hint(form, is_quantised=is_quantised)
    assert found.startswith(f". {hint}" if hint else "")
    assert bool(found) == bool(hint)
