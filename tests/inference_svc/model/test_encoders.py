"""Descriptions of encoders: what they refuse, by key and value, and what they ask of servers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from inference_svc.adapters.targets import build_layout
from inference_svc.backends.cuda.factory import CudaFactory
from inference_svc.backends.select import check_features
from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.classifier import read_score_head
from inference_svc.model.checkpoint.sentence_transformers import read_embedding_rule
from inference_svc.model.checkpoint.tensors import check_tensors
from inference_svc.model.checkpoint.weights import load_weights
from inference_svc.model.description import Rank
from inference_svc.model.layers import TorchProjections
from inference_svc.model.sharding.description import of_rank
from inference_svc.model.sharding.stages import of_stage
from inference_svc.results.embedding_rule import Pooling
from tests.support.models.encoders import FAMILIES, MAX_TOKENS, save_encoder

OLD = {"weight": "gamma", "bias": "beta"}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("bert")
    save_encoder("bert", folder, "Model")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("end", ["Model", "ForMaskedLM"])
def test_classes_of_a_family(family: str, end: str, tmp_path: Path) -> None:
    """The head of a language model aside, they are one model."""
    save_encoder(family, tmp_path, end)
    decoder = load_description(tmp_path)
    check_tensors(tmp_path, decoder)
    assert decoder.max_position_embeddings == MAX_TOKENS
    assert (decoder.generates, decoder.labels, decoder.kv_shapes) == (False, (), ())


@pytest.mark.parametrize("name", ["Bert", "Roberta", "XLMRoberta", "ModernBert"])
def test_defaults_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """A file that leaves keys out means what transformers assumes."""
    config = getattr(transformers, f"{name}Config")()
    full = config.to_dict() | {"architectures": [f"{name}Model"]}
    found = []
    for values in (full, {"architectures": [f"{name}Model"]}):
        (tmp_path / "config.json").write_text(json.dumps(values))
        found.append(load_description(tmp_path))
    assert found[0].blocks == found[1].blocks
    assert found[0].encoder == found[1].encoder
    assert found[0].max_position_embeddings == found[1].max_position_embeddings
    assert found[0].vocab_size == found[1].vocab_size == config.vocab_size


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"is_decoder": True}, "is_decoder = True: only encoders"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu': supported are silu, .*, gelu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ({"hidden_size": 63}, "hidden_size = 63: not a multiple of 4 heads"),
        ({"add_cross_attention": True}, "add_cross_attention = True"),
        ({"embedding_size": 32}, "embedding_size = 32: not known for BertModel"),
        ({"architectures": ["BertForQuestionAnswering"]}, "architectures = "),
        ({"architectures": ["BertLMHeadModel"]}, "supported is one of .*, BertModel, "),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}, "plain"),
    ],
)
def test_refused_by_name(bert: Path, tmp_path: Path, change: dict[str, Any], culprit: str) -> None:
    values = json.loads((bert / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match=culprit):
        load_description(tmp_path)


def test_what_encoders_are_not_served_with(bert: Path) -> None:
    decoder = load_description(bert)
    with pytest.raises(UnsupportedModel, match="--tensor-parallel 2: BertModel is an encoder"):
        of_rank(decoder, Rank(0, 2))
    with pytest.raises(UnsupportedModel, match="--pipeline-parallel 2: BertModel is an encoder"):
        of_stage(decoder, 0, 2)
    with pytest.raises(UnsupportedModel, match="--quantize int8: encoders are served in plain"):
        load_description(bert, "int8")
    with pytest.raises(UnsupportedModel, match=r"does not compute .*both_ways, decoder\.enc"):
        check_features(CudaFactory(), decoder)
    with pytest.raises(UnsupportedModel, match=r"a classifier needs pooler\.dense\.weight"):
        read_score_head(bert, decoder, has_classifiers=True)
    many = replace(decoder, labels=tuple(map(str, range(1025))))
    with pytest.raises(UnsupportedModel, match="a classifier of 1025 labels: at most 1024 are"):
        read_score_head(bert, many)


def test_heads_of_modernbert_that_are_refused(tmp_path: Path) -> None:
    save_encoder("modernbert", tmp_path, "ForSequenceClassification")
    values = json.loads((tmp_path / "config.json").read_text())
    for key, value, culprit in (
        ("classifier_pooling", "max", "classifier_pooling = 'max': supported are cls, mean"),
        ("classifier_activation", "relu", "classifier_activation = 'relu': supported are silu"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | {key: value}))
        with pytest.raises(UnsupportedModel, match=culprit):
            load_description(tmp_path)


def test_a_folder_without_poolings_averages_all_tokens(bert: Path) -> None:
    assert read_embedding_rule(bert, 64, Pooling.MEAN).pooling is Pooling.MEAN


@pytest.mark.parametrize(
    ("family", "tower", "name"),
    [
        ("bert", "bert.", "encoder.layer.1.attention.self.query"),
        ("roberta", "roberta.", "encoder.layer.1.output.dense"),
        ("xlm-roberta", "roberta.", "embeddings.word_embeddings"),
        ("modernbert", "model.", "layers.1.attn.Wo"),
    ],
)
def test_names_of_targets(family: str, tower: str, name: str, tmp_path: Path) -> None:
    """As trainers save them: of the class with a head, and without."""
    save_encoder(family, tmp_path, "Model")
    layout = build_layout(load_description(tmp_path), "", torch.float32)
    names = {target.name for target in layout.targets}
    names |= {other.name for target in layout.targets for other in target.other_names}
    assert names >= {name, tower + name}
    assert "lm_head" not in names


def test_norms_of_the_first_checkpoints(tmp_path: Path) -> None:
    """They call a norm's weight "gamma" and its bias "beta"."""
    save_encoder("bert", tmp_path, "ForMaskedLM")
    path = tmp_path / "model.safetensors"
    decoder = load_description(tmp_path)
    wanted = load_weights(tmp_path, decoder, torch.float32, "cpu", TorchProjections())
    renamed = {
        re.sub(r"LayerNorm\.(weight|bias)$", lambda found: f"LayerNorm.{OLD[found[1]]}", name): each
        for name, each in load_file(path).items()
    }
    assert any(name.endswith("gamma") for name in renamed)
    save_file(renamed, path)
    found = load_weights(tmp_path, decoder, torch.float32, "cpu", TorchProjections())
    assert found.norms.keys() == wanted.norms.keys()
    for key, norm in wanted.norms.items():
        assert norm.bias is not None
        torch.testing.assert_close(found.norms[key].weight, norm.weight)
        torch.testing.assert_close(found.norms[key].bias, norm.bias)
