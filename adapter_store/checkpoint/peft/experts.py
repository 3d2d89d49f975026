"""A and B of all experts of a mixture in one tensor each, as trainers stack them.

Tinker's exports, Megatron-Bridge's with one A or B for all experts, and MLX-LM's adapters have

    <experts>.<projection>.lora_A.weight, .lora_a    [experts, rank, in]; of MLX-LM before 0.29
                                                     [experts * rank, in], expert by expert
    <experts>.<projection>.lora_B.weight, .lora_b    [experts, out, rank]

MLX-LM's are not transposed, unlike its linear layers'. In PEFT's kind of file either may be [1,
...]: the same for every expert. MLX-LM calls the module of all experts `switch_mlp` or
`switch_glu`; Tinker calls gate, down and up w1, w2 and w3, and has both of w1 and w3.

PEFT saves experts that are modules one by one, <experts>.<index>.<projection>; whether a model has
these as one target only its layout says, see adapter_store.images.plan.fit. Parameters of all
experts: see adapter_store.checkpoint.peft.parameters. An adapter may have each projection in
another form.

Sources: tinker_cookbook/weights/{_adapter,_merge,_merge_utils}.py of tinker-cookbook 0.6.1;
`LoRASwitchLinear` of mlx_lm/tuner/lora.py of MLX-LM 0.21 to 0.32; github.com/NVIDIA-NeMo/
Megatron-Bridge pull 6076.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from adapter_store.checkpoint.peft.config import AdapterConfig
from adapter_store.checkpoint.peft.extras import refused
from adapter_store.checkpoint.peft.tensor_keys import TensorKey
from adapter_store.checkpoint.reading.safetensors import TensorRecord
from adapter_store.checkpoint.weights import ExpertWeights, Matrix

MAX_EXPERTS = 1 << 17
"""Experts in all tensors of one adapter, and of one mixture."""
PROJECTIONS: Mapping[str, str] = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Some trainers' names of the projections of an expert, and the usual ones."""

_STACK = re.compile(r"(?P<experts>(?:.+\.)?experts)\.(?P<projection>[^.]+)")
_ONE = re.compile(
    r"(?P<experts>(?:.+\.)?experts)\.(?P<index>0|[1-9]\d{0,8})\.(?P<projection>[^.]+)", re.ASCII
)
_NUMBERED = re.compile(r"(?:.+\.)?experts\.(?P<index>-?\d+)\.[^.]+", re.ASCII)
_TOGETHER = ("w1", "w3")


class ExpertModule(NamedTuple):
    """A projection of one expert, by its name: `stack` is the name of the same one of all
    experts."""

    stack: str
    expert: int


def expert_module(target: str) -> ExpertModule | None:
    """Returns the meaning of a target's name; None if it is not of one expert."""
    match = _ONE.fullmatch(target) if "experts." in target else None
    if match is None:
        return None
    return ExpertModule(f"{match['experts']}.{match['projection']}", int(match["index"]))


def other_name(stack: str) -> str:
    """Returns how else a projection of all experts may be called; "" if there is no other name."""
    experts, _, projection = stack.rpartition(".")
    names = {**PROJECTIONS, **{name: other for other, name in PROJECTIONS.items()}}
    is_stack = _STACK.fullmatch(stack) is not None
    return f"{experts}.{names[projection]}" if is_stack and projection in names else ""


def may_be_stacked(target: str) -> bool:
    """Returns whether a target's name is one of a projection of all experts."""
    return _STACK.fullmatch(target) is not None


def read_stack(
    key: TensorKey, a: TensorRecord, b: TensorRecord, config: AdapterConfig, max_experts: int
) -> ExpertWeights:
    """Returns A and B of each expert. `key` is of one of the two.

    Raises InvalidAdapter TARGET_NOT_SELECTED, CONFIG_UNSUPPORTED, SHAPE_INVALID, RANK_MISMATCH or
    TOO_MANY_EXPERTS.
    """
    module = key.module
    _check_config(config, module, a)
    rank, alpha, scale = config.settings_for(module)
    is_flat = key.is_transposed and len(a.shape) == 2
    if len(b.shape) != 3 or (len(a.shape) != 3 and not is_flat):
        record = a if len(a.shape) != 3 and not is_flat else b
        other = b if record is a else a
        detail = f"shape {list(record.shape)} is no stack of experts' matrices, as {other.key} is"
        raise refused(record, "SHAPE_INVALID", detail)
    num_a = b.shape[0] if is_flat else a.shape[0]
    num_experts = _count(num_a, a, b, max_experts, may_share=not key.is_transposed)
    of_a = (num_experts * rank) if is_flat else rank
    for record, found, expected in ((a, a.shape[-2], of_a), (b, b.shape[2], rank)):
        if found != expected:
            raise refused(
                record,
                "RANK_MISMATCH",
                f"shape {list(record.shape)} does not match {num_experts} experts of rank {rank}, "
                "as the config says",
            )
    whole = Matrix.of(a)
    inputs = range(a.shape[-1])
    pairs = {
        expert: (
            whole.part(range(expert * rank, (expert + 1) * rank), inputs)
            if is_flat
            else Matrix.of(a, expert % num_a),
            Matrix.of(b, expert % b.shape[0]),
        )
        for expert in range(num_experts)
    }
    return ExpertWeights(
        _name(key.target),
        module,
        alpha,
        scale,
        num_experts,
        pairs,
        tensors=(("experts_A", a), ("experts_B", b)),
    )


def _check_config(config: AdapterConfig, module: str, a: TensorRecord) -> None:
    if not config.selects(module, is_embedding=False):
        raise refused(
            a,
            "TARGET_NOT_SELECTED",
            f"the config does not adapt {module}, so it would stay unused",
        )
    for field in ("use_dora", "lora_bias"):
        if getattr(config.extras, field):
            detail = f"{field} of experts in one tensor is not known: train without it"
            raise refused(a, "CONFIG_UNSUPPORTED", detail)


def _count(
    num_a: int, a: TensorRecord, b: TensorRecord, max_experts: int, *, may_share: bool
) -> int:
    """Returns how many experts they are of, if both say the same."""
    num_b = b.shape[0]
    num_experts = max(num_a, num_b)
    if num_experts > max_experts:
        record = a if num_a >= num_b else b
        raise refused(record, "TOO_MANY_EXPERTS", f"{num_experts} experts are over the limit")
    is_shared = may_share and min(num_a, num_b) == 1
    if num_a != num_b and not is_shared:
        raise refused(
            b,
            "SHAPE_INVALID",
            f"shape {list(b.shape)} is of {num_b} experts, and {a.key} of {num_a}",
        )
    if num_experts == 1:
        raise refused(
            a, "SHAPE_INVALID", "A and B are for one expert, but the file does not name it"
        )
    return num_experts


def _name(target: str) -> str:
    """Returns the canonical name of a projection of all experts."""
    experts, _, projection = target.rpartition(".")
    return f"{experts}.{PROJECTIONS.get(projection, projection)}"


def check_single(targets: Iterable[tuple[str, TensorRecord]]) -> Mapping[str, str]:
    """Checks names of experts that are saved one by one, each with a tensor, and returns one of the
    names for each projection.

    Raises InvalidAdapter TENSOR_UNKNOWN or TENSOR_DUPLICATE, with the subject a tensor.
    """
    found: dict[str, str] = {}
    projections: dict[str, str] = {}
    for name, record in targets:
        match = _NUMBERED.fullmatch(name) if "experts." in name else None
        if match is None:
            continue
        expert = expert_module(name)
        if expert is None or expert.expert >= MAX_EXPERTS:
            raise refused(
                record,
                "TENSOR_UNKNOWN",
                f"no mixture has an expert {match['index']}: their numbers are from 0 to at most "
                f"{MAX_EXPERTS - 1}, without leading zeros",
            )
        projection = _name(expert.stack)
        first = found.setdefault(f"{expert.expert} {projection}", name)
        if first != name:
            detail = f"{first} has another tensor for this: save each expert once"
            raise refused(record, "TENSOR_DUPLICATE", detail)
        projections.setdefault(projection, name)
    return projections


def check_forms(
    stacks: Iterable[ExpertWeights],
    parameters: Iterable[ExpertWeights],
    single: Mapping[str, str],
) -> None:
    """Checks that no projection is there twice, in one form or two, and none in a stack without the
    one that belongs to it. `single` are the ones that are there one by one, see `check_single`.

    Raises InvalidAdapter TENSOR_DUPLICATE, EXPERTS_MIXED or PAIR_INCOMPLETE, with the subject a
    tensor.
    """
    found: dict[str, ExpertWeights] = {}
    for stack in stacks:
        first = found.setdefault(stack.name, stack)
        if first is not stack:
            detail = f"{stack.name} has another tensor for this"
            raise refused(_record(stack), "TENSOR_DUPLICATE", detail)
    names = {name: f"{module}, which is of one" for name, module in single.items()}
    for each in (*found.values(), *parameters):
        if each.name in names:
            raise refused(
                _record(each),
                "EXPERTS_MIXED",
                f"all experts in one tensor, and also {names[each.name]}: save each projection "
                "in one form",
            )
        names[each.name] = f"{_record(each).key}, which is, too"
    for stack in found.values():
        experts, _, projection = stack.module.rpartition(".")
        if projection not in _TOGETHER:
            continue
        other = next(name for name in _TOGETHER if name != projection)
        if f"{stack.name.rpartition('.')[0]}.{PROJECTIONS[other]}" not in names:
            detail = f"there is no {experts}.{other}, and Tinker trains both"
            raise refused(_record(stack), "PAIR_INCOMPLETE", detail)


def _record(stack: ExpertWeights) -> TensorRecord:
    return stack.tensors[0][1]
