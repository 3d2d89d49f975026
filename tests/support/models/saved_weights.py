"""Weights in few bits as libraries save them: cases that they saved, with the configs that they
wrote; and packers, written from the formats' descriptions with Python's integers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from inference_svc.model.quantised import Scheme, StoredMatrix, read_scheme

FOLDER = Path(__file__).parents[2] / "inference_svc/model/quantised/libraries"
MODULE = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each four bits of a word of AutoAWQ, from the lowest."""


@cache
def library(name: str) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Returns the config and the tensors by end of each case of a file."""
    cases: dict[str, dict[str, Tensor]] = {}
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        configs = {case: json.loads(text) for case, text in file.metadata().items()}
        for key in file.keys():  # noqa: SIM118  (a file is no mapping)
            case, _, end = key.partition("/")
            cases.setdefault(case, {})[end] = file.get_tensor(key)
    return configs, cases


def scheme_of(config: Mapping[str, Any], dtype: str) -> Scheme:
    scheme = read_scheme({"quantization_config": config, "dtype": dtype})
    assert scheme is not None
    return scheme


def case_of(name: str, case: str) -> tuple[StoredMatrix, dict[str, Tensor], Tensor]:
    """Returns the matrix of a library's case, its tensors by end, and the library's own weight."""
    configs, cases = library(name)
    tensors = dict(cases[case])
    expected = tensors.pop("expected")
    *experts, out_features, in_features = expected.shape
    scheme = scheme_of(configs[case], case.rpartition(" ")[2])
    matrix = scheme.matrix(EXPERTS if experts else MODULE, out_features, in_features, *experts)
    assert matrix is not None
    return matrix, tensors, expected


CASES = [
    (path.stem, case)
    for path in sorted(FOLDER.glob("*.safetensors"))
    for case in library(path.stem)[0]
]
"""Every case, by library."""


def packed_words(codes: Sequence[int], num_bits: int) -> list[int]:
    """Returns the signed words of 32 bits of a stream of codes, each above the one before."""
    stream = sum(code << i * num_bits for i, code in enumerate(codes))
    count = -(-len(codes) * num_bits // 32)
    unsigned = [stream >> 32 * i & 0xFFFFFFFF for i in range(count)]
    return [each - (1 << 32) if each >> 31 else each for each in unsigned]


def by_row(codes: Tensor, num_bits: int) -> Tensor:
    """Packs each row of codes [N, M]: int32 [N, words]."""
    rows = [packed_words(row, num_bits) for row in codes.tolist()]
    return torch.tensor(rows, dtype=torch.int32)


def by_column(codes: Tensor, num_bits: int) -> Tensor:
    """Packs each column of codes [N, M]: int32 [words, M]."""
    return by_row(codes.T, num_bits).T.contiguous()


def as_awq(codes: Tensor) -> Tensor:
    """Packs codes [out, N] as AutoAWQ does: int32 [N, out / 8]."""
    columns = codes.T.tolist()
    rows = [
        [
            word
            for i in range(0, len(row), 8)
            for word in packed_words([row[i + j] for j in AWQ_ORDER], 4)
        ]
        for row in columns
    ]
    return torch.tensor(rows, dtype=torch.int32)
