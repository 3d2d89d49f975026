"""Names as PEFT itself writes them, from models as people wrap them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from adapter_store.checkpoint.open import Checkpoint, open_checkpoint
from adapter_store.checkpoint.peft.tensor_keys import parse_key, target_of
from adapter_store.errors import InvalidAdapter

WEIGHTS = "adapter_model.safetensors"
TARGETS = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qv"]
CONFIG = LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=32,
)


class Outer(torch.nn.Module):
    """A model of more than text, with its language model inside, as older transformers had it."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = torch.nn.Linear(4, 4)
        self.language_model = LlamaForCausalLM(CONFIG)


class Inner(torch.nn.Module):
    """The names of newer transformers: the language model is the text decoder alone."""

    def __init__(self) -> None:
        super().__init__()
        whole = LlamaForCausalLM(CONFIG)
        self.model = torch.nn.Module()
        self.model.language_model = whole.model
        self.lm_head = whole.lm_head


def adapt(model: torch.nn.Module, adapter_name: str = "default", **fields) -> PeftModel:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **fields)
    model = get_peft_model(model, config, adapter_name=adapter_name)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            generator = torch.Generator().manual_seed(number)
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def written(model: PeftModel, folder: Path) -> Checkpoint:
    model.save_pretrained(folder)
    return open_checkpoint(folder)


def test_a_plain_adapter(tmp_path):
    checkpoint = written(adapt(LlamaForCausalLM(CONFIG)), tmp_path)
    assert list(checkpoint.targets) == TARGETS
    assert all(target.module == name for name, target in checkpoint.targets.items())


def test_an_adapter_with_a_name(tmp_path):
    """PEFT saves it in a folder of its own, the name left out of the keys."""
    adapt(LlamaForCausalLM(CONFIG), "mine").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path / "mine")
    assert list(checkpoint.targets) == TARGETS
    assert {record.key for record in checkpoint.records} == {
        f"base_model.model.{name}.lora_{side}.weight" for name in TARGETS for side in "AB"
    }


@pytest.mark.parametrize("adapter_name", ["default", "mine"])
def test_state_dict_with_adapter_name(tmp_path, adapter_name):
    """What trainers that save the state dict themselves write."""
    model = adapt(LlamaForCausalLM(CONFIG), adapter_name)
    model.save_pretrained(tmp_path)
    folder = tmp_path if adapter_name == "default" else tmp_path / adapter_name
    plain = open_checkpoint(folder)
    state = {key: value for key, value in model.state_dict().items() if "lora_" in key}
    assert all(f".{adapter_name}.weight" in key for key in state)
    save_file(state, folder / WEIGHTS)
    assert open_checkpoint(folder).digest == plain.digest


def test_the_embedding_and_the_head(tmp_path):
    model = get_peft_model(
        LlamaForCausalLM(CONFIG),
        LoraConfig(r=2, target_modules=["embed_tokens", "lm_head"], use_rslora=True),
        adapter_name="mine",
    )
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    plain = open_checkpoint(tmp_path / "mine")
    assert list(plain.targets) == ["lm_head", "model.embed_tokens"]
    state = {key: value for key, value in model.state_dict().items() if "lora_" in key}
    assert any(key.endswith(".lora_embedding_A.mine") for key in state)
    save_file(state, tmp_path / "mine" / WEIGHTS)
    assert open_checkpoint(tmp_path / "mine").digest == plain.digest


@pytest.mark.parametrize(
    ("wrapper", "prefix"),
    [(Outer, "language_model.model."), (Inner, "model.language_model.")],
)
def test_a_wrapped_language_model(tmp_path, wrapper, prefix):
    checkpoint = written(adapt(wrapper(), layers_to_transform=[1]), tmp_path)
    names = [name for name in TARGETS if ".1." in name]
    assert list(checkpoint.targets) == names
    modules = [target.module for target in checkpoint.targets.values()]
    assert modules == [name.replace("model.", prefix, 1) for name in names]


def test_patterns_speak_of_the_wrapped_model(tmp_path):
    model = get_peft_model(
        Inner(),
        LoraConfig(
            r=2,
            target_modules=r"model\.language_model\.layers\.\d\.self_attn\.(q|v)_proj",
            rank_pattern={r"^model.language_model.layers.0.self_attn.q_proj": 4},
            alpha_pattern={"v_proj": 3},
        ),
    )
    checkpoint = written(model, tmp_path)
    ranks = {name: target.rank for name, target in checkpoint.targets.items()}
    assert ranks == {name: 4 if ".0.self_attn.q" in name else 2 for name in TARGETS}
    assert {t.alpha for name, t in checkpoint.targets.items() if "v_proj" in name} == {3.0}


def test_a_wrapped_adapter_is_the_same_adapter(tmp_path):
    plain = written(adapt(LlamaForCausalLM(CONFIG)), tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / WEIGHTS)
    for number, prefix in enumerate(("language_model.model.", "model.language_model.")):
        folder = tmp_path / str(number)
        adapt(LlamaForCausalLM(CONFIG)).save_pretrained(folder)
        names = {key: key.replace("model.model.model.", f"model.model.{prefix}") for key in tensors}
        renamed = {names[key]: value for key, value in tensors.items()}
        assert renamed.keys() != tensors.keys()
        save_file(renamed, folder / WEIGHTS)
        assert open_checkpoint(folder).digest == plain.digest


def test_an_adapter_of_an_adapted_model(tmp_path):
    """The prefix is there twice."""
    inner = adapt(LlamaForCausalLM(CONFIG)).merge_and_unload()
    checkpoint = written(adapt(Prefixed(inner)), tmp_path)
    assert list(checkpoint.targets) == TARGETS
    assert all(
        record.key.startswith("base_model.model.base_model.model.model.layers.")
        for record in checkpoint.records
    )


class Prefixed(torch.nn.Module):
    """What remains of a PeftModel once another is put around it: base_model.model.<model>."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = torch.nn.Module()
        self.base_model.model = model


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("model.layers.0.q_proj", "model.layers.0.q_proj"),
        ("lm_head", "lm_head"),
        ("language_model.model.layers.0.q_proj", "model.layers.0.q_proj"),
        ("language_model.lm_head", "lm_head"),
        ("language_model.layers.0.q_proj", "model.layers.0.q_proj"),
        ("model.language_model.layers.0.q_proj", "model.layers.0.q_proj"),
        ("model.language_model.model.layers.0.q_proj", "model.layers.0.q_proj"),
        ("model.language_model.embed_tokens", "model.embed_tokens"),
        ("model.visual.blocks.0.q_proj", "model.visual.blocks.0.q_proj"),
        ("my_language_model.model.q_proj", "my_language_model.model.q_proj"),
    ],
)
def test_the_target_is_the_path_in_the_language_model(module, target):
    assert target_of(module) == target


def test_two_adapters_in_one_file_are_refused(tmp_path):
    model = adapt(LlamaForCausalLM(CONFIG))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    first = min(tensors)
    other = {key.replace(".weight", ".other.weight"): value for key, value in tensors.items()}
    other = {key: value for key, value in other.items() if "layers.1" in key}
    save_file({first: tensors[first], **other}, tmp_path / WEIGHTS)
    with pytest.raises(InvalidAdapter, match="'other', while others are of 'default'") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.reason == "ADAPTERS_MIXED"


def test_one_target_under_two_names_is_refused(tmp_path):
    adapt(LlamaForCausalLM(CONFIG)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    key = min(tensors)
    again = key.replace("model.model.model.", "model.model.language_model.model.")
    save_file({**tensors, again: tensors[key].clone()}, tmp_path / WEIGHTS)
    with pytest.raises(InvalidAdapter) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.reason == "TENSOR_DUPLICATE"


def test_at_most_two_prefixes_are_removed():
    assert parse_key("base_model.model." * 2 + "x.lora_A.weight").target == "x"
    assert parse_key("base_model.model." * 3 + "x.lora_A.weight").target == "base_model.model.x"
