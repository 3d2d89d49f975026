"""Makes the files of this folder: `python -m tests.inference_svc.model.quantised.libraries.make`.

Each file has weights that one library quantised and saved, by case and end of the name, and as
`expected` the weight that the same library dequantises. The config that the library writes is in
the file's metadata, by case. The libraries are no dependencies of the tests; these made the files:

    compressed-tensors 0.20.1 (with loguru), bitsandbytes 0.50.2, autoawq 0.2.9, auto-gptq 0.7.1,
    transformers 5

Neither autoawq nor auto-gptq runs with this transformers: only their modules for layers are used,
from a folder in PYTHONPATH with their unpacked files.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Case = tuple[dict[str, Any], dict[str, Tensor], Tensor]
"""The quantisation's config, the tensors by end, and the dequantised weight."""
FOLDER = Path(__file__).parent
OF_TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}
"""Inputs that are rounded with a scale for each token."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def weight(out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """Returns a weight with outputs of different sizes, and one of zeros."""
    generator = torch.Generator().manual_seed(out_features * in_features)
    made = torch.randn(out_features, in_features, generator=generator)
    made *= torch.logspace(-4, 0, out_features)[:, None]
    made[3] = 0
    return made.to(dtype)


def compressed_tensors() -> dict[str, Case]:
    """Makes cases with its own compressors, and scales from minima and maxima."""
    return {**_packed_cases(), **_int8_cases(), **_fp8_cases()}


def _packed_cases() -> dict[str, Case]:
    packed = "pack-quantized"
    cases: dict[str, Case] = {}
    for bits in (4, 8):
        for size in (32, 64, 128, -1):
            for is_symmetric in (True, False):
                kind = "channel" if size == -1 else "group"
                args: dict[str, Any] = {"num_bits": bits, "symmetric": is_symmetric}
                args |= {"strategy": kind} if size == -1 else {"strategy": kind, "group_size": size}
                dtype = "float16" if size == 64 else "bfloat16"
                key = f"int{bits} {kind} {size} {'symmetric' if is_symmetric else 'zeros'} {dtype}"
                cases[key] = _compressed(packed, dtype, (12, 256), **args)
    odd = {"num_bits": 4, "strategy": "channel"}
    cases["int4 channel odd bfloat16"] = _compressed(packed, "bfloat16", (5, 37), **odd)
    zeros = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
    cases["int4 group 32 zeros float32"] = _compressed(packed, "float32", (12, 64), **zeros)
    one = {"num_bits": 4, "strategy": "tensor"}
    cases["int4 tensor bfloat16"] = _compressed(packed, "bfloat16", (12, 64), **one)
    return cases


def _int8_cases() -> dict[str, Case]:
    form, dtype, shape = "int-quantized", "bfloat16", (12, 70)
    cases: dict[str, Case] = {}
    for kind in ("tensor", "channel"):
        int8 = {"num_bits": 8, "strategy": kind}
        cases[f"int8 plain inputs {kind} {dtype}"] = _compressed(form, dtype, shape, **int8)
        name = f"int8 int8 inputs {kind} {dtype}"
        cases[name] = _compressed(form, dtype, shape, inputs=OF_TOKENS, **int8)
    asymmetric = {"num_bits": 8, "strategy": "channel", "symmetric": False}
    cases[f"int8 zeros channel {dtype}"] = _compressed(form, dtype, shape, **asymmetric)
    return cases


def _fp8_cases() -> dict[str, Case]:
    form, dtype = "float-quantized", "bfloat16"
    static = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    of_tokens = {**OF_TOKENS, "type": "float"}
    cases: dict[str, Case] = {}
    for kind, inputs in (("tensor", static), ("channel", of_tokens)):
        fp8 = {"num_bits": 8, "type": "float", "strategy": kind}
        cases[f"fp8 {kind} {dtype}"] = _compressed(form, dtype, (12, 70), inputs=inputs, **fp8)
    blocks = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    by_group = {**of_tokens, "strategy": "group", "group_size": 128}
    cases[f"fp8 block {dtype}"] = _compressed(form, dtype, (130, 136), inputs=by_group, **blocks)
    channel = {"num_bits": 8, "type": "float", "strategy": "channel"}
    cases["fp8 naive channel float32"] = _compressed(
        "naive-quantized", "float32", (8, 16), **channel
    )
    return cases


def _compressed(
    form: str, dtype: str, shape: tuple[int, int], inputs: Any = None, **args: Any
) -> Case:
    """Makes a case of a format, with weights [out, in] and `args` of QuantizationArgs."""
    from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=weights,
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
    )
    plain = weight(*shape, DTYPES[dtype])
    scale, zero = calculate_qparams(*_extremes(plain, weights), weights)
    is_packed = form == "pack-quantized"
    library = PackedQuantizationCompressor if is_packed else NaiveQuantizationCompressor
    state = {"weight": plain, "weight_scale": scale, "weight_zero_point": zero}
    stored = library.compress(state, scheme)
    expected = library.decompress(dict(stored), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.1",
    }
    return config, stored, expected


def _extremes(plain: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
    """Returns the minima and maxima of a weight's groups, as the arguments' strategy has them."""
    num_out, num_in = plain.shape
    if weights.strategy == "tensor":
        return plain.min().reshape(1), plain.max().reshape(1)
    if weights.strategy == "block":
        rows, columns = weights.block_structure
        padded = torch.nn.functional.pad(plain, (0, -num_in % columns, 0, -num_out % rows))
        blocks = padded.view(-(-num_out // rows), rows, -1, columns)
        return blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    groups = plain.view(num_out, -1, weights.group_size or num_in)
    return groups.amin(dim=2), groups.amax(dim=2)


def bitsandbytes() -> dict[str, Case]:
    """Makes cases with its functions for linear layers."""
    import bitsandbytes.functional as library
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute as definition

    def nf4(shape: tuple[int, int], dtype: str, block: int = 64, is_nested: bool = False) -> Case:
        packed, state = library.quantize_4bit(
            weight(*shape, DTYPES[dtype]),
            blocksize=block,
            quant_type="nf4",
            compress_statistics=is_nested,
        )
        stored = {f"weight.{end}": part for end, part in state.as_dict(packed=True).items()}
        config = {
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": is_nested,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": ["lm_head"],
            "llm_int8_threshold": 6.0,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "quant_method": "bitsandbytes",
        }
        expected = library.dequantize_4bit(packed, state)
        if shape[1] % block:
            # The CPU's kernel begins a block with each row; quantising and the definition do not.
            scales = state.absmax
            if is_nested:
                scales = library.dequantize_blockwise(scales, state.state2) + state.offset
            sizes = {"blocksize": block, "shape": shape, "dtype": DTYPES[dtype]}
            expected = definition(packed.reshape(-1), scales, state.code, **sizes)
        return config, {"weight": packed, **stored}, expected

    cases = {}
    for is_nested in (False, True):
        kind = "nested" if is_nested else "single"
        for dtype in DTYPES:
            cases[f"nf4 {kind} {dtype}"] = nf4((12, 192), dtype, is_nested=is_nested)
        key = f"nf4 {kind} blocks of 128 float32"
        cases[key] = nf4((6, 192), "float32", block=128, is_nested=is_nested)
        cases[f"nf4 {kind} in 72 float32"] = nf4((5, 72), "float32", is_nested=is_nested)
    cases["nf4 nested many float32"] = nf4((300, 64), "float32", is_nested=True)
    plain = weight(12, 70, torch.float16)
    codes, scales, _ = library.int8_vectorwise_quant(plain)
    int8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    stored = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    expected = library.int8_vectorwise_dequant(codes, scales)
    cases["int8 float16"] = int8, stored, expected
    return cases


def _module(package: str, name: str, folder: str) -> Any:
    """Imports a module of a package without what the packages above it import."""
    parts = name.split(".")
    for count in range(len(parts)):
        above = ".".join((package, *parts[:count]))
        bare = types.ModuleType(above)
        bare.__path__ = [f"{folder}/{above.replace('.', '/')}"]
        sys.modules[above] = bare
    return importlib.import_module(f"{package}.{name}")


def _folder(package: str) -> str:
    paths = (Path(each) for each in sys.path)
    return str(next(each for each in paths if (each / package).is_dir()))


def _scales(plain: Tensor, size: int, num_bits: int, is_symmetric: bool) -> tuple[Tensor, Tensor]:
    """Returns scales and zero points [out, groups] as GPTQ and AWQ choose them."""
    groups = plain.view(len(plain), -1, size).float()
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    if is_symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / (2**num_bits - 1)).clamp(min=1e-5).half().float()
    middle = torch.full_like(scales, 2 ** (num_bits - 1))
    # A zero point of 0 cannot be stored by the first version of GPTQ's format.
    return scales, middle if is_symmetric else (-low / scales).round().clamp(1, 2**num_bits - 1)


def autogptq() -> dict[str, Case]:
    """Makes cases with its linear layer, whose product with the identity is the weight."""
    library = _module("auto_gptq", "nn_modules.qlinear.qlinear_cuda", _folder("auto_gptq"))

    def made(num_bits: int, size: int, is_symmetric: bool, has_order: bool) -> Case:
        shape = (32, 256)
        linear = torch.nn.Linear(shape[1], shape[0], bias=False)
        linear.weight.data = weight(*shape, torch.float32)
        width = shape[1] if size == -1 else size
        scales, zeros = _scales(linear.weight.data, width, num_bits, is_symmetric)
        order = torch.arange(shape[1]) // width
        if has_order:
            order = order[torch.randperm(shape[1], generator=torch.Generator().manual_seed(1))]
        layer = library.QuantLinear(num_bits, size, shape[1], shape[0], False)
        layer.pack(linear, scales, zeros, order.int())
        layer.scales = layer.scales.half()
        expected = layer(torch.eye(shape[1]).half()).T
        config = {
            "bits": num_bits,
            "group_size": size,
            "damp_percent": 0.01,
            "desc_act": has_order,
            "static_groups": False,
            "sym": is_symmetric,
            "true_sequential": True,
            "model_name_or_path": None,
            "model_file_base_name": "model",
            "is_marlin_format": False,
            "quant_method": "gptq",
        }
        return config, dict(layer.state_dict()), expected

    cases = {}
    for num_bits in (4, 8):
        for size in (32, 128, -1):
            for is_symmetric in (True, False):
                key = f"{num_bits} bits {size} {'symmetric' if is_symmetric else 'zeros'} float16"
                cases[key] = made(num_bits, size, is_symmetric, False)
        cases[f"{num_bits} bits 64 act-order float16"] = made(num_bits, 64, False, True)
    return cases


def autoawq() -> dict[str, Case]:
    """Makes cases with its linear layer, and its function for dequantising."""
    folder = _folder("awq")
    packing = _module("awq", "utils.packing_utils", folder)
    library = _module("awq", "modules.linear.gemm", folder)

    def made(size: int) -> Case:
        shape = (32, 256)
        linear = torch.nn.Linear(shape[1], shape[0], bias=False)
        linear.weight.data = weight(*shape, torch.float32)
        width = shape[1] if size == -1 else size
        scales, zeros = _scales(linear.weight.data, width, 4, False)
        parts = {"scales": scales.T.contiguous(), "zeros": zeros.T.contiguous()}
        layer = library.WQLinear_GEMM.from_linear(linear, 4, width, **parts)
        state = dict(layer.state_dict())
        codes, zero_points = state["qweight"], state["qzeros"]
        expected = packing.dequantize_gemm(codes, zero_points, state["scales"], 4, width).T
        config = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
            "backend": "autoawq",
            "do_fuse": False,
        }
        return config, state, expected

    return {f"groups of {size} float16": made(size) for size in (32, 64, 128, -1)}


def transformers() -> dict[str, Case]:
    """Makes cases with the conversions that load FP8 and MXFP4 as plain weights."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = weight(20, 136, torch.float32).to(torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(7)
    cases: dict[str, Case] = {}
    for name, dtype in DTYPES.items():
        scales = torch.rand(1, 17, generator=generator).to(dtype) * 1e-2
        config = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [20, 8],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
        }
        expected = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
        cases[f"fp8 {name}"] = (
            config,
            {"weight": codes.clone(), "weight_scale_inv": scales},
            expected,
        )
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator).byte()
    exponents = torch.randint(0, 253, (3, 10, 4), generator=generator).byte()
    exponents[0, 0] = torch.tensor([0, 1, 252, 127])
    expected = convert_moe_packed_tensors(blocks, exponents, dtype=torch.bfloat16).transpose(1, 2)
    config = {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    }
    cases["mxfp4 bfloat16"] = config, {"_blocks": blocks, "_scales": exponents}, expected
    return cases


LIBRARIES: Mapping[str, Callable[[], dict[str, Case]]] = {
    "compressed_tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
    "autogptq": autogptq,
    "autoawq": autoawq,
    "transformers": transformers,
}


def main(names: list[str]) -> None:
    for name in names or LIBRARIES:
        cases = LIBRARIES[name]()
        tensors = {}
        for case, (_, stored, expected) in cases.items():
            for end, tensor in {**stored, "expected": expected}.items():
                tensors[f"{case}/{end}"] = tensor.contiguous()
        configs = {case: json.dumps(config) for case, (config, _, _) in cases.items()}
        path = FOLDER / f"{name}.safetensors"
        save_file(tensors, path, metadata=configs)
        path.chmod(0o644)


if __name__ == "__main__":
    main(sys.argv[1:])
