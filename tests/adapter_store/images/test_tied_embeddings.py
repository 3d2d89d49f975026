"""Adapters with ensure_weight_tying: embedding and head have one change, as PEFT loads it."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.errors import IncompatibleAdapter
from adapter_store.images.compile import compile_image
from contract.images.segment_kinds import SegmentKind
from tests.support.store.peft_models import (
    EMBEDDING,
    HEAD,
    HIDDEN,
    VOCAB,
    A,
    B,
    Q,
    Values,
    adapt,
    compiled,
    layout,
    make_model,
    module,
    tied,
)

PREFIX = "base_model.model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FULL = SegmentKind.FULL
SAVED: dict[str, Any] = {"modules_to_save": ["embed_tokens", "lm_head"]}
ADAPTED: dict[str, Any] = {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}

# The options, changes of tensors (None: it is removed) and changes of the config that PEFT saved.
CASES: dict[str, tuple[dict[str, Any], Mapping[str, float | None], dict[str, Any]]] = {
    "saved, as PEFT names it": (SAVED, {}, {}),
    "saved, with both in the config": (SAVED, {}, SAVED),
    "the embedding saved": ({"modules_to_save": ["embed_tokens"]}, {}, {}),
    "the head saved": ({"modules_to_save": ["lm_head"]}, {}, {}),
    "saved, and the halves differ": (SAVED, {"lm_head.weight": 2.0}, {}),
    "adapted": (ADAPTED, {}, {}),
    "adapted, with both in the config": (ADAPTED, {}, ADAPTED),
    "the head adapted": ({"target_modules": ["q_proj", "lm_head"]}, {}, {}),
    "adapted by an expression": ({"target_modules": r".*q_proj|.*embed_tokens"}, {}, {}),
    "adapted, with another scale of the head": (
        {**ADAPTED, "alpha_pattern": {"lm_head": 11}},
        {},
        {},
    ),
    "adapted with DoRA": ({**ADAPTED, "use_dora": True}, {}, {}),
    "adapted, and the halves differ": (ADAPTED, {"lm_head.lora_B.weight": 2.0}, {}),
    "adapted, of the embedding alone": (
        ADAPTED,
        {"lm_head.lora_A.weight": None, "lm_head.lora_B.weight": None},
        ADAPTED,
    ),
    "rows": ({"trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [3, 5]}}, {}, {}),
    "neither": ({}, {}, {}),
}


def save_tied(folder: Path, case: str) -> Any:
    """Saves an adapter of a tied base, with changes; returns the model with what PEFT loads."""
    options, changes, fields = copy.deepcopy(CASES[case])
    adapt(
        folder,
        make_model(tied=True),
        ensure_weight_tying=True,
        save_embedding_layers=False,
        **options,
    )
    tensors = load_file(folder / WEIGHTS)
    for name, factor in changes.items():
        tensor = tensors.pop(PREFIX + name)
        if factor is not None:
            tensors[PREFIX + name] = factor * tensor
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | fields))
    with warnings.catch_warnings(action="ignore"):
        return peft.PeftModel.from_pretrained(make_model(tied=True), str(folder)).eval()


def weight_of(base: torch.Tensor, name: str, values: Values) -> torch.Tensor:
    """Returns [vocabulary, features], with an image's changes."""
    weight = values.get((name, FULL), base).clone()
    if (name, SegmentKind.ROWS) in values:
        weight[values[name, SegmentKind.ROW_IDS].long()] = values[name, SegmentKind.ROWS]
    if (name, A) in values:
        a, b = values[name, A], values[name, B]
        weight += a @ b if name == EMBEDDING else b.T @ a
    if (name, SegmentKind.MAGNITUDE) in values:
        norms = weight.norm(dim=0 if name == EMBEDDING else 1, keepdim=True)
        weight *= values[name, SegmentKind.MAGNITUDE].reshape(norms.shape) / norms
    return weight


@pytest.mark.parametrize("case", CASES)
def test_a_tied_base_has_one_change_in_both_places(tmp_path: Path, case: str) -> None:
    """peft#2879, unsloth#9331: `ensure_weight_tying` with embed_tokens and lm_head."""
    loaded = save_tied(tmp_path, case)
    _, values = compiled(tmp_path, tied(layout()))
    base = make_model(tied=True).get_input_embeddings().weight.detach()
    x = torch.randn(5, HIDDEN)
    with torch.no_grad():
        head, embedding = (weight_of(base, name, values) for name in (HEAD, EMBEDDING))
        torch.testing.assert_close(module(loaded, EMBEDDING)(torch.arange(VOCAB)), embedding)
        torch.testing.assert_close(module(loaded, HEAD)(x), x @ head.T)
    assert embedding.equal(base) == (case == "neither")
    assert (HEAD in {name for name, _ in values}) == (case != "neither")


def test_a_saved_weight_of_both_lies_in_the_image_once(tmp_path: Path) -> None:
    """peft#2879: one weight for both."""
    save_tied(tmp_path, "saved, as PEFT names it")
    segments = compile_image(open_checkpoint(tmp_path), tied(layout())).plan.segments
    whole = [each for each in segments if each.kind is FULL]
    assert len(whole) == 2
    assert whole[0].offset == whole[1].offset


def test_the_setting_is_of_the_digest_where_it_decides(tmp_path: Path) -> None:
    digests: dict[str, set[str]] = {}
    for case in ("adapted, with both in the config", "neither"):
        folder = tmp_path / case
        save_tied(folder, case)
        fields = json.loads((folder / CONFIG).read_text())
        for is_tied in (True, False):
            (folder / CONFIG).write_text(json.dumps(fields | {"ensure_weight_tying": is_tied}))
            digests.setdefault(case, set()).add(open_checkpoint(folder).digest)
    assert [len(found) for found in digests.values()] == [2, 1]


def test_a_base_that_ties_nothing_has_both_as_they_are_saved(tmp_path: Path) -> None:
    """PEFT only warns there, and loads each by itself."""
    adapted = adapt(tmp_path, ensure_weight_tying=True, **SAVED)
    _, values = compiled(tmp_path)
    for name in (EMBEDDING, HEAD):
        assert values[name, FULL].equal(module(adapted, name).modules_to_save["default"].weight)
    assert not values[EMBEDDING, FULL].equal(values[HEAD, FULL])


def test_a_head_that_only_the_tie_adapts_needs_a_tied_base(tmp_path: Path) -> None:
    """PEFT leaves its A and B unused where the base ties nothing."""
    save_tied(tmp_path, "adapted")
    with pytest.raises(IncompatibleAdapter, match="only ensure_weight_tying adapts it") as caught:
        compiled(tmp_path)
    assert (caught.value.subject, caught.value.reason) == (
        f"{PREFIX}lm_head.lora_A.weight",
        "TARGET_UNKNOWN",
    )
    _, values = compiled(tmp_path, tied(layout()))
    assert {name for name, _ in values} == {Q, EMBEDDING, HEAD}


@pytest.mark.parametrize("is_set", [False, True])
def test_a_head_whose_weight_is_a_named_parameter_is_served(tmp_path: Path, is_set: bool) -> None:
    """`target_parameters` names it, and `target_modules` does not."""
    adapted = adapt(tmp_path, target_parameters=["lm_head.weight"])
    config = json.loads((tmp_path / CONFIG).read_text()) | {"ensure_weight_tying": is_set}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    _, values = compiled(tmp_path)
    assert values[HEAD, A].equal(module(adapted, HEAD).lora_A["default"].weight)


def test_a_magnitude_that_the_other_half_lacks_is_missed(tmp_path: Path) -> None:
    save_tied(tmp_path, "adapted with DoRA")
    tensors = {k: v for k, v in load_file(tmp_path / WEIGHTS).items() if "lm_head" not in k}
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(IncompatibleAdapter, match="ties to it, has none") as caught:
        compiled(tmp_path, tied(layout()))
    assert caught.value.reason == "TARGET_MISSING"
