"""Modules of vision towers and connectors: adapters change them by every name that transformers has
used, and whatever else they may change there is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.peft.tensor_keys import PREFIX
from adapter_store.errors import IncompatibleAdapter, InvalidAdapter
from adapter_store.images.plan.plan import plan_image
from contract.images.layouts import Layout
from inference_svc.adapters.picture_targets import with_unread
from inference_svc.adapters.targets import build_layout
from inference_svc.model.architectures import load_description
from tests.support.pictures.contents import FURTHER
from tests.support.pictures.models import NAMES, make_reader
from tests.system.engines import CompilingStore
from tests.system.picture_readers import Reader

Tensors: TypeAlias = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["Llava", "SmolVLM"])
def reader(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reader]:
    with closing(Reader(request.param, tmp_path_factory.mktemp("reader"))) as made:
        yield made


@pytest.fixture(scope="module")
def layout(reader: Reader) -> Layout:
    """The layout that a server of the model registers with its store."""
    folder, store = reader.zoo.model_dir, CompilingStore()
    decoder = load_description(folder, with_pictures=True)
    store.register_layout(
        with_unread(build_layout(decoder, "tiny", torch.float32), folder, decoder)
    )
    return store.layout


@pytest.mark.parametrize("name", NAMES)
def test_linear_layers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """All that are computed, and no parameter that is no module, as Gemma 3's connector has."""
    model = make_reader(name, tmp_path)
    decoder = load_description(tmp_path, with_pictures=True)
    layout = build_layout(decoder, "tiny", torch.float32)
    linear = {n for n, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    text = {n for n in linear if "language_model" in n or "text_model" in n or n == "lm_head"}
    unread = {n for n in linear - text if ".head." in n or "audio" in n}
    if name == "Llava":
        unread |= {n for n in linear - text if "layers.2." in n}
    found = [
        linear & {each.name, *(other.name for other in each.other_names)}
        for each in layout.targets
        if each.is_of_pictures
    ]
    assert all(len(each) == 1 for each in found)
    assert set().union(*found) == linear - text - unread


def test_gemmas_projection_is_refused_by_name(tmp_path: Path) -> None:
    """Saved with its connector; alone the connector's norm can be saved."""
    [spec] = FURTHER["whole-projector"]
    with closing(Reader("Gemma3", tmp_path, (spec,))) as made:
        folder = made.zoo.adapter_dirs[spec.name]
    with pytest.raises(InvalidAdapter, match=r"mm_input_projection_weight.*layers and norms"):
        open_checkpoint(folder)


_BEFORE_5 = {"model.language_model.": "language_model.model.", "model.": ""}
RENAMED = {
    "Llava": (
        _BEFORE_5,
        {"model.vision_tower.": "model.vision_tower.vision_model."},
        {
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.vision_model.",
            "model.": "",
        },
    ),
    "SmolVLM": ({"model.vision_model.": "vision_model.", "model.connector.": "connector."},),
    "Gemma3": (_BEFORE_5, {"model.vision_tower.": "model.vision_tower.vision_model."}),
    "Mistral3": (_BEFORE_5,),
    "Qwen2_5_VL": ({"model.language_model.": "model.", "model.visual.": "visual."},),
}
"""The names of modules in other releases of transformers."""


@pytest.mark.parametrize("reader", RENAMED, indirect=True)
def test_adapters_of_other_releases_change_the_same_targets(
    reader: Reader, layout: Layout, tmp_path: Path
) -> None:
    given = reader.zoo.adapter_dirs["of-all"]
    expected = plan_image(open_checkpoint(given), layout)
    spaces = {layout.targets[each.target].space for each in expected.segments}
    # Qwen's merger is in its tower, and Gemma 3's connector has no linear layer.
    assert len(spaces) == (2 if reader.oracle.name in ("Gemma3", "Qwen2_5_VL") else 3)
    for index, names in enumerate(RENAMED[reader.oracle.name]):

        def rename(tensors: Tensors, names: dict[str, str] = names) -> Tensors:
            return {renamed(key, names): value for key, value in tensors.items()}

        folder = changed(given, tmp_path / str(index), rename)
        plan = plan_image(open_checkpoint(folder), layout)
        assert [each.target for each in plan.segments] == [
            each.target for each in expected.segments
        ]


def test_layers_that_nothing_reads_are_named_as_such(reader: Reader, layout: Layout) -> None:
    """LLaVA's connector reads the last layer but one."""
    plan = plan_image(open_checkpoint(reader.zoo.adapter_dirs["of-all"]), layout)
    unread = {space for space, _ in plan.unused}
    is_llava = reader.oracle.name == "Llava"
    assert unread == ({"model.vision_tower.encoder.layers.2"} if is_llava else set())


FC1 = r".*vision.*layers\.0\.mlp\.fc1\.lora_A\.weight"
QUERY = r".*vision.*layers\.0\.self_attn\.q_proj\.lora_B\.weight"
PATCHES = "vision_tower.embeddings.patch_embedding"
HOSTILE: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "inputs": (lambda given: with_shape(given, FC1, (5, 7)), "mlp.fc1.*7 in_features.*has 32"),
    "outputs": (lambda given: with_shape(given, QUERY, (9, 3)), "q_proj.*9 out_features.*has 32"),
    "a layer that is not there": (
        lambda given: {key.replace("layers.1.", "layers.7."): v for key, v in given.items()},
        "has no .*layers.7.*of vision_.* adapters may change linear layers",
    ),
    "a module that is not there": (
        lambda given: {key.replace("out_proj", "odd_proj"): v for key, v in given.items()},
        "has no .*odd_proj.*of vision_.* adapters may change linear layers",
    ),
    "one module by two names": (
        lambda given: given | {twice(k): v.clone() for k, v in given.items() if "0.mlp.fc1" in k},
        "save it once",
    ),
    "a convolution": (
        lambda given: (
            given
            | {
                f"{PREFIX}{PATCHES}.lora_A.weight": torch.zeros(3, 3, 14, 14),
                f"{PREFIX}{PATCHES}.lora_B.weight": torch.zeros(32, 3, 1, 1),
            }
        ),
        "patch_embedding.*changes of convolutions are not supported",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_that_do_not_fit_are_refused_by_name(
    reader: Reader, layout: Layout, case: str, tmp_path: Path
) -> None:
    change, words = HOSTILE[case]
    folder = changed(reader.zoo.adapter_dirs["of-tower"], tmp_path / "hostile", change)
    with pytest.raises((IncompatibleAdapter, InvalidAdapter), match=words):
        plan_image(open_checkpoint(folder), layout)


def test_invocation_tokens_say_nothing_of_pictures(
    reader: Reader, layout: Layout, tmp_path: Path
) -> None:
    values = {"alora_invocation_tokens": [5, 9], "task_type": "CAUSAL_LM"}
    folder = changed(reader.zoo.adapter_dirs["of-tower"], tmp_path / "a", dict, **values)
    with pytest.raises(IncompatibleAdapter, match=r"\(aLoRA\) and changes .*q_proj, which pict"):
        plan_image(open_checkpoint(folder), layout)
    text = changed(reader.zoo.adapter_dirs["of-text"], tmp_path / "b", dict, **values)
    assert plan_image(open_checkpoint(text), layout).segments


def changed(
    folder: Path, target: Path, change: Callable[[Tensors], Tensors], **values: Any
) -> Path:
    """Copies an adapter with its tensors changed, and `values` in its config."""
    shutil.copytree(folder, target)
    weights, config = target / "adapter_model.safetensors", target / "adapter_config.json"
    save_file(change(load_file(weights)), weights)
    given = json.loads(config.read_text()) | {"target_modules": "all-linear"} | values
    config.write_text(json.dumps(given | values))
    return target


def renamed(key: str, names: dict[str, str]) -> str:
    """Renames a tensor by the first of its possible beginnings."""
    name = key.removeprefix(PREFIX)
    found = next(((old, new) for old, new in names.items() if name.startswith(old)), ("", ""))
    return PREFIX + found[1] + name.removeprefix(found[0])


def twice(key: str) -> str:
    """Returns another name of a tensor's module."""
    name = key.removeprefix(PREFIX)
    return PREFIX + name.removeprefix("model.")


def with_shape(given: Tensors, pattern: str, shape: tuple[int, ...]) -> Tensors:
    """Returns tensors of which one has another shape."""
    [key] = [each for each in given if re.fullmatch(pattern, each)]
    return given | {key: torch.zeros(shape)}
