"""The reader of each format, and the trainers that write it.

Every reader yields the same: an `AdapterConfig`, and `Contents`. To read
another format: its file names in `files` and `select`, a module with its config and its tensors'
names, a row of READERS, and a row of TRAINERS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adapter_store.checkpoint.files import CONFIG_FILE, CheckpointLimits, Folder, read_capped
from adapter_store.checkpoint.formats.mlx import check_selected, parse_mlx_config, parse_mlx_key
from adapter_store.checkpoint.formats.select import Format
from adapter_store.checkpoint.json import parse_object
from adapter_store.checkpoint.peft_config import AdapterConfig, parse_config
from adapter_store.checkpoint.safetensors import TensorRecord
from adapter_store.checkpoint.tensor_keys import TensorKey, parse_key
from adapter_store.checkpoint.tensors import Contents, read_contents
from adapter_store.checkpoint.weights import Changes


def _no_more(targets: Iterable[Changes], config: AdapterConfig) -> None:
    """Checks nothing besides what every format needs."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one format: its config, its tensors' names, and what only it can check of both. Each
    raises InvalidAdapter."""

    parse_config: Callable[[Mapping[str, Any], CheckpointLimits], AdapterConfig]
    parse_key: Callable[[str], TensorKey]
    check: Callable[[Iterable[Changes], AdapterConfig], None] = _no_more

    def read_config(self, folder: Folder, limits: CheckpointLimits) -> AdapterConfig:
        """Reads `adapter_config.json`. Raises InvalidAdapter with the file or a key as its
        subject."""
        data = read_capped(folder, CONFIG_FILE, limits.max_config_bytes)
        return self.parse_config(parse_object(data, CONFIG_FILE), limits)

    def read_contents(self, records: Iterable[TensorRecord], config: AdapterConfig) -> Contents:
        """Returns what the tensors make up. Raises as the function of this name."""
        contents = read_contents(records, config, self.parse_key)
        self.check(contents.changes, config)
        return contents


READERS: Mapping[Format, Reader] = {
    Format.PEFT: Reader(parse_config, parse_key),
    Format.MLX: Reader(parse_mlx_config, parse_mlx_key, check_selected),
}


@dataclass(frozen=True, slots=True)
class Trainer:
    """A row of the table of what is read: who writes the files, which, and what each maps to.
    `left` are files that it saves along and that change nothing; `source` is where its format is
    published."""

    name: str
    format: Format
    weights: str
    tensors: str
    scale: str
    left: str
    source: str


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """A row of the table of forms of experts: who writes it, its tensors below the module
    <experts>, and what is to be known of it."""

    name: str
    trainers: str
    tensors: str
    note: str


EXPERT_FORMS = (
    ExpertForm(
        *("one by one", "PEFT where experts are modules, Megatron-Bridge, tinker-cookbook"),
        "`.3.gate_proj.lora_A.weight` [rank, in], `lora_B` [out, rank]; or w1, w3, w2 for gate, "
        "up, down",
        "experts may have ranks and scales of their own, by patterns; those that are not there "
        "stay the base's",
    ),
    ExpertForm(
        *("parameters", "PEFT with `target_parameters`, Megatron-Bridge"),
        "`.lora_A.weight` [experts x rank, in] of `down_proj`, `.base_layer.lora_A.weight` of "
        "`gate_up_proj` (or `up_proj`); `lora_B` [out, rank x experts]",
        "gate and up are cut apart, also where they take turns (GPT-OSS). The order of names in "
        "the config is of no meaning. Square ones: see below",
    ),
    ExpertForm(
        *("stacks", "Tinker"),
        "`.w1.lora_A.weight` [experts or 1, rank, in], `lora_B` [experts or 1, out, rank]; w1 with "
        "w3, and w2",
        "what all experts share is in the image once",
    ),
    ExpertForm(
        *("stacks of gate and up", "Megatron-Bridge where all experts share A or B"),
        "`.gate_up_proj.lora_A.weight` [experts or 1, rank, in], `.down_proj`",
        "gate and up in the order of the model's parameter",
    ),
    ExpertForm(
        *("MLX-LM's stacks", "MLX-LM"),
        "`switch_mlp.gate_proj.lora_a` [experts, rank, in], before 0.29 [experts x rank, in]; "
        "`lora_b` [experts, out, rank]",
        "not transposed, unlike its linear layers'; `switch_glu`, too",
    ),
)

_PEFT = ("`adapter_model.safetensors`, or shards", "`base_model.model.<module>.lora_A.weight`")
_ALPHA = "`lora_alpha / r`, `/ sqrt(r)` with `use_rslora`"
_STATE = "optimizer, scheduler, random numbers, `training_args.bin`, tokenizer"

TRAINERS = (
    Trainer(
        *("PEFT", Format.PEFT, *_PEFT, _ALPHA, "`README.md`"),
        "`peft/utils/save_and_load.py` of PEFT 0.21",
    ),
    Trainer(
        *("Transformers' Trainer, TRL", Format.PEFT, *_PEFT, _ALPHA, _STATE),
        "`transformers/trainer.py` of Transformers 5.23; TRL 1.16",
    ),
    Trainer(
        *("Axolotl", Format.PEFT, *_PEFT, _ALPHA, f"{_STATE}, `config.json`, `tokens_state.json`"),
        "github.com/axolotl-ai-cloud/axolotl: it saves with PEFT",
    ),
    Trainer(
        *("LLaMA-Factory", Format.PEFT, *_PEFT, _ALPHA, f"{_STATE}, `trainer_log.jsonl`, plots"),
        "github.com/hiyouga/LLaMA-Factory: it saves with PEFT",
    ),
    Trainer(
        *("Unsloth", Format.PEFT, *_PEFT, _ALPHA, _STATE),
        "github.com/unslothai/unsloth: it saves with PEFT, `target_modules` as an expression",
    ),
    Trainer(
        *("state dicts of trainers of their own", Format.PEFT, _PEFT[0]),
        "the same with `.default.` or another name of the adapter, without the prefix or with it "
        "twice, with `language_model.` or `model.language_model.`",
        *(_ALPHA, ""),
        "`peft/utils/save_and_load.py` of PEFT 0.21",
    ),
    Trainer(
        *("torchtune", Format.PEFT, *_PEFT, _ALPHA),
        "`adapter_model.pt`, which has the same in torchtune's form; the merged model; tokenizer",
        "`torchtune/training/checkpointing/_checkpointer.py` of torchtune 0.6.1",
    ),
    Trainer(
        *("Tinker", Format.PEFT, _PEFT[0]),
        f"{_PEFT[1]}; `model.unembed_tokens` is `lm_head`; of all experts "
        "`<module>.experts.w1.lora_A.weight` [experts or 1, rank, in], and so w2 and w3",
        *(_ALPHA, ""),
        "`tinker_cookbook/weights` of github.com/thinking-machines-lab/tinker-cookbook",
    ),
    Trainer(
        *("Megatron-Bridge", Format.PEFT, _PEFT[0]),
        f"{_PEFT[1]}; of experts one by one, of parameters, or, where A or B is of all, "
        "`<module>.experts.gate_up_proj.lora_A.weight` [experts or 1, rank, in]",
        *(_ALPHA, ""),
        "`save_hf_adapter` and `models/conversion/peft_bridge.py` of "
        "github.com/NVIDIA-NeMo/Megatron-Bridge",
    ),
    Trainer(
        *("MLX-LM", Format.MLX, "`adapters.safetensors`"),
        "`<module>.lora_a` [in, rank], `<module>.lora_b` [rank, out]; of all experts "
        "`<module>.switch_mlp.gate_proj.lora_a` [experts, rank, in], `lora_b` [experts, out, rank]",
        *("`lora_parameters.scale` as it is", "`0000100_adapters.safetensors` of earlier steps"),
        "`mlx_lm/tuner/utils.py` of MLX-LM 0.32",
    ),
)
