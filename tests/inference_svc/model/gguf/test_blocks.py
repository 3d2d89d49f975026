"""Values of blocks equal those of the package `gguf`, bit by bit."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch

from inference_svc.errors import UnsupportedModel
from inference_svc.model.gguf.blocks import FORMATS, decode
from inference_svc.model.gguf.file import TYPES
from inference_svc.model.quantised import read_scheme
from inference_svc.model.quantised.gguf import GgufScheme
from tests.support.inference.gguf_files import random_blocks, values_of

SHAPE = (5, 768)


def test_types_have_the_sizes_of_gguf() -> None:
    for number, found in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (found.name, found[1:])


@pytest.mark.parametrize("kind", FORMATS)
def test_values(kind: str) -> None:
    blocks = random_blocks(kind, SHAPE)
    got = decode(torch.from_numpy(blocks), kind).dequantise()
    assert got.shape == SHAPE
    # As bits: a zero has its sign.
    assert torch.equal(got.view(torch.int32), values_of(blocks, kind).view(torch.int32))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_values_that_gguf_quantises(kind: str) -> None:
    """Blocks as its quantisers make them, the largest codes among them."""
    weight = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    blocks = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    got = decode(torch.from_numpy(blocks), kind).dequantise()
    assert torch.equal(got, values_of(blocks, kind))
    assert (got - torch.from_numpy(weight)).abs().max() < 0.5


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", FORMATS)
def test_scales_that_are_not_finite_are_refused(kind: str, value: float) -> None:
    blocks = random_blocks(kind, SHAPE)
    at = TYPES[14].num_bytes - 2 if kind == "Q6_K" else 0
    blocks[3, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    with pytest.raises(UnsupportedModel, match="weight has scales that are not finite"):
        decode(torch.from_numpy(blocks), kind)


def test_a_scheme_survives_the_config() -> None:
    scheme = GgufScheme({"a.q_proj": "Q4_K", "a.k_proj": "Q4_K", "a.v_proj": "Q6_K"})
    config = {"quantization_config": scheme.to_config(), "dtype": "bfloat16"}
    assert read_scheme(json.loads(json.dumps(config))) == scheme
    assert scheme.name == "gguf, Q4_K and Q6_K"
    assert scheme.form == "gguf q4_k"
    stored = scheme.matrix("a.v_proj", 3, 512)
    assert stored is not None
    assert stored.tensors["weight"] == ((3, 420), ("Q6_K",), False)
    blocks = random_blocks("Q6_K", (3, 512))
    rows = stored.decode({"weight": torch.from_numpy(blocks)})
    assert not isinstance(rows, torch.Tensor)
    assert rows.format == stored.format
    assert scheme.matrix("a.o_proj", 3, 512) is None
    with pytest.raises(UnsupportedModel, match="q_proj has 384 inputs by"):
        scheme.matrix("a.q_proj", 3, 384)


@pytest.mark.parametrize("modules", [None, [], {"Q2_K": ["a"]}, {"Q8_0": [1]}])
def test_a_config_of_other_types_is_refused(modules: object) -> None:
    config = {"quantization_config": {"quant_method": "gguf", "modules": modules}}
    with pytest.raises(UnsupportedModel, match=r"quantization_config\.modules"):
        read_scheme(config)
