"""How models embed by the files of sentence-transformers, and models whose class has no head."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.sentence_transformers import read_embedding_rule
from inference_svc.model.checkpoint.wrapper import BARE, TEXT_ALONE
from inference_svc.results.embedding_rule import EmbeddingRule, Pooling
from inference_svc.results.pooling import HiddenSum, PoolingOption, pooled
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
        "tokenizer": "tokenizer_config.json",
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
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True}, Pooling.FIRST),
        ({"pooling_mode_mean_tokens": True}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode": "cls", "embedding_dimension": 8}, Pooling.FIRST),
        ({"pooling_mode": "mean", "include_prompt": True}, Pooling.MEAN),
        ({"pooling_mode": ["lasttoken"]}, Pooling.LAST),
    ],
    ids=str,
)
def test_each_pooling(tmp_path: Path, config: dict[str, object], pooling: Pooling) -> None:
    """As older versions of sentence-transformers save it, and newer ones."""
    modules = [*MODULES[:2]]
    rule = read_embedding_rule(write(tmp_path, pooling=config, modules=modules), 8)
    assert (rule.pooling, rule.is_normalised, rule.refusal) == (pooling, False, "")


def test_the_lengths_of_inputs_and_their_case(tmp_path: Path) -> None:
    inputs = {"max_seq_length": 256, "do_lower_case": True}
    rule = read_embedding_rule(write(tmp_path, inputs=inputs), 8)
    assert (rule.max_tokens, rule.lowercases, rule.refusal) == (256, True, "")
    rule = read_embedding_rule(write(tmp_path, inputs={"max_seq_length": None}), 8)
    assert (rule.max_tokens, rule.lowercases, rule.refusal) == (0, False, "")


@pytest.mark.parametrize(
    "family", ["roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"]
)
def test_the_lengths_of_inputs_in_files_of_older_versions(tmp_path: Path, family: str) -> None:
    """The first file with content decides, and a refusal names it."""
    name = f"sentence_{family}_config.json"
    (write(tmp_path, inputs={}) / name).write_text('{"max_seq_length": 128}')
    assert read_embedding_rule(tmp_path, 8).max_tokens == 128
    (tmp_path / name).write_text('{"max_seq_length": 0}')
    assert read_embedding_rule(tmp_path, 8).refusal.startswith(f"{name}: max_seq_length = 0")
    write(tmp_path, inputs={"max_seq_length": 64})
    assert read_embedding_rule(tmp_path, 8).max_tokens == 64


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, 256),
        ({"inputs": {"transformer_task": "feature-extraction"}}, 256),
        ({"inputs": {"max_seq_length": 512}}, 512),
        ({"modules": None, "pooling": None, "prompts": None}, 0),
        ({"tokenizer": {"model_max_length": int(1e30)}}, 0),
        ({"tokenizer": {"model_max_length": "256"}}, 0),
    ],
)
def test_the_length_of_inputs_by_the_tokenizer(
    tmp_path: Path, files: dict[str, Any], most: int
) -> None:
    """sentence-transformers 6 saves it there. Of a language model it is no limit."""
    write(tmp_path, **{"tokenizer": {"model_max_length": 256}} | files)
    rule = read_embedding_rule(tmp_path, 8)
    assert (rule.max_tokens, rule.refusal) == (most, "")


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


DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": f"{TYPE}Dense"}


def write_dense(folder: Path, shape: tuple[int, int] = (3, 8), **changes: Any) -> Path:
    """Writes a folder with a dense layer before the normalisation."""
    write(folder, modules=[*MODULES[:2], DENSE, MODULES[2]])
    config = {
        "in_features": 8,
        "out_features": 3,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    } | changes
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    tensors = {"linear.weight": torch.randn(shape), "linear.bias": torch.randn(shape[0])}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("torch.nn.modules.activation.Tanh", torch.tanh),
        ("torch.nn.modules.linear.Identity", lambda x: x),
        ("torch.nn.modules.activation.ReLU", torch.relu),
        ("torch.nn.modules.activation.Sigmoid", torch.sigmoid),
    ],
)
def test_a_dense_layer_stands_behind_the_pooling(
    tmp_path: Path, activation: str, function: Any
) -> None:
    """The config is as sentence-transformers 6 saves it."""
    names = {f"module_{end}_name": "sentence_embedding" for end in ("input", "output")}
    changes = {"activation_function": activation, "use_residual": False} | names
    rule = read_embedding_rule(write_dense(tmp_path, **changes), 8)
    assert (rule.size, rule.state_size, rule.refusal) == (3, 8, "")
    option = PoolingOption(Pooling.MEAN, True, 3, 8)
    state = torch.randn(8, generator=torch.Generator().manual_seed(1))
    found = pooled([HiddenSum(0, 2, (2 * state).numpy().tobytes())], option, rule.dense)
    [layer] = rule.dense
    assert layer.bias is not None
    wanted = function(torch.from_numpy(layer.weight) @ state + torch.from_numpy(layer.bias))
    np.testing.assert_allclose(found, wanted / wanted.norm(), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"in_features": 7}, "in_features = 7, not 8"),
        ({"out_features": 0}, "out_features = 0: must be an integer from 1"),
        ({"out_features": True}, "out_features = True: must be an integer"),
        ({"out_features": 1 << 22}, "2_Dense/config.json: a weight of 4194304 x 8 numbers: the"),
        ({"out_features": 4}, r"linear.weight has shape \(3, 8\), not \(4, 8\)"),
        ({"activation_function": "os.system"}, "activation_function = 'os.system': supported are"),
        ({"use_residual": True}, "2_Dense/config.json: use_residual = True is not supported"),
        ({"module_input_name": "token_embeddings"}, "module_input_name = 'token_embeddings': "),
        ({"module_output_name": "other"}, "module_output_name = 'other': supported is 'sentence_"),
    ],
)
def test_a_dense_layer_that_cannot_be_honoured(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    rule = read_embedding_rule(write_dense(tmp_path, **changes), 8)
    assert re.search(why, rule.refusal), rule.refusal


def test_the_weights_of_all_dense_layers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sum: the second layer of 3 x 3 is one too many."""
    folder = write_dense(tmp_path)
    second = DENSE | {"path": "3_Dense"}
    write(folder, modules=[*MODULES[:2], DENSE, second, MODULES[2]])
    (folder / "3_Dense").mkdir()
    config = {"in_features": 3, "out_features": 3, "bias": False}
    (folder / "3_Dense" / "config.json").write_text(json.dumps(config))
    save_file({"linear.weight": torch.eye(3)}, folder / "3_Dense" / "model.safetensors")
    assert [len(each.weight) for each in read_embedding_rule(folder, 8).dense] == [3, 3]
    limit = "inference_svc.model.checkpoint.sentence_transformers.MAX_WEIGHTS"
    monkeypatch.setattr(limit, 3 * 8 + 3 * 3 - 1)
    assert "3_Dense/config.json: a weight of 3 x 3" in read_embedding_rule(folder, 8).refusal


def test_a_pickled_dense_layer_is_refused(tmp_path: Path) -> None:
    folder = write_dense(tmp_path)
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    assert "2_Dense/pytorch_model.bin is a pickle" in read_embedding_rule(folder, 8).refusal
    (folder / "2_Dense" / "model.safetensors").write_bytes(b"no header")
    assert "2_Dense/model.safetensors cannot be read" in read_embedding_rule(folder, 8).refusal


def test_a_dense_layer_behind_the_normalisation_is_refused(tmp_path: Path) -> None:
    write_dense(tmp_path)
    write(tmp_path, modules=[*MODULES, DENSE])
    assert "must stand behind Pooling" in read_embedding_rule(tmp_path, 8).refusal


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
        ({"modules": [*MODULES, MODULES[0] | {"type": f"{TYPE}LSTM"}]}, "LSTM is not supported"),
        ({"modules": MODULES[:1]}, "lists 0 poolings"),
        ({"modules": [*MODULES, MODULES[1]]}, "lists 2 poolings"),
        ({"pooling": None}, "does not exist"),
        ({"pooling": {"word_embedding_dimension": 16}}, "word_embedding_dimension = 16"),
        ({"pooling": {"embedding_dimension": 16}}, "embedding_dimension = 16"),
        ({"pooling": {"pooling_mode": ["mean", "cls"]}}, "pools mean_tokens, cls_token: supported"),
        ({"pooling": {"pooling_mode": "weightedmean"}}, "pools weightedmean: supported"),
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
