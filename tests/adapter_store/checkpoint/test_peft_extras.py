"""What an adapter may have besides A and B: read where the config says it, else refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store.checkpoint.open import open_checkpoint
from contract.images.segment_kinds import SegmentKind
from tests.support.store.checkpoints import Q0, A, B, pair, refusal

BIAS, MAGNITUDE = f"{Q0}.lora_B.bias", f"{Q0}.lora_magnitude_vector"
OUT = torch.ones(16)
EMBEDDING = "base_model.model.model.embed_tokens"


@pytest.fixture
def make(make_adapter) -> Callable[..., Path]:
    """Makes adapters of q_proj of the first layer, with more tensors and config fields."""
    number = itertools.count()

    def made(tensors: dict[str, torch.Tensor | None], **config: Any) -> Path:
        folder = f"adapter{next(number)}"
        fields = {"lora_alpha": 8, "target_modules": ["q_proj"], **config}
        own = {name: tensor.clone() for name, tensor in pair(**tensors).items()}
        return make_adapter(tensors=own, folder=folder, **fields)

    return made


READ = {
    "a bias of B": ({BIAS: OUT}, {"lora_bias": True}, SegmentKind.BIAS),
    "a bias of B, named": (
        {
            A: None,
            f"{Q0}.lora_A.french.weight": torch.ones(4, 16),
            B: None,
            f"{Q0}.lora_B.french.weight": torch.ones(16, 4),
            f"{Q0}.lora_B.french.bias": OUT,
        },
        {"lora_bias": True},
        SegmentKind.BIAS,
    ),
    "DoRA": ({MAGNITUDE: OUT}, {"use_dora": True}, SegmentKind.MAGNITUDE),
    "DoRA of a module": ({f"{MAGNITUDE}.weight": OUT}, {"use_dora": True}, SegmentKind.MAGNITUDE),
    "DoRA of a state dict": (
        {f"{MAGNITUDE}.default.weight": OUT},
        {"use_dora": True},
        SegmentKind.MAGNITUDE,
    ),
    "DoRA of an older state dict": (
        {f"{MAGNITUDE}.default": OUT},
        {"use_dora": True},
        SegmentKind.MAGNITUDE,
    ),
    "a saved module of a state dict": (
        {"base_model.model.lm_head.modules_to_save.default.weight": torch.ones(32, 16)},
        {"modules_to_save": ["lm_head"]},
        SegmentKind.FULL,
    ),
    "a classifier, which PEFT calls by two names": (
        {"base_model.model.score.weight": torch.ones(3, 16)},
        {"modules_to_save": ["classifier", "score"], "task_type": "SEQ_CLS"},
        SegmentKind.FULL,
    ),
    "a part of a saved module": (
        {"base_model.model.model.layers.0.mlp.up_proj.weight": torch.ones(24, 16)},
        {"modules_to_save": ["mlp"]},
        SegmentKind.FULL,
    ),
    "a bias as an older PEFT saves it": (
        {f"{Q0}.bias": OUT},
        {"bias": "lora_only"},
        SegmentKind.FULL,
    ),
    "a base weight of a module that is adapted": (
        {f"{Q0}.base_layer.weight": torch.ones(16, 16)},
        {},
        SegmentKind.FULL,
    ),
}


@pytest.mark.parametrize("case", READ)
def test_what_the_config_says_is_read(make, case):
    tensors, config, kind = READ[case]
    checkpoint = open_checkpoint(make(tensors, **config))
    assert checkpoint.segment_kinds == (kind,)
    plain = open_checkpoint(make({}))
    assert plain.segment_kinds == ()
    assert checkpoint.digest != plain.digest


def test_its_names_in_the_file_leave_the_digest_alone(make):
    digests = {
        open_checkpoint(make({name: OUT}, use_dora=True)).digest
        for name in (MAGNITUDE, f"{MAGNITUDE}.weight", f"{MAGNITUDE}.default.weight")
    }
    assert len(digests) == 1


def test_every_value_of_it_is_of_the_digest(make):
    """So is which of the two it is: as vectors they are alike."""
    digests = {
        open_checkpoint(make({name: vector}, **{key: True})).digest
        for name, key in ((BIAS, "lora_bias"), (MAGNITUDE, "use_dora"))
        for vector in (OUT, 2 * OUT, OUT.half())
    }
    assert len(digests) == 6


REFUSED = {
    # tensors, config, reason, subject
    "a bias that the config does not say": ({BIAS: OUT}, {}, "TENSOR_UNKNOWN", BIAS),
    "magnitudes that it does not say": ({MAGNITUDE: OUT}, {}, "TENSOR_UNKNOWN", MAGNITUDE),
    "no bias": ({}, {"lora_bias": True}, "PAIR_INCOMPLETE", A),
    "no magnitudes": ({}, {"use_dora": True}, "PAIR_INCOMPLETE", A),
    "a bias alone": ({A: None, B: None, BIAS: OUT}, {"lora_bias": True}, "PAIR_INCOMPLETE", BIAS),
    "magnitudes alone": (
        {A: None, B: None, MAGNITUDE: OUT},
        {"use_dora": True},
        *("PAIR_INCOMPLETE", MAGNITUDE),
    ),
    "a bias that is too long": (
        {BIAS: torch.ones(17)},
        {"lora_bias": True},
        *("SHAPE_INVALID", BIAS),
    ),
    "too few magnitudes": (
        {MAGNITUDE: torch.ones(15)},
        {"use_dora": True},
        *("SHAPE_INVALID", MAGNITUDE),
    ),
    "a bias as a matrix": (
        {BIAS: torch.ones(16, 1)},
        {"lora_bias": True},
        *("SHAPE_INVALID", BIAS),
    ),
    "magnitudes as a matrix": (
        {MAGNITUDE: torch.ones(1, 16)},
        {"use_dora": True},
        *("SHAPE_INVALID", MAGNITUDE),
    ),
    "magnitudes twice": (
        {MAGNITUDE: OUT, f"{MAGNITUDE}.weight": OUT},
        {"use_dora": True},
        *("TENSOR_DUPLICATE", f"{MAGNITUDE}.weight"),
    ),
    "magnitudes of another adapter": (
        {f"{MAGNITUDE}.evil": OUT},
        {"use_dora": True},
        *("ADAPTERS_MIXED", f"{MAGNITUDE}.evil"),
    ),
    "a bias of an embedding": (
        {
            A: None,
            B: None,
            f"{EMBEDDING}.lora_embedding_A": torch.ones(4, 32),
            f"{EMBEDDING}.lora_embedding_B": torch.ones(16, 4),
        },
        {"lora_bias": True, "target_modules": ["embed_tokens"]},
        *("CONFIG_UNSUPPORTED", "lora_bias"),
    ),
    "a bias and magnitudes": (
        {BIAS: OUT, MAGNITUDE: OUT},
        {"lora_bias": True, "use_dora": True},
        *("CONFIG_UNSUPPORTED", "lora_bias"),
    ),
    "values that are not finite": (
        {MAGNITUDE: OUT * torch.inf},
        {"use_dora": True},
        *("NOT_FINITE", MAGNITUDE),
    ),
}

HEAD = "base_model.model.lm_head"
NORM, WHOLE = "base_model.model.model.norm.weight", torch.ones(32, 16)
ROWS = f"{EMBEDDING}.token_adapter.trainable_tokens_delta"
SAVE = {"modules_to_save": ["lm_head"]}
TOKENS = {"trainable_token_indices": [7, 1]}
REFUSED |= {
    "a norm that the config does not name": ({NORM: OUT}, {}, "TENSOR_UNKNOWN", NORM),
    "a norm, and a head that is lost": (
        {NORM: OUT},
        {"modules_to_save": ["norm", "lm_head"]},
        *("TENSOR_MISSING", "modules_to_save"),
    ),
    "a head twice": (
        {f"{HEAD}.weight": WHOLE, f"{HEAD}.modules_to_save.weight": WHOLE},
        SAVE,
        *("TENSOR_DUPLICATE", f"{HEAD}.weight"),
    ),
    "a head of another adapter": (
        {f"{HEAD}.modules_to_save.evil.weight": WHOLE},
        SAVE,
        *("ADAPTERS_MIXED", A),  # the next in the file
    ),
    "a head of three dimensions": (
        {f"{HEAD}.weight": torch.ones(2, 16, 16)},
        SAVE,
        *("SHAPE_INVALID", f"{HEAD}.weight"),
    ),
    "a bias that is a matrix": (
        {f"{Q0}.base_layer.bias": torch.ones(1, 16)},
        {"bias": "all"},
        *("SHAPE_INVALID", f"{Q0}.base_layer.bias"),
    ),
    "a module that is adapted and saved": (
        {f"{Q0}.weight": WHOLE},
        {"modules_to_save": ["q_proj"]},
        *("CONFIG_UNSUPPORTED", f"{Q0}.weight"),
    ),
    "a bias of a module that is not adapted": (
        {f"{Q0}.base_layer.bias": OUT, f"{Q0.replace('q_', 'k_')}.bias": OUT},
        {"bias": "lora_only"},
        *("TENSOR_UNKNOWN", f"{Q0.replace('q_', 'k_')}.bias"),
    ),
    "a base weight of a module that is not adapted": (
        {f"{HEAD}.base_layer.weight": WHOLE},
        {},
        *("TENSOR_UNKNOWN", f"{HEAD}.base_layer.weight"),
    ),
    "a whole weight that may be transposed": (
        {f"{Q0.replace('q_', 'k_')}.weight": WHOLE[:16]},
        {"modules_to_save": ["k_proj"], "fan_in_fan_out": True},
        *("CONFIG_UNSUPPORTED", f"{Q0.replace('q_', 'k_')}.weight"),
    ),
    "rows without ids": ({ROWS: WHOLE}, {}, "TENSOR_UNKNOWN", ROWS),
    "too many rows": ({ROWS: WHOLE}, TOKENS, "SHAPE_INVALID", ROWS),
    "a row that is a vector": ({ROWS: OUT}, TOKENS, "SHAPE_INVALID", ROWS),
    "rows of two modules for one list": (
        {ROWS: WHOLE[:2], ROWS.replace("model.embed_tokens", "wte"): WHOLE[:2]},
        TOKENS,
        *("TENSOR_DUPLICATE", ROWS.replace("model.embed_tokens", "wte")),
    ),
    "rows of one of two modules": (
        {ROWS: WHOLE[:2]},
        {"trainable_token_indices": {"embed_tokens": [7, 1], "lm_head": [7, 2]}},
        *("TENSOR_MISSING", "trainable_token_indices"),
    ),
    "rows and the whole": (
        {ROWS: WHOLE[:2], f"{EMBEDDING}.weight": WHOLE},
        TOKENS,
        *("TENSOR_DUPLICATE", f"{EMBEDDING}.weight"),
    ),
    "rows of a module that is adapted": (
        {
            f"{EMBEDDING}.lora_embedding_A": torch.ones(4, 32),
            f"{EMBEDDING}.lora_embedding_B": torch.ones(16, 4),
            ROWS: WHOLE[:2],
        },
        {**TOKENS, "target_modules": ["q_proj", "embed_tokens"]},
        *("CONFIG_UNSUPPORTED", ROWS),
    ),
    "rows that are not finite": ({ROWS: WHOLE[:2] * torch.nan}, TOKENS, "NOT_FINITE", ROWS),
}

E0 = "base_model.model.model.layers.0.mlp.experts"
EA, EB = f"{E0}.lora_A.weight", f"{E0}.lora_B.weight"
INNER_A, INNER_B = f"{E0}.base_layer.lora_A.weight", f"{E0}.base_layer.lora_B.weight"
EXPERTS = {EA: torch.ones(8, 16), EB: torch.ones(24, 8)}
INNER = {INNER_A: torch.ones(8, 12), INNER_B: torch.ones(16, 8)}
ONE = {"target_parameters": ["experts.w1"]}
TWO = {"target_parameters": ["experts.w1", "experts.w2"]}
REFUSED |= {
    "experts that the config does not name": (EXPERTS, {}, "TARGET_NOT_SELECTED", EA),
    "A of experts alone": ({EA: EXPERTS[EA]}, ONE, "PAIR_INCOMPLETE", EA),
    "seven rows of rank 4": ({**EXPERTS, EA: torch.ones(7, 16)}, ONE, "RANK_MISMATCH", EA),
    "two experts of A and three of B": (
        {**EXPERTS, EB: torch.ones(24, 12)},
        ONE,
        *("RANK_MISMATCH", EB),
    ),
    "one expert": (
        {EA: torch.ones(4, 16), EB: torch.ones(24, 4)},
        ONE,
        *("CONFIG_UNSUPPORTED", EA),
    ),
    "parameters whose order nobody knows": (
        {**EXPERTS, **INNER},
        TWO,
        *("CONFIG_UNSUPPORTED", INNER_A),
    ),
    "one of two parameters": (EXPERTS, TWO, "TARGET_NOT_SELECTED", EA),
    "two of one parameter": ({**EXPERTS, **INNER}, ONE, "TARGET_NOT_SELECTED", INNER_A),
    "a parameter that is wrapped in nothing": (INNER, ONE, "TARGET_NOT_SELECTED", INNER_A),
    "more parameters than there are": (
        EXPERTS,
        {"target_parameters": ["experts.w1", "other.w2"]},
        *("TENSOR_MISSING", "target_parameters"),
    ),
    "as many inputs as outputs, of PEFT in between": (
        {**EXPERTS, EB: torch.ones(16, 8)},
        {**ONE, "peft_version": "0.19.0.dev0@0123abc"},
        *("CONFIG_UNSUPPORTED", EA),
    ),
    "as many inputs as outputs, of some PEFT": (
        {**EXPERTS, EB: torch.ones(16, 8)},
        ONE,
        *("CONFIG_UNSUPPORTED", EA),
    ),
    "a bias of experts": (
        {**EXPERTS, f"{E0}.lora_B.bias": torch.ones(24)},
        ONE,
        *("TENSOR_UNKNOWN", f"{E0}.lora_B.bias"),
    ),
    "140,000 experts": (
        {EA: torch.ones(140_000, 1), EB: torch.ones(1, 140_000)},
        {**ONE, "rank_pattern": {"w1": 1}, "peft_version": "0.21.2"},
        *("TOO_MANY_EXPERTS", EA),
    ),
}

ALORA = {"alora_invocation_tokens": [7, 1]}
REFUSED |= {
    **{
        f"aLoRA with {key}": (
            {},
            {**ALORA, key: value},
            *("CONFIG_UNSUPPORTED", "alora_invocation_tokens"),
        )
        for key, value in {
            "use_dora": True,
            "bias": "all",
            "modules_to_save": ["norm"],
            "trainable_token_indices": [3],
            "target_parameters": ["experts.w1"],
        }.items()
    },
    "aLoRA of an embedding": (
        {
            f"{EMBEDDING}.lora_embedding_A": torch.ones(4, 32),
            f"{EMBEDDING}.lora_embedding_B": torch.ones(16, 4),
        },
        {**ALORA, "target_modules": ["q_proj", "embed_tokens"]},
        *("CONFIG_UNSUPPORTED", f"{EMBEDDING}.lora_embedding_A"),
    ),
    "aLoRA, and a head saved along": (
        {f"{HEAD}.weight": WHOLE},
        ALORA,
        *("CONFIG_UNSUPPORTED", f"{HEAD}.weight"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_applied_wholly_is_refused_by_name(make, case):
    tensors, config, reason, subject = REFUSED[case]
    error = refusal(make(tensors, **config))
    assert (error.reason, error.subject) == (reason, subject)
