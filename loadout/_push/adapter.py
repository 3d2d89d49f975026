"""Names and shapes of an adapter's tensors, and its config, checked before they are sent.

Tensors may have PEFT's names, or those in the state dict of a model in training, which contain the
adapter's name and parts from torch's wrappers.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from contract.tensor_names import unwrapped
from loadout._push.tensors import Tensor, describe, invalid, is_sharded
from loadout.errors import InvalidArgument

_ROLES = "lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector"
_ADAPTER_NAME = re.compile(rf"\.({_ROLES})\.(?!weight$|bias$)([^.]+)(\.weight|\.bias)?$")
_FACTOR = re.compile(r"(.*\.)?lora_(embedding_)?([AB])(\.weight)?")


def read_tensors(tensors: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors by PEFT's names. Raises InvalidArgument, naming the tensor, if a tensor
    cannot be sent."""
    if not isinstance(tensors, Mapping):
        raise InvalidArgument(
            f"tensors: a {type(tensors).__name__} is not a mapping of names to tensors",
            code="INVALID_ARGUMENT",
            subject="tensors",
        )
    if not tensors:
        raise InvalidArgument(
            "tensors: the mapping is empty; pass get_peft_model_state_dict(model)",
            code="INVALID_ARGUMENT",
            subject="tensors",
        )
    found: dict[str, Tensor] = {}
    for given, values in tensors.items():
        name = saved_name(given)
        if name in found:
            raise invalid(given, f"and another are both {name}: push one adapter at a time")
        found[name] = describe(name, values)
        if 0 in found[name].shape:
            raise invalid(
                given,
                f"has shape {list(found[name].shape)}, and no values: gather a sharded model's "
                "tensors, or shard with DTensor (FSDP2)",
            )
    return list(found.values())


def saved_name(name: str) -> str:
    """Returns how PEFT would save a tensor of this name: without the adapter's own."""
    name = unwrapped(name)
    match = _ADAPTER_NAME.search(name)
    if match is None:
        return name
    kept = "" if match[1] == "lora_magnitude_vector" else match[3] or ""
    return f"{name[: match.start()]}.{match[1]}{kept}"


def check_pairs(tensors: Iterable[Tensor], config: Mapping[str, Any]) -> None:
    """Checks that each A has its B, and that two-dimensional ones have equal ranks, which match the
    config. The store checks the rest. Raises InvalidArgument, naming the tensor."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        if match := _FACTOR.fullmatch(tensor.name):
            module = f"{match[1] or ''}lora_{match[2] or ''}"
            pairs.setdefault(module, {})[match[3]] = tensor
    has_one_rank = not config.get("rank_pattern") and not config.get("target_parameters")
    rank = config.get("r") if has_one_rank else None
    for pair in pairs.values():
        if len(pair) == 1:
            ((role, tensor),) = pair.items()
            other = "B" if role == "A" else "A"
            raise invalid(tensor.name, f"comes without its lora_{other}: a shard is missing")
        a, b = pair["A"], pair["B"]
        if len(a.shape) != 2 or len(b.shape) != 2:
            continue
        if has_one_rank and a.shape[0] != b.shape[1]:
            raise invalid(
                b.name,
                f"of shape {list(b.shape)} does not fit {a.name} of shape {list(a.shape)}: A is "
                "[rank, in], B is [out, rank]",
            )
        if isinstance(rank, int) and a.shape[0] != rank:
            raise invalid(
                a.name, f"of shape {list(a.shape)} has rank {a.shape[0]}; the config's r is {rank}"
            )


def read_config(config: Any) -> dict[str, Any]:
    """Returns the content of adapter_config.json, from a mapping, PEFT's LoraConfig, or JSON.
    Raises InvalidArgument."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, str | bytes):
        try:
            config = json.loads(config)
        except ValueError as error:
            raise _invalid_config(f"is not JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise _invalid_config(
            f"a {type(config).__name__} is not a config: pass a mapping, PEFT's LoraConfig, or JSON"
        )
    return {str(key): _plain(str(key), value) for key, value in config.items()}


def dump_config(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=2, sort_keys=True).encode()


def any_sharded(tensors: object) -> bool:
    """Returns whether other ranks take part. The argument may be invalid."""
    return isinstance(tensors, Mapping) and any(map(is_sharded, tensors.values()))


def _plain(key: str, value: Any) -> Any:
    """Returns a value of a config as PEFT saves it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(_plain(key, each) for each in value)
    if isinstance(value, Mapping):
        return {str(name): _plain(key, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, each) for each in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise _invalid_config(f"{key} is a {type(value).__name__}, which JSON cannot store", key)


def _invalid_config(why: str, subject: str = "config") -> InvalidArgument:
    return InvalidArgument(f"config: {why}", code="INVALID_ARGUMENT", subject=subject)
