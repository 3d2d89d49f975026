"""A and B of bare parameters, as PEFT saves them with target_parameters: of all experts.

    <module>.lora_A.weight               [experts * rank, a], expert by expert
    <module>.lora_B.weight               [b, rank * experts], rank by rank
    <module>.base_layer.lora_A.weight    of another parameter of the module

`<module>` holds the parameter, [experts, first, second]. A model's module says which are inputs:
the second, or, where it `is_transposed`, the first. A has

    PEFT to 0.18     the first, whichever these are
    PEFT 0.19.0      the first, but of transposed parameters the second: always the outputs
    PEFT from 0.19.1 the second, but of transposed parameters the first: always the inputs

Models of Transformers before 5 do not say it, and PEFT takes theirs as not transposed, which the
file does not tell. So sizes decide where they can: a parameter's own, and where these are equal
gate_up_proj's and down_proj's of one module, which PEFT takes alike. Else `peft_version` decides,
which PEFT writes from 0.18 on, and is part of the digest; without it the parameter is refused.

Of several parameters of one module PEFT wraps the first around the module, then the next around
that; the order is the model definition's, not the config's, so only the order of known names is
known. A parameter `weight` of two dimensions is a linear layer's, and its A and B are a linear
layer's.

Sources: `ParamWrapper` of peft/tuners/lora/layer.py and `_inject_parameters` of
peft/tuners/tuners_utils.py of PEFT 0.17.0, 0.17.1, 0.18.0, 0.18.1, 0.19.0, 0.19.1 and 0.21.2;
`use_experts_implementation` of transformers/integrations/moe.py of Transformers 5.0 and 5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from adapter_store.checkpoint.peft.config import AdapterConfig
from adapter_store.checkpoint.peft.extras import refused
from adapter_store.checkpoint.peft.tensor_keys import target_of
from adapter_store.checkpoint.reading.safetensors import TensorRecord
from adapter_store.checkpoint.weights import ExpertWeights, Matrix, ParameterOrder
from adapter_store.errors import InvalidAdapter

WRAPPER = ".base_layer"
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_ORDERS = ((_GATE_UP, _DOWN), ("up_proj", _DOWN))
"""How Hugging Face's models define the parameters of experts, with a gate and without."""
_WEIGHT = "weight"


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
        if not names or (paths == [module] and _is_linear_layer(module, config)):
            continue
        record = wrapped[paths[0]]
        expected = [module + WRAPPER * depth for depth in reversed(range(len(names)))]
        if paths != expected:
            raise refused(
                record,
                "TARGET_NOT_SELECTED",
                f"target_parameters names {len(names)} parameters of {module}, and the file has "
                f"A and B for {len(paths)}",
            )
        order = next((each for each in _ORDERS if sorted(each) == names), tuple(names))
        if len(names) > 1 and order not in _ORDERS:
            known = ", or of ".join(" and ".join(each) for each in _ORDERS)
            raise refused(
                record,
                "CONFIG_UNSUPPORTED",
                f"target_parameters names several parameters of {module}, and their tensors can "
                f"only be told apart for {known}: adapt one of them",
            )
        for path, name in zip(paths, order, strict=True):
            found[path] = Parameter(module, name)
        used |= config.extras.entries_of_parameters(module)
    config.extras.check_parameters(used)
    return found


def _is_linear_layer(module: str, config: AdapterConfig) -> bool:
    """Returns whether target_modules names it; "all-linear" means none of those that hold a
    parameter of experts."""
    return not config.modules.is_all_linear and config.selects(module, is_embedding=False)


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
            a if rest else b,
            "RANK_MISMATCH",
            f"A {list(a.shape)} and B {list(b.shape)} are not the shapes of experts of rank "
            f"{rank}, as the config says",
        )
    if num_experts == 1:
        raise refused(
            a,
            "CONFIG_UNSUPPORTED",
            f"target_parameters names {parameter.path}, which has two dimensions or one expert, "
            "and the file does not show which; name the module in target_modules",
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
        target_of(module),
        module,
        alpha,
        scale,
        num_experts,
        pairs,
        tensors=(("parameter_A", a), ("parameter_B", b)),
        is_parameter=True,
    )


def in_order(
    found: Sequence[ExpertWeights], by_version: ParameterOrder | None
) -> Iterator[ExpertWeights]:
    """Yields these parameters with the features of each one's A, where its own sizes do not tell:
    as others of its module say, else as PEFT of its version has it.

    Raises InvalidAdapter SHAPE_INVALID or CONFIG_UNSUPPORTED.
    """
    by_path = {each.module: each for each in found}
    for each in found:
        module = each.module.rpartition(".")[0]
        gate_up, down = (by_path.get(f"{module}.{name}") for name in (_GATE_UP, _DOWN))
        by_sizes = _order_of(gate_up, down) if gate_up and down else None
        sizes = _sizes(each)
        if sizes[0] != sizes[1]:
            yield each
        elif by_sizes is ParameterOrder.OUTPUTS:
            # Sizes are part of the digest, unlike the choice by version.
            yield replace(each, pairs=each.turned())
        elif by_sizes is not None:
            yield each
        elif by_version is None:
            raise _unknown_order(each)
        else:
            yield replace(each, order=by_version)


def _order_of(gate_up: ExpertWeights, down: ExpertWeights) -> ParameterOrder:
    """Returns the features of A of a module's parameters: [hidden, 2 * inner] are the inputs and
    outputs of gate and up, [inner, hidden] of down. Raises InvalidAdapter SHAPE_INVALID."""
    for order, step in ((ParameterOrder.INPUTS, 1), (ParameterOrder.OUTPUTS, -1)):
        (hidden, both), (inner, outputs) = _sizes(gate_up)[::step], _sizes(down)[::step]
        fits = both == 2 * inner and outputs == hidden
        if fits and gate_up.num_experts == down.num_experts:
            return order
    record = down.tensors[0][1]
    shapes = [list(each.shape) for _, each in (*gate_up.tensors, *down.tensors)]
    raise refused(
        record,
        "SHAPE_INVALID",
        f"A and B of {_GATE_UP}, {shapes[0]} and {shapes[1]}, and of {_DOWN}, {shapes[2]} and "
        f"{shapes[3]}, are not the shapes of one mixture of experts: PEFT has {_DOWN} outside "
        f"and {_GATE_UP} in {WRAPPER[1:]}; save the adapter again with PEFT",
    )


def _sizes(parameter: ExpertWeights) -> tuple[int, int]:
    """Returns how many features A and B of each expert have."""
    (_, a), (_, b) = parameter.tensors
    return a.shape[1], b.shape[0]


def _unknown_order(parameter: ExpertWeights) -> InvalidAdapter:
    return refused(
        parameter.tensors[0][1],
        "CONFIG_UNSUPPORTED",
        f"{parameter.module} has as many inputs as outputs, and the release of PEFT that saved it "
        "decides which of them A has: the config's peft_version is missing, or is not a release; "
        "write the "
        'version that it was trained with, such as "peft_version": "0.17.1"',
    )
