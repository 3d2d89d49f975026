"""A model that a backend does not compute in full is refused by name, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers

from inference_svc.backends import select
from inference_svc.backends.base import BackendFactory
from inference_svc.backends.select import BACKENDS, check_features, select_backend
from inference_svc.core import EngineConfig
from inference_svc.engine.build import build_engine
from inference_svc.errors import UnsupportedModel
from inference_svc.model import description
from inference_svc.model.architectures import load_description
from inference_svc.model.description import Decoder, Rank
from inference_svc.model.encoder.in_torch import OF_ENCODERS
from inference_svc.model.features import NOT_COMPUTED, features, kind_of
from inference_svc.model.rope import Rope
from inference_svc.model.sharding.description import of_rank
from inference_svc.model.sharding.stages import of_stage
from inference_svc.store.client import NoStore
from kernels.quantised import WeightFormat
from tests.support.models.encoders import FAMILIES, config_of
from tests.support.models.families import MODELS, TEXT_PARTS
from tests.support.models.quantised import FORMATS, with_format
from tests.support.models.whole_models import SHAPE
from tests.support.pictures.models import READERS, save_config

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="session")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    """Those whose logits the parity tests compare on every backend."""
    folder = tmp_path_factory.mktemp("models")
    plain = {name: load_description(write_config(folder / name, name)) for name in MODELS}
    in_few_bits = {
        f"{name}-{code}": with_format(plain[name], form)
        for name in ("llama", "qwen3-moe")
        for code, form in FORMATS.items()
    }
    ranks = {f"{name}-ranks": of_rank(plain[name], Rank(1, 2)) for name in ("qwen3-moe", "olmo2")}
    ranks["qwen3-moe-experts"] = of_rank(plain["qwen3-moe"], Rank(1, 2), expert_parallel=2)
    stages = {"llama-stages": of_stage(plain["llama"], 0, 2)}
    encoders = {name: load_description(write_encoder(folder / name, name)) for name in FAMILIES}
    readers = {
        name: load_description(save_config(name, folder / name), with_pictures=True)
        for name in READERS
    }
    return plain | in_few_bits | ranks | stages | encoders | readers


def write_encoder(folder: Path, name: str) -> Path:
    folder.mkdir()
    config = config_of(name)
    values = config.to_dict() | {"architectures": [f"{FAMILIES[name][0]}Model"]}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_config(folder: Path, name: str) -> Path:
    family, changes = MODELS[name]
    config = f"{family}TextConfig" if family in TEXT_PARTS else f"{family}Config"
    values: dict[str, Any] = SHAPE | changes | {"architectures": [f"{family}ForCausalLM"]}
    folder.mkdir()
    text = json.dumps(getattr(transformers, config)(**values).to_dict())
    (folder / "config.json").write_text(text)
    return folder


LACKING = {
    "CUDA": {
        "attention.head_dim>512",
        "weight_format.odd_groups",
        *OF_ENCODERS,
    },
}
FEATURES = sorted(frozenset().union(*(factory.features for factory in BACKENDS)))


@pytest.mark.parametrize("factory", BACKENDS, ids=lambda factory: factory.name)
def test_backends_compute_what_the_parity_test_compares(
    factory: BackendFactory, decoders: dict[str, Decoder]
) -> None:
    """Nothing that it claims goes untested, and of what is tested it lacks only this."""
    tested = frozenset().union(*map(features, decoders.values()))
    assert factory.features == tested - LACKING.get(factory.name, set())


@pytest.fixture(scope="session")
def features_of(decoders: dict[str, Decoder]) -> dict[str, frozenset[str]]:
    return {name: frozenset(features(each)) for name, each in decoders.items()}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("factory", BACKENDS, ids=lambda factory: factory.name)
def test_a_feature_that_a_backend_lacks_is_refused_by_name(
    factory: BackendFactory,
    feature: str,
    decoders: dict[str, Decoder],
    features_of: dict[str, frozenset[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking = LACKING.get(factory.name, set())
    having = (name for name, each in features_of.items() if feature in each)
    first = min(having, key=lambda name: len((lacking & features_of[name]) - {feature}))
    decoder = decoders[first]
    refused = ", ".join(sorted((lacking & features_of[first]) | {feature}))
    monkeypatch.setattr(type(factory), "features", factory.features - {feature})
    with pytest.raises(UnsupportedModel) as caught:
        check_features(factory, decoder)
    said = f"the {factory.name} backend does not compute {refused}, which {decoder.architecture}"
    assert said in str(caught.value)
    found = {id(each): features_of[name] for name, each in decoders.items()}
    monkeypatch.setattr(select, "features", lambda each: found[id(each)])
    for name, other in decoders.items():
        if features_of[name].isdisjoint({feature, *lacking}):
            check_features(factory, other)


def test_the_remedy_is_a_backend_that_computes_it(
    decoders: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, (_, native, torch) = decoders["gemma2"], BACKENDS
    lacking = native.features - {"head.softcap"}
    monkeypatch.setattr(type(native), "features", lacking)
    with pytest.raises(
        UnsupportedModel, match=r"; native-kernels = false has it computed by torch$"
    ):
        check_features(native, decoder)
    monkeypatch.setattr(type(torch), "features", lacking)
    with pytest.raises(
        UnsupportedModel, match=r"does not compute head\.softcap, which Gemma2.* has"
    ):
        check_features(torch, decoder)


def test_a_server_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has none."""
    config = EngineConfig(write_config(tmp_path / "model", "gemma2"), "m", native_kernels=False)
    (torch,) = (factory for factory in BACKENDS if factory.name == "torch")
    lacking = torch.features - {"attention.softcap"}
    monkeypatch.setattr(type(torch), "features", lacking)
    with pytest.raises(UnsupportedModel, match=r"does not compute attention\.softcap"):
        build_engine(config, NoStore(), lambda event: None)


def test_no_other_backend_takes_its_place(
    decoders: dict[str, Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, (_, native, torch) = decoders["llama"], BACKENDS
    config = EngineConfig(tmp_path, "m")
    monkeypatch.setattr(type(native), "supports", lambda self, config: True)
    monkeypatch.setattr(select, "BACKENDS", (native, torch))
    assert select_backend(config, decoder) is native
    monkeypatch.setattr(type(native), "features", native.features - {"dense"})
    with pytest.raises(UnsupportedModel, match="the native backend"):
        select_backend(config, decoder)


def test_what_is_not_computed_are_fields() -> None:
    """A field that is renamed does not leave its name behind."""
    parts = [part for part in vars(description).values() if is_dataclass(part)]
    found = {
        f"{kind_of(part)}.{name}"
        for part in (*parts, Rope, WeightFormat)
        for name in part.__dataclass_fields__
    }
    assert found >= NOT_COMPUTED
