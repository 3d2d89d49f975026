"""An adapter of experts that PEFT saved as parameters, written in every other form of trainers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from contract.adapter_files import MLX_WEIGHTS_FILE
from inference_svc.model.architectures import load_description
from tests.support.models.trained import CONFIG, PREFIX, WEIGHTS

HF = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
TINKERS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
Tensors = dict[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """The experts of a layer: `saved` is what PEFT saves of their parameters, "gate_up_proj" and
    "down_proj", `parts` A [experts, rank, in] and B [experts, out, rank] by the projection."""

    index: int
    path: str
    saved: Mapping[str, Pair]
    parts: Mapping[str, Pair]
    is_interleaved: bool
    is_transposed: bool


Write = Callable[[Tensors, Layer], None]


@dataclass(frozen=True)
class Form:
    """How tensors are written, and fields of the config. `is_mlx`: MLX-LM's files."""

    write: Write
    fields: Mapping[str, Any]
    is_mlx: bool = False


def layers_of(whole: Path, model_dir: Path) -> list[Layer]:
    """Takes what PEFT saved apart."""
    projection = load_description(model_dir).mixtures[0].gate_up
    tensors, count = load_file(whole / WEIGHTS), projection.num_experts
    found = []
    for path in sorted({name.partition(".experts.")[0] + ".experts" for name in tensors}):
        places = {"gate_up_proj": f"{path}.base_layer", "down_proj": path}
        saved = {
            name: (tensors[f"{place}.lora_A.weight"], tensors[f"{place}.lora_B.weight"])
            for name, place in places.items()
        }
        (a, both), down = (_matrices(pair, count) for pair in saved.values())
        gate, up = both.chunk(2, dim=1)
        if projection.is_interleaved:
            gate, up = both[:, ::2], both[:, 1::2]
        parts = {"gate_proj": (a, gate), "up_proj": (a, up), "down_proj": down}
        order = (projection.is_interleaved, projection.is_transposed)
        found.append(Layer(len(found), path, saved, parts, *order))
    return found


def _matrices(pair: Pair, num_experts: int) -> Pair:
    a, b = pair
    of_b = b.view(len(b), -1, num_experts).permute(2, 0, 1)
    return a.view(num_experts, -1, a.shape[1]), of_b


def put(made: Tensors, path: str, pair: Pair) -> None:
    made[f"{path}.lora_A.weight"], made[f"{path}.lora_B.weight"] = pair


def one_by_one(made: Tensors, layer: Layer, names: Mapping[str, str]) -> None:
    for name, theirs in names.items():
        for expert, pair in enumerate(zip(*layer.parts[name], strict=True)):
            put(made, f"{layer.path}.{expert}.{theirs}", pair)


def of_transformers_4(made: Tensors, layer: Layer) -> None:
    """As Mixtral's module was called then."""
    own: Tensors = {}
    one_by_one(own, layer, TINKERS)
    made |= {name.replace(".mlp.", ".block_sparse_moe."): each for name, each in own.items()}


def stacks(made: Tensors, layer: Layer, names: Mapping[str, str]) -> None:
    for name, theirs in names.items():
        put(made, f"{layer.path}.{theirs}", layer.parts[name])


def of_megatron(made: Tensors, layer: Layer) -> None:
    """Gate and up in one stack, in the order of the model's parameter."""
    (a, gate), (_, up) = layer.parts["gate_proj"], layer.parts["up_proj"]
    both = torch.cat([gate, up], 1)
    if layer.is_interleaved:
        both = torch.stack([gate, up], 2).flatten(1, 2)
    put(made, f"{layer.path}.gate_up_proj", (a, both))
    put(made, f"{layer.path}.down_proj", layer.parts["down_proj"])


def of_mlx(made: Tensors, layer: Layer) -> None:
    path = layer.path.removeprefix(PREFIX).replace("experts", "switch_mlp")
    for name, (a, b) in layer.parts.items():
        made[f"{path}.{name}.lora_a"], made[f"{path}.{name}.lora_b"] = a, b


def parameters(made: Tensors, layer: Layer, *, are_turned: bool) -> None:
    """As PEFT saves them; turned: of the other of inputs and outputs."""
    num_experts = len(layer.parts["gate_proj"][0])
    for name, pair in layer.saved.items():
        inside = ".base_layer" if name == "gate_up_proj" else ""
        put(made, f"{layer.path}{inside}", turned(pair, num_experts) if are_turned else pair)


def turned(pair: Pair, num_experts: int) -> Pair:
    a, b = pair
    first = a.view(num_experts, -1, a.shape[1]).permute(2, 1, 0).flatten(1)
    second = b.view(len(b), -1, num_experts).permute(2, 1, 0).flatten(0, 1)
    return second.contiguous(), first.contiguous()


def turned_file(whole: Path, folder: Path, num_experts: int) -> None:
    """Copies parameters of experts, each turned."""
    tensors, made = load_file(whole / WEIGHTS), Tensors()
    for path in {name.partition(".lora_")[0] for name in tensors}:
        pair = (tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"])
        put(made, path, turned(pair, num_experts))
    folder.mkdir()
    save_file(made, folder / WEIGHTS)
    shutil.copy(whole / CONFIG, folder)


def parameter_and_one_by_one(made: Tensors, layer: Layer) -> None:
    put(made, layer.path, layer.saved["gate_up_proj"])
    one_by_one(made, layer, {"down_proj": "down_proj"})


def stacks_and_parameter(made: Tensors, layer: Layer) -> None:
    stacks(made, layer, {"gate_proj": "w1", "up_proj": "w3"})
    put(made, layer.path, layer.saved["down_proj"])


def by_layer(made: Tensors, layer: Layer) -> None:
    """Each layer and each projection in another form."""
    if layer.index % 2:
        of_megatron(made, layer)
        return
    one_by_one(made, layer, {"gate_proj": "gate_proj"})
    stacks(made, layer, {"up_proj": "up_proj"})
    one_by_one(made, layer, {"down_proj": "w2"})


def _modules(*names: str, parameters: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"target_modules": list(names), "target_parameters": list(parameters)}


OF_MIXTRAL = "transformers 4"
FORMS: dict[str, Form] = {
    "one by one": Form(lambda made, layer: one_by_one(made, layer, HF), _modules(*HF)),
    "w1, w2 and w3": Form(
        lambda made, layer: one_by_one(made, layer, TINKERS), _modules("w1", "w2", "w3")
    ),
    OF_MIXTRAL: Form(of_transformers_4, _modules("w1", "w2", "w3")),
    "Tinker": Form(
        lambda made, layer: stacks(made, layer, TINKERS),
        {"target_modules": "all-linear", "target_parameters": None},
    ),
    "Megatron-Bridge": Form(of_megatron, _modules("gate_up_proj", "down_proj")),
    "MLX": Form(of_mlx, {}, is_mlx=True),
    "PEFT to 0.18": Form(
        lambda made, layer: parameters(made, layer, are_turned=not layer.is_transposed),
        {"peft_version": "0.18.1"},
    ),
    "PEFT 0.19.0": Form(
        lambda made, layer: parameters(made, layer, are_turned=True), {"peft_version": "0.19.0"}
    ),
    "a parameter, and one by one": Form(
        parameter_and_one_by_one, _modules("down_proj", parameters=(GATE_UP,))
    ),
    "stacks, and a parameter": Form(stacks_and_parameter, _modules("w1", "w3", parameters=(DOWN,))),
    "each in another": Form(by_layer, _modules(*HF, "gate_up_proj", "w2")),
}


def write_form(form: Form, whole: Path, folder: Path, model_dir: Path) -> Path:
    """Writes an adapter that PEFT saved as parameters in another form."""
    made: Tensors = {}
    for layer in layers_of(whole, model_dir):
        form.write(made, layer)
    folder.mkdir()
    weights = folder / (MLX_WEIGHTS_FILE if form.is_mlx else WEIGHTS)
    save_file({name: each.clone().contiguous() for name, each in made.items()}, weights)
    config = json.loads((whole / CONFIG).read_text())
    fields = _mlx_config(config) if form.is_mlx else _peft_config(config, form)
    (folder / CONFIG).write_text(json.dumps(fields))
    return folder


def _peft_config(config: dict[str, Any], form: Form) -> dict[str, Any]:
    """Returns the config with patterns for modules, too, as they are called in any form."""
    both = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    fields = dict(config)
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = {}
        for pattern, value in config[key].items():
            parameter = pattern.rpartition(".")[2]
            names = [*both[parameter], *(TINKERS[name] for name in both[parameter]), parameter]
            patterns |= dict.fromkeys(names, value)
        fields[key] = patterns
    return fields | dict(form.fields)


def _mlx_config(config: dict[str, Any]) -> dict[str, Any]:
    keys = [f"mlp.switch_mlp.{name}" for name in HF]
    scale = config["lora_alpha"] / config["r"]
    parameters = {"rank": config["r"], "dropout": 0.0, "scale": scale, "keys": keys}
    return {"fine_tune_type": "lora", "lora_parameters": parameters, "num_layers": 16}


def share_outer(reference: Any, adapter: str) -> None:
    """Gives all experts of an adapter one A of gate and up, and one B of down."""
    for module in reference.modules():
        if getattr(module, "parameter_name", "") not in ("gate_up_proj", "down_proj"):
            continue
        a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        if module.parameter_name == "gate_up_proj":
            of_a = a.data.view(module.num_experts, -1, a.shape[1])
            of_a[:] = of_a[:1].clone()
        else:
            of_b = b.data.view(len(b), -1, module.num_experts)
            of_b[:] = of_b[..., :1].clone()


def shared_stacks(made: Tensors, layer: Layer) -> None:
    """What all experts share is there once."""
    for name, (a, b) in layer.parts.items():
        pair = (a, b[:1]) if name == "down_proj" else (a[:1], b)
        put(made, f"{layer.path}.{TINKERS[name]}", pair)
