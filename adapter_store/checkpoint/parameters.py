"""A and B of bare parameters, as PEFT saves them with target_parameters: those of all experts.

    <module>.lora_A.weight               [experts * rank, a], expert by expert
    <module>.lora_B.weight               [b, rank * experts], rank by rank
    <module>.base_layer.lora_A.weight    of another parameter of the module

`<module>` holds the parameter, [experts, first, second]; which of the two are inputs, and which of
them A has, depends on the model and on PEFT: before 0.18 A had the first, since 0.19.1 it has those
that the model says are inputs, and others in between. Where both are of one size, the file does not
tell, and what PEFT before 0.19.1 saved is refused.

Of several parameters of one module PEFT wraps the first around the module, then the next around
that; the order is that of the model's definition, so only that of known names is known. A parameter
`weight` of two dimensions is a linear layer's, and what there is for it a linear layer's A and B.

Sources: `ParamWrapper` of peft/tuners/lora/layer.py and `_inject_parameters` of
peft/tuners/tuners_utils.py of PEFT 0.21; github.com/huggingface/peft pull 3165.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from adapter_store.checkpoint.peft_config import AdapterConfig
from adapter_store.checkpoint.peft_extras import refused
from adapter_store.checkpoint.safetensors import TensorRecord
from adapter_store.checkpoint.tensor_keys import target_of
from adapter_store.checkpoint.weights import ExpertWeights, Matrix

WRAPPER = ".base_layer"
_ORDER = ("gate_up_proj", "down_proj")
"""How Hugging Face's models define the parameters of experts."""
_WEIGHT = "weight"
_FIRST_VERSION = (0, 19, 1)


MAX_EXPERTS = 1 << 17
"""Experts of all parameters of one adapter."""


class Parameter(NamedTuple):
    """A parameter that has A and B: `name` in `module`, by its path in the trained model."""

    module: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


def find_parameters(
    wrapped: Mapping[str, TensorRecord], config: AdapterConfig
) -> dict[str, Parameter]:
    """Returns which of these modules, by the path that the file gives each, are parameters'; the
    tensors are for errors.

    Raises InvalidAdapter TARGET_NOT_SELECTED, CONFIG_UNSUPPORTED or TENSOR_MISSING.
    """
    levels: dict[str, list[str]] = {}
    for path in sorted(wrapped, key=len, reverse=True):  # the innermost first
        module = path
        while module.endswith(WRAPPER):
            module = module.removesuffix(WRAPPER)
        levels.setdefault(module, []).append(path)
    found: dict[str, Parameter] = {}
    used: set[str] = set()
    for module, paths in levels.items():
        names = config.extras.parameters_of(module)
        if not names or (paths == [module] and config.selects(module, is_embedding=False)):
            continue
        record = wrapped[paths[0]]
        expected = [module + WRAPPER * depth for depth in reversed(range(len(names)))]
        if paths != expected:
            raise refused(
                *(record, "TARGET_NOT_SELECTED"),
                f"target_parameters names {len(names)} parameters of {module}, and the file has "
                f"A and B for {len(paths)}",
            )
        known = [name for name in _ORDER if name in names]
        if len(names) > 1 and len(known) < len(names):
            raise refused(
                *(record, "CONFIG_UNSUPPORTED"),
                f"target_parameters names several parameters of {module}, and which tensor is "
                f"whose is only known of {' and '.join(_ORDER)}: adapt one of them",
            )
        for path, name in zip(paths, known if len(names) > 1 else names, strict=True):
            found[path] = Parameter(module, name)
        used |= config.extras.entries_of_parameters(module)
    config.extras.check_parameters(used)
    return found


def is_linear(parameter: Parameter, a: TensorRecord, config: AdapterConfig) -> bool:
    """Returns whether it is the weight of a linear layer."""
    return parameter.name == _WEIGHT and a.shape[0] == config.settings_for(parameter.path).rank


def read_experts(
    parameter: Parameter, a: TensorRecord, b: TensorRecord, config: AdapterConfig, max_experts: int
) -> ExpertWeights:
    """Returns A and B of each expert. Raises InvalidAdapter: RANK_MISMATCH, TOO_MANY_EXPERTS or
    CONFIG_UNSUPPORTED."""
    rank, alpha, scale = config.settings_for(parameter.path)
    num_experts, rest = divmod(a.shape[0], rank)
    if num_experts > max_experts:
        raise refused(a, "TOO_MANY_EXPERTS", f"{num_experts} experts are over the limit")
    if rest or a.shape[0] != b.shape[1]:
        raise refused(
            *(a if rest else b, "RANK_MISMATCH"),
            f"A {list(a.shape)} and B {list(b.shape)} are not those of experts of rank {rank}, as "
            "the config says",
        )
    if num_experts == 1:
        raise refused(
            *(a, "CONFIG_UNSUPPORTED"),
            f"target_parameters names {parameter.path}, which has two dimensions or one expert: "
            "which of the two is not said; name the module in target_modules",
        )
    if a.shape[1] == b.shape[0] and config.extras.peft_version < _FIRST_VERSION:
        raise refused(
            *(a, "CONFIG_UNSUPPORTED"),
            f"{parameter.path} has as many inputs as outputs, and which of them A is of is only "
            "known of adapters that PEFT has saved from 0.19.1 on (peft_version): train it with "
            "that",
        )
    all_a, all_b = Matrix.of(a), Matrix.of(b)
    pairs = {
        expert: (
            all_a.part(range(expert * rank, (expert + 1) * rank), range(a.shape[1])),
            all_b.part(range(b.shape[0]), range(expert, b.shape[1], num_experts)),
        )
        for expert in range(num_experts)
    }
    module = parameter.module if parameter.name == _WEIGHT else parameter.path
    assert alpha is not None
    return ExpertWeights(
        *(target_of(module), module, alpha, scale, num_experts, pairs),
        tensors=(("parameter_A", a), ("parameter_B", b)),
        is_parameter=True,
        has_first_in_a=False,
    )
