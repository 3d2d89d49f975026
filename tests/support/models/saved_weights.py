"""Weights in few bits as libraries save them: cases that they saved, with the configs that they
wrote; packers, written from the formats' descriptions with Python's integers alone; and whole
models that these pack."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference_svc.model.quantised import Scheme, StoredMatrix, read_scheme
from kernels.quantised import Codes, QuantisedRows, WeightFormat, quantise
from kernels.quantised.quantise import nearest_codes

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
        configs = {case: json.loads(text) for case, text in sorted(file.metadata().items())}
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


SIZE = 8
"""The inputs of a group."""
Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of a module by the ends of their names, and the weight that they mean."""


def compressed(weights: Mapping[str, Any], form: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    names = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return {**names, "config_groups": {"group_0": group}}


def symmetric(weight: Tensor) -> QuantisedRows:
    return quantise(weight, WeightFormat(Codes.INT4, SIZE, scales="float16"))


def with_zeros(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns codes, scales, zero points, and the weight that they mean."""
    groups = weight.unflatten(1, (-1, SIZE))
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scales = ((high - low) / 14).half()
    zeros = (-low / scales).round().clamp(1, 15)
    codes = (groups / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, 15)
    values = (codes - zeros[:, :, None]) * scales.float()[:, :, None]
    return codes.flatten(1).long(), scales, zeros.long(), values.flatten(1)


def int4(weight: Tensor) -> Packed:
    rows = symmetric(weight)
    shape = torch.tensor(weight.shape)
    packed = {"weight_packed": by_row(rows.codes, 4), "weight_scale": rows.scales}
    return {**packed, "weight_shape": shape}, rows.dequantise()


def int4_with_zeros(weight: Tensor) -> Packed:
    codes, scales, zeros, values = with_zeros(weight)
    packed = {"weight_packed": by_row(codes, 4), "weight_scale": scales}
    return {**packed, "weight_zero_point": by_column(zeros, 4)}, values


def gptq(weight: Tensor) -> Packed:
    codes, scales, zeros, values = with_zeros(weight)
    tensors = {"qweight": by_column(codes.T, 4), "qzeros": by_row(zeros.T - 1, 4)}
    order = torch.arange(weight.shape[1]).int() // SIZE
    return {**tensors, "scales": scales.T.contiguous(), "g_idx": order}, values


def gptq_with_act_order(weight: Tensor) -> Packed:
    order = torch.randperm(weight.shape[1])
    tensors, values = gptq(weight[:, order])
    back = order.argsort()
    codes = by_column(with_zeros(weight[:, order])[0][:, back].T, 4)
    return {**tensors, "qweight": codes, "g_idx": tensors["g_idx"][back]}, values[:, back]


def awq(weight: Tensor) -> Packed:
    codes, scales, zeros, values = with_zeros(weight)
    tensors = {"qweight": as_awq(codes), "qzeros": as_awq(zeros)}
    return {**tensors, "scales": scales.T.contiguous()}, values


def nf4(weight: Tensor) -> Packed:
    rows = quantise(weight.reshape(-1, 64), WeightFormat(Codes.NF4, 64))
    pairs = rows.codes.view(-1, 2)
    facts = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [*weight.shape]}
    return {
        "weight": (pairs[:, :1] << 4) + pairs[:, 1:],
        "weight.absmax": rows.scales.view(-1),
        "weight.quant_map": Codes.NF4.table.clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(facts).encode()]).byte(),
    }, rows.dequantise().view_as(weight)


def int8(weight: Tensor) -> Packed:
    rows = quantise(weight, WeightFormat(Codes.INT8))
    tensors = {"weight": rows.codes.view(torch.int8), "weight_scale": rows.scales}
    return tensors, rows.dequantise()


def fp8_in_blocks(weight: Tensor) -> Packed:
    scales = torch.rand(-(-len(weight) // 32), -(-weight.shape[1] // 24)) * 1e-2
    spread = scales.repeat_interleave(32, 0)[: len(weight)]
    spread = spread.repeat_interleave(24, 1)[:, : weight.shape[1]]
    codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def fp8_of_one_scale(weight: Tensor) -> Packed:
    """Packs with a scale without dimensions, as some writers do."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def mxfp4(experts: Tensor) -> Packed:
    """Packs experts [experts, in, out]; a scale is the power of two at the largest magnitude."""
    weight = experts.transpose(1, 2)
    blocks = weight.reshape(-1, 32)
    exponents = blocks.abs().amax(dim=1).log2().floor() - 2
    form = WeightFormat(Codes.FP4, 32)
    codes = nearest_codes(blocks / exponents.exp2()[:, None], Codes.FP4)
    values = QuantisedRows(form, codes, exponents.exp2()[:, None]).dequantise()
    pairs = codes.view(-1, 2)
    shape = (*weight.shape[:2], weight.shape[2] // 32)
    tensors = {
        "_blocks": (pairs[:, 0] + (pairs[:, 1] << 4)).view(*shape, 16),
        "_scales": (exponents + 127).byte().view(shape),
    }
    return tensors, values.view(weight.shape).transpose(1, 2)


BITS = {"bits": 4, "group_size": SIZE}
GROUPS = {"num_bits": 4, "group_size": SIZE}
FORMATS: Mapping[str, tuple[Callable[[Tensor], Packed], dict[str, Any]]] = {
    "int4": (int4, compressed(GROUPS, "pack-quantized")),
    "int4 zeros": (int4_with_zeros, compressed({**GROUPS, "symmetric": False}, "pack-quantized")),
    "int8": (int8, compressed({"num_bits": 8, "strategy": "channel"}, "int-quantized")),
    "gptq": (gptq, {"quant_method": "gptq", "sym": False, "desc_act": False, **BITS}),
    "act-order": (
        gptq_with_act_order,
        {"quant_method": "gptq", "sym": False, "desc_act": True, **BITS},
    ),
    "awq": (awq, {"quant_method": "awq", "version": "gemm", **BITS}),
    "nf4": (
        nf4,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
    "fp8 tensor": (
        fp8_of_one_scale,
        {"quant_method": "fp8", "modules_to_not_convert": ["mlp.gate"]},
    ),
    "fp8": (fp8_in_blocks, {"quant_method": "fp8", "weight_block_size": [32, 24]}),
}


def pack(folder: Path, form: str) -> Path:
    """Packs the layers of a folder with a plain model in one of FORMATS. Returns a folder with the
    weights that they mean, in fp32."""
    packer, config = FORMATS[form]
    tensors = load_file(folder / "model.safetensors")
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj") if packer is mxfp4 else name.endswith("_proj.weight"):
            parts, values = packer(tensor)
            module = name.removesuffix("weight")
            packed |= {module + end: part.contiguous() for end, part in parts.items()}
            tensors[name] = values.contiguous()
        else:
            packed[name] = tensor
    assert len(packed) > len(tensors)
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    meant = folder.with_name(f"{folder.name} meant")
    meant.mkdir()
    shutil.copy(folder / "config.json", meant)
    save_file(tensors, meant / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    # The dtype of scales; plain tensors are in fp32 all the same.
    values |= {"quantization_config": config, "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(values))
    return meant
