"""What a PEFT config says that an adapter has besides A and B, and whether it has just that.

    lora_bias    B has a bias, which is scaled as B is
    use_dora     a module's weights with B @ A get the norms that `lora_magnitude_vector` has

What the config does not say would stay unused where PEFT loads the adapter, and what it says and
the file does not have was lost on the way: both are refused by name.

Sources: peft/tuners/lora/{config,layer,dora}.py of PEFT 0.21.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapter_store.checkpoint.config_values import invalid_value, read_flag
from adapter_store.checkpoint.safetensors import TensorRecord
from adapter_store.core import TargetKind
from adapter_store.errors import InvalidAdapter


@dataclass(frozen=True, slots=True)
class Extras:
    """What PEFT's config says that there is besides A and B, by the names of its fields."""

    lora_bias: bool = False
    use_dora: bool = False


NO_EXTRAS = Extras()


def read_extras(fields: Mapping[str, Any]) -> Extras:
    """Reads a config's fields. Raises InvalidAdapter with a key as its subject."""
    lora_bias, use_dora = read_flag(fields, "lora_bias"), read_flag(fields, "use_dora")
    if lora_bias and use_dora:
        raise invalid_value(
            *("lora_bias", True, "PEFT has no meaning for it with use_dora; train without one"),
            "CONFIG_UNSUPPORTED",
        )
    return Extras(lora_bias, use_dora)


def check_vectors(
    extras: Extras,
    kind: TargetKind,
    a: TensorRecord,
    out_features: int,
    bias: TensorRecord | None,
    magnitude: TensorRecord | None,
) -> None:
    """Checks that a target, with this A and as many outputs, has the vectors that the config says.

    Raises InvalidAdapter TENSOR_UNKNOWN, PAIR_INCOMPLETE or SHAPE_INVALID, with a tensor as its
    subject, or CONFIG_UNSUPPORTED.
    """
    if extras.lora_bias and kind is TargetKind.EMBEDDING:
        raise invalid_value(
            *("lora_bias", True, f"{a.key}: PEFT has no bias of an embedding's B"),
            "CONFIG_UNSUPPORTED",
        )
    for key, is_said, record in (
        ("lora_bias", extras.lora_bias, bias),
        ("use_dora", extras.use_dora, magnitude),
    ):
        if record is None:
            if is_said:
                what = "lora_B.bias" if key == "lora_bias" else "lora_magnitude_vector"
                raise refused(
                    a, "PAIR_INCOMPLETE", f"there is no {what} for it, and the config says {key}"
                )
        elif not is_said:
            raise refused(
                record, "TENSOR_UNKNOWN", f"it would stay unused, without {key} in the config"
            )
        elif record.shape != (out_features,):
            raise refused(
                record,
                "SHAPE_INVALID",
                f"shape {list(record.shape)} is not that of {out_features} outputs",
            )


def refused(record: TensorRecord, reason: str, detail: str) -> InvalidAdapter:
    """Returns the error for a tensor."""
    return InvalidAdapter(f"{record.key}: {detail}", subject=record.key, reason=reason)
