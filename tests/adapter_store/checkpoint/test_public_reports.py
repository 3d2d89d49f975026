"""Adapters of public bug reports, named by repository and number: read as PEFT reads them, or
refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import save_file

from adapter_store.checkpoint.conversion.strip import strip
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.peft.fields import FOREIGN, KNOWN
from adapter_store.checkpoint.reading.memory_files import MemoryFile, MemoryFolder
from adapter_store.checkpoint.text_files import AdapterText, read_text
from adapter_store.errors import IncompatibleAdapter, InvalidAdapter
from adapter_store.images.plan.check import check_folder
from adapter_store.images.plan.plan import plan_image
from contract.images.dtypes import DataType
from contract.images.layouts import Layout
from contract.images.targets import Target, TargetKind
from loadout._push.adapter import saved_name
from tests.support.store.checkpoints import CONFIG, WEIGHTS, A, B, pair, refusal

MODULE = "model.layers.0.self_attn.q_proj"
PREFIX = "base_model.model."
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 13648432\n"


def renamed(change: Callable[[str], str]) -> dict[str, torch.Tensor]:
    return {change(name): tensor for name, tensor in pair().items()}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Writes q_proj's A and B, or other tensors; None leaves a field out of the config."""

    def made(
        folder: str = "a", tensors: dict[str, torch.Tensor] | None = None, **fields: Any
    ) -> Path:
        path = tmp_path / folder
        path.mkdir()
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
        kept = {key: value for key, value in (config | fields).items() if value is not None}
        (path / CONFIG).write_text(json.dumps(kept))
        save_file(pair() if tensors is None else tensors, path / WEIGHTS)
        return path

    return made


@pytest.mark.parametrize("alpha", [None, -1, 0.5])
def test_alpha_is_pefts(make: Callable[..., Path], alpha: float | None) -> None:
    """invergent-ai/surogate#173: absent, it is PEFT's 8; a negative one turns the change round."""
    options = {} if alpha is None else {"lora_alpha": alpha}
    layer = peft.tuners.lora.Linear(
        torch.nn.Linear(16, 16),
        "default",
        peft.LoraConfig(r=4, **options),
        r=4,
        lora_alpha=peft.LoraConfig(**options).lora_alpha,
    )
    checkpoint = open_checkpoint(make(lora_alpha=alpha))
    assert checkpoint.targets[MODULE].scale == layer.scaling["default"]


@pytest.mark.parametrize(
    ("text", "subject", "message"),
    [
        ('"lora_alpha": 0', "lora_alpha", f"A and B of {MODULE} would change nothing"),
        ('"lora_alpha": 1e-400', "lora_alpha", "would change nothing"),
        ('"alpha_pattern": {"q_proj": 0}', "alpha_pattern", "would change nothing"),
        ('"lora_alpha": "16"', "lora_alpha", "lora_alpha='16': alpha is a finite number"),
        ('"lora_alpha": 1e400', "lora_alpha", "alpha is a finite number"),
    ],
)
def test_an_alpha_without_meaning_is_refused(
    make: Callable[..., Path], text: str, subject: str, message: str
) -> None:
    """invergent-ai/surogate#173."""
    folder = make()
    (folder / CONFIG).write_text(
        f'{{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], {text}}}'
    )
    error = refusal(folder)
    assert (error.subject, error.reason) == (subject, "CONFIG_INVALID")
    assert message in error.message


def test_a_scale_of_zero_that_is_stored_already_is_read(make: Callable[..., Path]) -> None:
    """surogate#173: a former release has accepted it."""
    folder = make(lora_alpha=0)
    stored = open_checkpoint(folder, digest=f"sha256:{'0' * 64}")
    assert stored.targets[MODULE].scale == 0.0


WRAPPED = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "torch.compile of the base": lambda name: name.replace(PREFIX, f"{PREFIX}_orig_mod."),
    "torch.compile within": lambda name: name.replace(PREFIX, "base_model._orig_mod.model."),
    "torch.compile of layers": lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
    "FSDP": lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
    "DistributedDataParallel": lambda name: f"module.{name}",
    "both": lambda name: f"_orig_mod.module.{name}",
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_push_and_a_folder_leave_out_the_same_wrappers(
    make: Callable[..., Path], wrapper: str
) -> None:
    """MakazhanAlpamys/Soup#335: `_orig_mod.base_model.model...`, with the config's expressions."""
    name = r"model\.layers\.\d+\.self_attn\.q_proj"
    fields: dict[str, Any] = {"target_modules": name, "alpha_pattern": {f"^{name}": 3}}
    plain = open_checkpoint(make("plain", **fields))
    change = WRAPPED[wrapper]
    found = open_checkpoint(make("wrapped", renamed(change), **fields))
    assert [(each.name, each.scale) for each in found.targets.values()] == [(MODULE, 0.75)]
    assert found.targets.keys() == plain.targets.keys()
    assert plain.targets[MODULE].scale == 0.75
    assert [saved_name(change(name)) for name in (A, B)] == [A, B]


def test_a_path_of_the_config_has_the_names_of_the_base(make: Callable[..., Path]) -> None:
    """Soup#335: a listed path is not missing, because a wrapper's name breaks it."""
    tensors = renamed(WRAPPED["torch.compile of layers"])
    found = open_checkpoint(make("a", tensors, target_modules=["layers.0.self_attn.q_proj"]))
    assert (list(found.targets), found.lost_modules) == ([MODULE], frozenset())


def test_a_part_of_a_name_that_only_ends_as_a_wrapper_stays() -> None:
    assert saved_name(f"{PREFIX}model.my_orig_mod.q.lora_A.weight").count("my_orig_mod") == 1
    assert saved_name("module.q.lora_A.weight") == "module.q.lora_A.weight"


def test_copies_of_the_base_in_wrappers_are_stripped(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    """Soup#335."""
    copy = {"_orig_mod.base_model.model.lm_head.weight": torch.ones(32, 16)}
    found, num_left = strip(make("a", {**pair(), **copy}), tmp_path / "stripped")
    assert ([each.name for each in found], num_left) == (["lm_head.weight"], 2)


TEXTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, *TEXTS])
@pytest.mark.parametrize("where", ["a folder", "memory"])
def test_a_git_lfs_pointer_is_called_so(make: Callable[..., Path], name: str, where: str) -> None:
    """Found on GitHub: a clone without `git lfs` has pointers of some 130 bytes."""
    folder = make()
    (folder / name).write_text(POINTER)
    with pytest.raises(InvalidAdapter) as caught:
        opened(folder, name, in_memory=where == "memory")
    assert (caught.value.subject, caught.value.reason) == (name, "FILE_NOT_DOWNLOADED")
    said = f"{name} is a Git LFS pointer, not the file itself: run `git lfs pull`"
    assert said in str(caught.value)


def opened(folder: Path, name: str, *, in_memory: bool) -> object:
    """Opens the part of an adapter that the file belongs to."""
    if name in TEXTS:
        return read_text(folder, [name])
    if not in_memory:
        return open_checkpoint(folder)
    files = [MemoryFile(each) for each in (CONFIG, WEIGHTS)]
    for file in files:
        file.append((folder / file.name).read_bytes())
    return open_checkpoint(MemoryFolder(files))


@pytest.mark.parametrize("key", FOREIGN)
@pytest.mark.parametrize("value", ["mistral", True])
def test_keys_of_hosts_and_other_tools_change_nothing(
    make: Callable[..., Path], key: str, value: Any
) -> None:
    """Cloudflare's docs ask for `"model_type": "mistral"`; peft#1168; lmdeploy#1151."""
    plain = open_checkpoint(make("plain"))
    found = open_checkpoint(make("foreign", **{key: value}))
    assert (found.digest, found.config.ignored_keys) == (plain.digest, ())
    assert key not in KNOWN  # a store whose operator allows it starts


def test_a_config_of_2023_is_read_where_it_means_the_same(make: Callable[..., Path]) -> None:
    """peft#1337, InternLM/lmdeploy#1151: tloen's alpaca-lora."""
    fields = {"merge_weights": False, "fan_in_fan_out": False, "bias": "none", "lora_dropout": 0.05}
    found = open_checkpoint(make("old", **fields, task_type="CAUSAL_LM", inference_mode=True))
    assert found.digest == open_checkpoint(make("new")).digest


@pytest.mark.parametrize("enabled", [[True, False, True], [True, True, True]])
def test_parts_of_fused_layers_of_2023_are_refused(
    make: Callable[..., Path], enabled: list[bool]
) -> None:
    """mlx-lm#1119, peft#1337: B of a convolution in groups."""
    module = f"{PREFIX}transformer.h.0.attn.c_attn"
    tensors = {
        f"{module}.lora_A.weight": torch.ones(8, 768),
        f"{module}.lora_B.weight": torch.ones(1536, 4, 1),
    }
    fields = {"merge_weights": False, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    error = refusal(make("a", tensors, **fields, enable_lora=enabled))
    assert (error.subject, error.reason) == ("enable_lora", "CONFIG_UNSUPPORTED")
    assert "some of the outputs of a fused layer, with a B in groups" in error.message
    error = refusal(make("b", tensors, **fields))
    assert (error.subject, error.reason) == (f"{module}.lora_B.weight", "SHAPE_INVALID")
    assert "shape [1536, 4, 1] is not a matrix" in error.message
    assert error.message.endswith("train without c_attn in target_modules")


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "q_proj", "q_proj"]},
        {"task_type": "SEQ_2_SEQ_LM"},
    ],
    ids=["duplicate names", "SEQ_2_SEQ_LM of a decoder"],
)
def test_what_peft_overlooks_changes_nothing(
    make: Callable[..., Path], fields: dict[str, Any]
) -> None:
    """Found on GitHub."""
    found = open_checkpoint(make("a", **fields))
    assert peft.LoraConfig.from_pretrained(str(make("b", **fields))).target_modules == {"q_proj"}
    assert found.digest == open_checkpoint(make("plain")).digest


def test_an_expression_for_gemma_4s_language_model_selects_as_in_peft(
    make: Callable[..., Path],
) -> None:
    """Found on GitHub: the text part alone, in a model with towers."""
    source = r"model\.language_model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"
    inner = renamed(lambda name: name.replace("model.layers", "model.language_model.layers"))
    found = open_checkpoint(make("a", inner, target_modules=source))
    assert list(found.targets) == [MODULE]
    theirs = peft.LoraConfig(target_modules=source)
    for name in (
        *("model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.3.mlp.up"),
        "model.vision_tower.encoder.layers.0.self_attn.q_proj",
    ):
        selects = found.config.selects(name, is_embedding=False)
        assert selects == bool(check_target_module_exists(theirs, name))


def test_a_foreign_config_among_adapters_is_refused_alone(make: Callable[..., Path]) -> None:
    """vllm#53461: `{"rank": 8, "alpha": 16}` in a folder beside adapters."""
    make("first"), make("second")
    foreign = make("foreign")
    (foreign / CONFIG).write_text('{"rank": 8, "alpha": 16}')
    error = refusal(foreign)
    assert (error.subject, error.reason) == ("peft_type", "CONFIG_UNSUPPORTED")
    assert "is this another tool's file?" in error.message
    for name in ("first", "second"):
        open_checkpoint(foreign.parent / name)


def layout_of(*targets: Target) -> Layout:
    return Layout("org/base", "0" * 64, DataType.FLOAT32, 2, targets)


def test_a_head_below_the_model_is_the_head(make: Callable[..., Path]) -> None:
    """thinking-machines-lab/tinker-cookbook#928: `base_model.model.model.lm_head.lora_A.weight`."""
    tensors = {
        f"{PREFIX}model.lm_head.lora_A.weight": torch.ones(4, 16),
        f"{PREFIX}model.lm_head.lora_B.weight": torch.ones(32, 4),
    }
    checkpoint = open_checkpoint(make("a", tensors, target_modules=["lm_head"]))
    head = Target("lm_head", None, "head", TargetKind.LINEAR, 16, 32)
    plan = plan_image(checkpoint, layout_of(head))
    assert plan.names == ("lm_head.A", "lm_head.B")


OTHERS = {
    "glm-4-9b-chat": (
        "transformer.encoder.layers.0.self_attention.query_key_value",
        "these are names of ChatGLM, as of glm-4-9b-chat with its authors' code "
        r"\(glm-4-9b-chat-hf has the same weights",
    ),
    "glm-4-9b-chat's other half": (
        "transformer.encoder.layers.7.mlp.dense_h_to_4h",
        "these are names of ChatGLM",
    ),
    "the first Qwen": (
        "transformer.h.0.attn.c_attn",
        "these are names of GPT-2, or of the first Qwen",
    ),
    "Falcon": (
        "transformer.h.0.self_attention.query_key_value",
        "these are names of Falcon or BLOOM:",
    ),
    "Pythia": (
        "gpt_neox.layers.0.attention.query_key_value",
        "these are names of GPT-NeoX or Pythia:",
    ),
    "Baichuan": ("model.layers.0.self_attn.W_pack", "these are names of Baichuan"),
    "InternLM2": ("model.layers.0.attention.wqkv", "these are names of InternLM2"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_names_of_an_older_family_are_called_so(make: Callable[..., Path], case: str) -> None:
    """Found on GitHub: adapters of glm-4-9b-chat for Glm4ForCausalLM."""
    module, message = OTHERS[case]
    name = module.rpartition(".")[2]
    tensors = renamed(lambda key: key.replace(MODULE, module))
    checkpoint = open_checkpoint(make("a", tensors, target_modules=[name]))
    q_proj = Target(MODULE, 0, "qkv", TargetKind.LINEAR, 16, 16)
    with pytest.raises(IncompatibleAdapter, match=f"org/base has no {module}: {message}") as caught:
        plan_image(checkpoint, layout_of(q_proj))
    assert caught.value.reason == "TARGET_UNKNOWN"
    assert "train with the model that is served" in str(caught.value)


def test_an_adapters_name_twice_is_refused_with_advice(make: Callable[..., Path]) -> None:
    """peft#1579: `lora_A.default.default.weight`, which PEFT leaves unused."""
    folder = make("a", renamed(lambda key: key.replace(".weight", ".default.default.weight")))
    error = refusal(folder)
    assert error.reason == "TENSOR_UNKNOWN"
    assert "lora_A.default.default.weight: not a LoRA weight" in error.message
    assert "it has more than the name of one adapter" in error.message


LOOP = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TEMPLATES = {
    "no generation prompt": (LOOP, True),
    "nothing but tags and space after the messages": (
        f"{{% if true %}}{LOOP} \n{{%- endif -%}}{{# the end #}}\n",
        True,
    ),
    "as transformers asks for": (
        LOOP + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        False,
    ),
    "always": (LOOP + "{{ '<|assistant|>' }}", False),
    "always, as text": (LOOP + "assistant:", False),
    "Mistral's": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} "
        "[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        False,
    ),
    "without a loop": ("{{ messages[-1].content }}", False),
    "many open tags": (LOOP + "{%" * 300_000, False),
    "none": ("", False),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_that_begins_no_answer_is_warned_of(case: str) -> None:
    """unslothai/unsloth#4178: the adapter's template lacks the generation prompt."""
    template, is_warned = TEMPLATES[case]
    warnings = AdapterText(chat_template=template.encode()).warnings
    assert len(warnings) == is_warned
    assert all("does not use add_generation_prompt" in each for each in warnings)


def test_the_check_of_a_folder_warns_of_its_template(make: Callable[..., Path]) -> None:
    """unsloth#4178."""
    folder = make()
    assert check_folder(folder).warnings == ()
    (folder / "chat_template.jinja").write_text(LOOP)
    [warning] = check_folder(folder).warnings
    assert "models may continue this message in place of answering" in warning
