"""A warning of finite weights that are much too large, whatever they are saved as."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.reading.scan import largest_of
from contract.images.dtypes import DataType
from tests.support.store.checkpoints import Q0, A, B, pair

TRAINERS = sorted(each for each in (Path(__file__).parent / "trainers").iterdir() if each.is_dir())
TYPES = {
    DataType.FLOAT32: torch.float32,
    DataType.FLOAT16: torch.float16,
    DataType.BFLOAT16: torch.bfloat16,
    DataType.FLOAT8_E4M3: torch.float8_e4m3fn,
    DataType.FLOAT8_E5M2: torch.float8_e5m2,
}


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda path: path.name)
def test_trained_adapters_are_not_warned_of(trainer: Path) -> None:
    assert open_checkpoint(trainer).warnings == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("a", "b", "alpha", "may_be"),
    [
        (1e4, 1e4, 8, "8.0e+08"),
        (0.02, 5e4, 64, "6.4e+04"),
        (5e4, 1.0, 8, "4.0e+05"),
        (-5e4, 1.0, 8, "4.0e+05"),
        (0.02, 0.05, 1e9, "2.5e+06"),
        (0.02, 0.05, -1e9, "2.5e+06"),
    ],
)
def test_what_may_overflow_is_named(make_adapter, dtype, a, b, alpha, may_be) -> None:
    tensors = pair(**{A: torch.full((4, 16), 0.01), B: torch.full((16, 4), 0.01)})
    tensors[A][2, 3], tensors[B][5, 1] = a, b
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    folder = make_adapter(("q_proj",), tensors=tensors, rank=4, lora_alpha=alpha)
    [warning] = open_checkpoint(folder).warnings
    assert warning.startswith("model.layers.0.self_attn.q_proj: ")
    assert float(warning.partition("up to ")[2].partition(",")[0]) == pytest.approx(
        float(may_be), rel=0.2
    )
    assert "VALUES_NOT_FINITE" in warning


OUT, WHOLE = torch.ones(16), torch.ones(32, 16)
HEAD, EMBEDDING = "base_model.model.lm_head", "base_model.model.model.embed_tokens"
NORM, ROWS = "base_model.model.model.norm", f"{EMBEDDING}.token_adapter.trainable_tokens_delta"
BIAS, MAGNITUDE = f"{Q0}.lora_B.bias", f"{Q0}.lora_magnitude_vector"
BASE_BIAS = f"{Q0}.base_layer.bias"
SAVED: dict[str, tuple[str, torch.Tensor, dict[str, Any], str]] = {
    "head": (f"{HEAD}.weight", WHOLE, {"modules_to_save": ["lm_head"]}, "lm_head"),
    "embedding": (f"{EMBEDDING}.weight", WHOLE, {}, "model.embed_tokens"),
    "norm": (f"{NORM}.weight", OUT, {"modules_to_save": ["norm"]}, "model.norm"),
    "rows": (
        ROWS,
        torch.ones(2, 16),
        {"trainable_token_indices": [7, 1]},
        "model.embed_tokens",
    ),
    "bias": (BIAS, OUT, {"lora_bias": True}, "model.layers.0.self_attn.q_proj"),
    "magnitude": (MAGNITUDE, OUT, {"use_dora": True}, "model.layers.0.self_attn.q_proj"),
    "the base's bias": (BASE_BIAS, OUT, {"bias": "all"}, "model.layers.0.self_attn.q_proj.bias"),
}
"""A tensor besides A and B, with what the config says about it, and its module."""


@pytest.mark.parametrize("what", SAVED)
@pytest.mark.parametrize("value", [1e30, -3e4, 900.0, -900.0])
def test_what_is_saved_besides_is_named(make_adapter, what: str, value: float) -> None:
    key, tensor, config, module = SAVED[what]
    tensor = tensor.clone()
    tensor.view(-1)[5] = value
    fields = {"lora_alpha": 4, "target_modules": ["q_proj"], **config}
    small = pair(**{A: torch.full((4, 16), 0.01), B: torch.full((16, 4), 0.01), key: tensor})
    found = open_checkpoint(make_adapter(tensors=small, rank=4, **fields)).warnings
    if abs(value) < 1000:
        assert found == ()
        return
    [warning] = found
    assert warning.startswith(f"{module}: ")
    assert f" up to {abs(value):.1e}, " in warning
    assert "VALUES_NOT_FINITE" in warning


def test_both_are_named(make_adapter) -> None:
    """The product that is too large, and the head."""
    tensors = {**pair(**{A: torch.full((4, 16), 1e4)}), f"{HEAD}.weight": WHOLE * 1e5}
    folder = make_adapter(
        ("q_proj",), tensors=tensors, rank=4, lora_alpha=8, modules_to_save=["lm_head"]
    )
    product, head = open_checkpoint(folder).warnings
    assert product.startswith("model.layers.0.self_attn.q_proj: the product of A and B ")
    assert head.startswith("lm_head: ")


@pytest.mark.parametrize("is_writeable", [True, False])
@given(
    st.sampled_from(list(TYPES)),
    st.lists(
        st.sampled_from(
            [0.0, -0.0, 1.5, -3.0, 448.0, 1e-7, -57344.0, math.inf, -math.inf, math.nan]
        )
        | st.floats(-400, 400),
        min_size=1,
        max_size=20,
    ),
)
def test_the_largest_is_found_in_every_type(
    is_writeable: bool, dtype: DataType, values: list[float]
) -> None:
    saved = torch.tensor(values).to(TYPES[dtype])
    data = saved.view(torch.uint8).numpy().copy()
    data.flags.writeable = is_writeable
    found, expected = largest_of(data, dtype), saved.float().abs()
    if expected.isfinite().all():
        assert found == expected.max().item()
    else:
        assert not math.isfinite(found)
    assert isinstance(data, np.ndarray)
