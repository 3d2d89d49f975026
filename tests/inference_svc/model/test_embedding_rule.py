"""How models embed by the files of sentence-transformers, and models whose class has no head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.sentence_transformers import read_embedding_rule
from inference_svc.model.checkpoint.wrapper import BARE, TEXT_ALONE
from inference_svc.results.embedding_rule import EmbeddingRule, Pooling
from tests.support.models.zoo import make_model

TYPE = "sentence_transformers.models."
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": f"{TYPE}Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{TYPE}Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{TYPE}Normalize"},
]
PROMPTS = {"query": "Instruct: find it\nQuery:", "document": ""}


def write(folder: Path, **files: Any) -> Path:
    """Writes files of sentence-transformers by these names; None leaves one out."""
    found = {
        "config": {"hidden_size": 8},
        "modules": MODULES,
        "pooling": {"word_embedding_dimension": 8, "pooling_mode_lasttoken": True},
        "prompts": {"prompts": PROMPTS, "default_prompt_name": None},
    } | files
    places = {
        "config": "config.json",
        "modules": "modules.json",
        "pooling": "1_Pooling/config.json",
        "prompts": "config_sentence_transformers.json",
        "inputs": "sentence_bert_config.json",
    }
    for name, content in found.items():
        path = folder / places[name]
        path.parent.mkdir(exist_ok=True)
        if content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_folder_as_qwen3_embedding_has_it(tmp_path: Path) -> None:
    rule = read_embedding_rule(write(tmp_path), 8)
    assert rule == EmbeddingRule(8, Pooling.LAST, True, prompts=PROMPTS)


@pytest.mark.parametrize(
    ("flag", "pooling"),
    [
        ("pooling_mode_cls_token", Pooling.FIRST),
        ("pooling_mode_mean_tokens", Pooling.MEAN),
        ("pooling_mode_lasttoken", Pooling.LAST),
    ],
)
def test_each_pooling(tmp_path: Path, flag: str, pooling: Pooling) -> None:
    modules = [*MODULES[:2]]
    rule = read_embedding_rule(write(tmp_path, pooling={flag: True}, modules=modules), 8)
    assert (rule.pooling, rule.is_normalised, rule.refusal) == (pooling, False, "")


def test_the_lengths_of_inputs_and_their_case(tmp_path: Path) -> None:
    inputs = {"max_seq_length": 256, "do_lower_case": True}
    rule = read_embedding_rule(write(tmp_path, inputs=inputs), 8)
    assert (rule.max_tokens, rule.lowercases, rule.refusal) == (256, True, "")
    rule = read_embedding_rule(write(tmp_path, inputs={"max_seq_length": None}), 8)
    assert (rule.max_tokens, rule.lowercases, rule.refusal) == (0, False, "")


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ({"max_seq_length": 0}, "max_seq_length = 0: must be from 1"),
        ({"max_seq_length": "256"}, "max_seq_length = '256'"),
        ({"max_seq_length": True}, "max_seq_length = True"),
        ({"do_lower_case": 1}, "do_lower_case = 1: must be true or false"),
        ("[", "sentence_bert_config.json"),
    ],
)
def test_inputs_that_cannot_be_honoured_are_refused(tmp_path: Path, inputs: Any, why: str) -> None:
    assert why in read_embedding_rule(write(tmp_path, inputs=inputs), 8).refusal


def test_types_of_newer_versions(tmp_path: Path) -> None:
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        each | {"type": f"sentence_transformers.base.modules.{kind.lower()}.{kind}"}
        for each, kind in zip(MODULES, kinds, strict=True)
    ]
    assert read_embedding_rule(write(tmp_path, modules=modules), 8).refusal == ""


def test_a_language_model_embeds_with_its_last_token(tmp_path: Path) -> None:
    write(tmp_path, modules=None, pooling=None, prompts=None)
    assert read_embedding_rule(tmp_path, 8) == EmbeddingRule(8, Pooling.LAST, True)


def test_lengths_of_matryoshka_and_a_default_prompt(tmp_path: Path) -> None:
    config = {"matryoshka_dimensions": [4, 2, 4]}
    prompts = {"prompts": PROMPTS, "default_prompt_name": "query"}
    rule = read_embedding_rule(write(tmp_path, config=config, prompts=prompts), 8)
    assert (rule.dimensions, rule.default_prompt) == ((2, 4), "query")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"modules": "{"}, "modules.json cannot be read"),
        ({"modules": {}}, "must be a list of at most 16"),
        ({"modules": MODULES * 9}, "must be a list of at most 16"),
        ({"modules": [5]}, "not as sentence-transformers saves it"),
        ({"modules": [MODULES[1] | {"type": "os.system"}]}, "not as sentence-transformers"),
        ({"modules": [MODULES[1] | {"path": "../x"}]}, "not as sentence-transformers"),
        ({"modules": [*MODULES, MODULES[0] | {"type": f"{TYPE}Dense"}]}, "Dense is not supported"),
        ({"modules": MODULES[:1]}, "lists 0 poolings"),
        ({"modules": [*MODULES, MODULES[1]]}, "lists 2 poolings"),
        ({"pooling": None}, "does not exist"),
        ({"pooling": {"word_embedding_dimension": 16}}, "word_embedding_dimension = 16"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "pools max_tokens: supported"),
        ({"pooling": {}}, "pools nothing: supported"),
        (
            {"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}},
            "pools mean_tokens, cls_token: supported",
        ),
        (
            {"pooling": {"pooling_mode_mean_tokens": True, "include_prompt": False}},
            "include_prompt = false",
        ),
        ({"prompts": {"prompts": ["query"]}}, "prompts must be at most 64"),
        ({"prompts": {"prompts": {"query": 5}}}, "prompts must be texts"),
        ({"prompts": {"prompts": {"query": "q" * 20_000}}}, "prompts must be texts"),
        ({"prompts": {"default_prompt_name": "query"}}, "is no prompt"),
        ({"config": {"matryoshka_dimensions": "8"}}, "must be a list of integers"),
        ({"config": {"matryoshka_dimensions": [9]}}, "must be from 1 to 8"),
    ],
)
def test_files_that_cannot_be_honoured_are_named(
    tmp_path: Path, files: dict[str, Any], reason: str
) -> None:
    assert reason in read_embedding_rule(write(tmp_path, **files), 8).refusal


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_checkpoints_of_classes_without_a_head(tmp_path: Path, kind: str) -> None:
    model = make_model(kind, tmp_path)
    assert load_description(tmp_path).wrapper == TEXT_ALONE
    model.model.save_pretrained(tmp_path)
    found = load_description(tmp_path)
    assert found.architecture == type(model.model).__name__
    assert found.wrapper == BARE
    assert found.head.is_tied
    assert not found.generates


def test_names_without_the_first_component_beside_a_class_with_a_head(tmp_path: Path) -> None:
    """Such files has Qwen3-Embedding."""
    model = make_model("qwen3", tmp_path, tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen3ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_description(tmp_path)
    assert (found.wrapper, found.generates, found.head.is_tied) == (BARE, True, True)
