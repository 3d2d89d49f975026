"""The reader of each format, and the trainers that write it.

Every reader yields the same: an `AdapterConfig`, and `Contents`. To read
another format: its file names in `files` and `select`, a module with its config and its tensors'
names, a row of READERS, and a row of TRAINERS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adapter_store.checkpoint.formats.mlx import check_selected, parse_mlx_config, parse_mlx_key
from adapter_store.checkpoint.formats.select import Format
from adapter_store.checkpoint.peft.config import AdapterConfig, parse_config
from adapter_store.checkpoint.peft.tensor_keys import TensorKey, parse_key
from adapter_store.checkpoint.reading.files import AnyFolder, CheckpointLimits, read_capped
from adapter_store.checkpoint.reading.json import parse_object
from adapter_store.checkpoint.reading.safetensors import TensorRecord
from adapter_store.checkpoint.tensors import Contents, read_contents
from adapter_store.checkpoint.weights import Changes
from contract.adapter_files import CONFIG_FILE


def _no_more(targets: Iterable[Changes], config: AdapterConfig) -> None:
    """Checks nothing besides the needs of every format."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one format: its config, its tensors' names, and the checks of both that only it can
    make. Each raises InvalidAdapter."""

    parse_config: Callable[[Mapping[str, Any], CheckpointLimits], AdapterConfig]
    parse_key: Callable[[str], TensorKey]
    check: Callable[[Iterable[Changes], AdapterConfig], None] = _no_more

    def read_config(self, folder: AnyFolder, limits: CheckpointLimits) -> AdapterConfig:
        """Reads `adapter_config.json`. Raises InvalidAdapter with the file or a key as its
        subject."""
        data = read_capped(folder, CONFIG_FILE, limits.max_config_bytes)
        return self.parse_config(parse_object(data, CONFIG_FILE), limits)

    def read_contents(self, records: Iterable[TensorRecord], config: AdapterConfig) -> Contents:
        """Returns the contents that the tensors make up. Raises as the function of this name."""
        contents = read_contents(records, config, self.parse_key)
        self.check(contents.changes, config)
        return contents


READERS: Mapping[Format, Reader] = {
    Format.PEFT: Reader(parse_config, parse_key),
    Format.MLX: Reader(parse_mlx_config, parse_mlx_key, check_selected),
}


@dataclass(frozen=True, slots=True)
class Trainer:
    """A row of the table of trainers in docs/adapters.md.

    Attributes:
        name: The trainer.
        format: The format that it writes.
        tensors: Names of its tensors, with shapes where the name does not tell.
    """

    name: str
    format: Format
    tensors: str


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """A row of the table of forms of experts in docs/adapters.md.

    Attributes:
        name: The form.
        trainers: The trainers that write it.
        tensors: Names of its tensors below the module <experts>, with shapes.
        note: Facts that a user needs to know.
    """

    name: str
    trainers: str
    tensors: str
    note: str


EXPERT_FORMS = (
    ExpertForm(
        "one by one",
        "PEFT if experts are modules, Megatron-Bridge, tinker-cookbook",
        "`.3.gate_proj.lora_A.weight` [rank, in], `lora_B` [out, rank]; or w1, w3, w2 for gate, "
        "up, down",
        "patterns may give each expert its own rank and scale; missing experts stay the base's",
    ),
    ExpertForm(
        "parameters",
        "PEFT with `target_parameters`, Megatron-Bridge",
        "`.lora_A.weight` [experts x rank, in] of `down_proj`, `.base_layer.lora_A.weight` of "
        "`gate_up_proj` (or `up_proj`); `lora_B` [out, rank x experts]",
        "gate and up are separated, also if they are interleaved (GPT-OSS). The order of names in "
        "the config does not matter. For square parameters see below",
    ),
    ExpertForm(
        "stacks",
        "Tinker",
        "`.w1.lora_A.weight` [experts or 1, rank, in], `lora_B` [experts or 1, out, rank]; w1 with "
        "w3, and w2",
        "an A or B that all experts share is in the image once",
    ),
    ExpertForm(
        "stacks of gate and up",
        "Megatron-Bridge if all experts share A or B",
        "`.gate_up_proj.lora_A.weight` [experts or 1, rank, in], `.down_proj`",
        "gate and up are in the order of the model's parameter",
    ),
    ExpertForm(
        "MLX-LM's stacks",
        "MLX-LM",
        "`switch_mlp.gate_proj.lora_a` [experts, rank, in], before 0.29 [experts x rank, in]; "
        "`lora_b` [experts, out, rank]",
        "not transposed, unlike MLX-LM's linear layers; `switch_glu` is read too",
    ),
)

_PEFT = "`base_model.model.<module>.lora_A.weight`"

TRAINERS = (
    # peft/utils/save_and_load.py of PEFT 0.21
    Trainer("PEFT", Format.PEFT, _PEFT),
    # transformers/trainer.py of Transformers 5.23; TRL 1.16
    Trainer("Transformers' Trainer, TRL", Format.PEFT, _PEFT),
    # github.com/axolotl-ai-cloud/axolotl saves with PEFT
    Trainer("Axolotl", Format.PEFT, _PEFT),
    # github.com/hiyouga/LLaMA-Factory saves with PEFT
    Trainer("LLaMA-Factory", Format.PEFT, _PEFT),
    # github.com/unslothai/unsloth saves with PEFT, `target_modules` as an expression
    Trainer("Unsloth", Format.PEFT, _PEFT),
    # peft/utils/save_and_load.py of PEFT 0.21
    Trainer(
        "your own trainer's state dict",
        Format.PEFT,
        "as PEFT's, with `.default.` or another name of the adapter; without the prefix or with it "
        "twice; with `language_model.` or `model.language_model.`; with `_orig_mod.` or another "
        "part of torch's wrappers",
    ),
    # torchtune/training/checkpointing/_checkpointer.py of torchtune 0.6.1
    Trainer("torchtune", Format.PEFT, _PEFT),
    # tinker_cookbook/weights of github.com/thinking-machines-lab/tinker-cookbook
    Trainer(
        "Tinker",
        Format.PEFT,
        "as PEFT's; `model.unembed_tokens` or `model.lm_head` means `lm_head`; experts as stacks",
    ),
    # save_hf_adapter and models/conversion/peft_bridge.py of github.com/NVIDIA-NeMo/Megatron-Bridge
    Trainer(
        "Megatron-Bridge",
        Format.PEFT,
        "as PEFT's; experts one by one, as parameters, or as stacks of gate and up",
    ),
    # mlx_lm/tuner/utils.py of MLX-LM 0.32
    Trainer(
        "MLX-LM",
        Format.MLX,
        "`<module>.lora_a` [in, rank], `<module>.lora_b` [rank, out]; experts as MLX-LM's stacks",
    ),
)
