"""Hostile adapters of experts, each with the name of what must become of it when it is registered.

A case changes the folder of a good adapter, as in tests.adapter_store.hostile, and adds what there
is of a mixture: of 4 experts, of rank 4, with 16 features outside and 12 inside.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.adapter_store.hostile import Change, both, config, tensors

E0 = "base_model.model.model.layers.0.mlp.experts"
RANK, HIDDEN, INNER, EXPERTS = 4, 16, 12, 4
ROWS = EXPERTS * RANK
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
EXPERT_CASES: dict[str, tuple[str, Change]] = {}


def case(name: str, reason: str, change: Change) -> None:
    EXPERT_CASES[f"experts: {name}"] = (reason, change)


def pairs(**shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Change:
    """Adds A and B of these shapes below the experts of a layer; "" is the module itself."""
    made = {}
    for name, (a, b) in shapes.items():
        path = f"{E0}.{name}" if name else E0
        made |= {f"{path}.lora_A.weight": torch.ones(a), f"{path}.lora_B.weight": torch.ones(b)}
    return tensors(**made)


def modules(*names: str, **shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Change:
    """Adds them, of modules that the config names."""
    return both(config(target_modules=["q_proj", *names]), pairs(**shapes))


def parameters(
    *names: str, fields: dict[str, Any] | None = None, **shapes: tuple[tuple[int, ...], ...]
) -> Change:
    """Adds them, of parameters that the config names."""
    return both(config(target_parameters=list(names), **(fields or {})), pairs(**shapes))


STACK = (EXPERTS, RANK, INNER), (EXPERTS, HIDDEN, RANK)
ONE = (RANK, INNER), (HIDDEN, RANK)
DOWN = (ROWS, INNER), (HIDDEN, ROWS)
GATE_UP = (ROWS, HIDDEN), (2 * INNER, ROWS)
SQUARE = (ROWS, HIDDEN), (HIDDEN, ROWS)

# How many there are

case("rows that ranks do not divide", "RANK_MISMATCH", parameters(
    PARAMETERS[1], **{"": ((ROWS - 1, INNER), (HIDDEN, ROWS - 1))}
))  # fmt: skip
case("A and B of other numbers of experts", "RANK_MISMATCH", parameters(
    PARAMETERS[1], **{"": ((ROWS, INNER), (HIDDEN, ROWS + RANK))}
))  # fmt: skip
case("parameters of other numbers of experts", "SHAPE_INVALID", parameters(
    *PARAMETERS, **{"": ((ROWS - RANK, INNER), (HIDDEN, ROWS - RANK)), "base_layer": GATE_UP}
))  # fmt: skip
case("a stack of three of A and four of B", "SHAPE_INVALID", modules(
    "down_proj", down_proj=((3, RANK, INNER), STACK[1])
))  # fmt: skip
case("a stack of another rank", "RANK_MISMATCH", modules(
    "down_proj", down_proj=((EXPERTS, RANK + 1, INNER), (EXPERTS, HIDDEN, RANK + 1))
))  # fmt: skip
case("more than any mixture has", "TOO_MANY_EXPERTS", both(
    config(rank_pattern={"down_proj": 1}),
    modules("down_proj", down_proj=((140_000, 1, 1), (140_000, 1, 1))),
))  # fmt: skip
case("more rows than any mixture has", "TOO_MANY_EXPERTS", parameters(
    PARAMETERS[1],
    fields={"rank_pattern": {"down_proj": 1}},
    **{"": ((140_000, 1), (2, 140_000))},
))  # fmt: skip

# What is missing, or there twice

case("A of a stack alone", "PAIR_INCOMPLETE", both(
    modules("down_proj", down_proj=STACK), tensors(**{f"{E0}.down_proj.lora_B.weight": None})
))  # fmt: skip
case("w1 without w3", "PAIR_INCOMPLETE", modules("w1", w1=STACK))
case("a parameter that the file lacks", "TENSOR_MISSING", parameters(
    PARAMETERS[1], "other.down_proj", **{"": DOWN}
))  # fmt: skip
case("one of two parameters", "TARGET_NOT_SELECTED", parameters(*PARAMETERS, **{"": DOWN}))
case("a parameter wrapped in nothing", "TARGET_NOT_SELECTED", parameters(
    PARAMETERS[1], base_layer=DOWN
))  # fmt: skip
case("one expert by two names", "TENSOR_DUPLICATE", modules(
    "down_proj", "w2", **{"3.down_proj": ONE, "3.w2": ONE}
))  # fmt: skip
case("one stack by two names", "TENSOR_DUPLICATE", modules(
    "down_proj", "w2", down_proj=STACK, w2=STACK
))  # fmt: skip
case("a stack, and one of its experts", "EXPERTS_MIXED", modules(
    "down_proj", **{"down_proj": STACK, "3.down_proj": ONE}
))  # fmt: skip
case("a parameter, and one of its experts by another name", "EXPERTS_MIXED", both(
    modules("w2", **{"3.w2": ONE}), parameters(PARAMETERS[1], **{"": DOWN})
))  # fmt: skip
case("a parameter, and a stack of the same", "EXPERTS_MIXED", both(
    modules("w2", w2=STACK), parameters(PARAMETERS[1], **{"": DOWN})
))  # fmt: skip

# Which of them, and which way round

for number in ("-1", "01", "131072", "4294967296", "9" * 30):
    case(f"index {number}", "TENSOR_UNKNOWN", modules("down_proj", **{f"{number}.down_proj": ONE}))
case("an index in other digits", "TENSOR_UNKNOWN", modules(
    "down_proj", **{"\u0663.down_proj": ONE}
))  # fmt: skip
case("parameters whose order nobody knows", "CONFIG_UNSUPPORTED", parameters(
    "experts.first", "experts.second", **{"": DOWN, "base_layer": GATE_UP}
))  # fmt: skip
case("gate and up apart, as parameters", "CONFIG_UNSUPPORTED", parameters(
    *(f"experts.{name}_proj" for name in ("gate", "up", "down")),
    **{
        "": DOWN,
        "base_layer": ((ROWS, HIDDEN), (INNER, ROWS)),
        "base_layer.base_layer": ((ROWS, HIDDEN), (INNER, ROWS)),
    },
))  # fmt: skip
case("parameters in the other order", "SHAPE_INVALID", parameters(
    *PARAMETERS, **{"": GATE_UP, "base_layer": DOWN}
))  # fmt: skip
case("parameters that are not the same way round", "SHAPE_INVALID", parameters(
    *PARAMETERS, **{"": ((ROWS, HIDDEN), (INNER, ROWS)), "base_layer": GATE_UP}
))  # fmt: skip
for version in (None, "", "0.19.1.dev0@UNKNOWN", "newest", "0.18." + "1" * 100_000, [0, 18]):
    case(f"square, of PEFT {str(version)[:20]}", "CONFIG_UNSUPPORTED", parameters(
        PARAMETERS[1], fields={"peft_version": version}, **{"": SQUARE}
    ))  # fmt: skip
case("values that are not finite", "NOT_FINITE", both(
    modules("down_proj", down_proj=STACK),
    tensors(**{f"{E0}.down_proj.lora_A.weight": torch.full(STACK[0], torch.nan)}),
))  # fmt: skip
case("DoRA of a stack", "CONFIG_UNSUPPORTED", both(
    config(use_dora=True),
    modules("down_proj", down_proj=STACK),
    tensors(**{
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_magnitude_vector":
        torch.ones(16) for layer in (0, 1)
    }),
))  # fmt: skip
