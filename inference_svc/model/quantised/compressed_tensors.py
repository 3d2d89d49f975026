"""Checkpoints of llm-compressor, `quant_method: compressed-tensors`.

pack-quantized    INT4 and INT8 of weights alone, in words of 32 bits
int-quantized     INT8, with plain inputs or with inputs in INT8
float-quantized   FP8 E4M3, with one scale for a tensor, an output, or a block
naive-quantized   as the two before, by the weights' type

FP8 inputs, static or dynamic, are not rounded: the product is with exact inputs, which is closer to
the model that was quantised. Inputs in INT8 are rounded, if each token has its own scale.

Source: compressed_tensors 0.20, quantization/quant_args.py and compressors/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.quantised.names import ModuleNames, names_or_patterns
from inference_svc.model.quantised.packing import (
    broken,
    finite_scales,
    float8_rows,
    groups_of,
    integer_rows,
    require_runs,
    unpack,
)
from inference_svc.model.quantised.scheme import Rows, StoredMatrix, TensorSpec
from inference_svc.model.quantised.settings import NEXT_STEP, Settings, words
from kernels.quantised import Activations, Codes, WeightFormat

PACKED, NAIVE = "pack-quantized", "naive-quantized"
_TYPES = {"int-quantized": ("int",), "float-quantized": ("float",), NAIVE: ("int", "float")}
_FORMATS = (PACKED, *_TYPES)
_MIXED = "mixed-precision"
_CONFIG_KEYS = words(
    "quant_method config_groups format ignore",
    # Notes of the library. A file's tensors are checked, so the status does not matter.
    "quantization_status global_compression_ratio version run_compressed dequantize",
)
_GROUP_KEYS = words("targets weights input_activations format")
_ARGS_KEYS = words(
    "num_bits type symmetric strategy group_size block_structure dynamic actorder",
    # How scales were chosen, and the dtypes of their tensors, which are checked.
    "observer observer_kwargs scale_dtype zp_dtype",
)
_SCALES = ("BF16", "F16", "F32")
_HALF_SCALES = ("BF16", "F16")
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class _Weights:
    """The quantisation of the weights of a group of modules.

    `size` is the inputs of a group or block, 0 for all. `is_ordered` is whether inputs are in
    groups by the order of activations. `scales` is the scales' dtype by torch's name.
    """

    num_bits: int
    is_float: bool
    is_packed: bool
    is_symmetric: bool
    strategy: str
    size: int
    block_rows: int
    is_ordered: bool
    activations: Activations
    scales: str

    @property
    def format(self) -> WeightFormat | None:
        """None for weights that are not computed with in few bits: grouped by the order of
        activations, or with zero points whose products with scales fp32 cannot hold."""
        if self.is_float:
            return WeightFormat(Codes.FP8, self.size)
        if self.is_ordered or (not self.is_symmetric and self.scales == "float32"):
            return None
        if self.num_bits == 8:
            codes = Codes.INT8
        else:
            codes = Codes.INT4 if self.is_symmetric else Codes.UINT4
        has_half_scales = self.is_symmetric and self.size > 0
        scales = self.scales if has_half_scales else "float32"
        return WeightFormat(codes, self.size, not self.is_symmetric, scales, self.activations)

    def num_groups(self, in_features: int) -> int:
        return -(-in_features // self.size) if self.size else 1

    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        num_groups = self.num_groups(in_features)
        rows = {"tensor": 1, "block": -(-out_features // self.block_rows)}
        shape = (rows.get(self.strategy, out_features), num_groups)
        if self.strategy == "tensor":
            shape_of_scales: tuple[int, ...] = (1,)
        else:
            shape_of_scales = shape
        is_asymmetric = not self.is_symmetric
        has_half = is_asymmetric and self.format is not None
        scales = TensorSpec(shape_of_scales, _HALF_SCALES if has_half else _SCALES)
        tensors = {
            "weight_scale": scales,
            "input_scale": TensorSpec((1,), _SCALES, is_optional=True),
            "input_zero_point": TensorSpec((1,), ("I8", "F8_E4M3"), is_optional=True),
        }
        if not self.is_packed:
            kind = ("F8_E4M3",) if self.is_float else ("I8",)
            zeros = TensorSpec(shape_of_scales, kind, is_optional=self.is_symmetric)
            weight = TensorSpec((out_features, in_features), kind)
            return {"weight": weight, "weight_zero_point": zeros, **tensors}
        packed = (out_features, _words(in_features, self.num_bits))
        tensors["weight_packed"] = TensorSpec(packed, ("I32",))
        tensors["weight_shape"] = TensorSpec((2,), ("I64", "I32"), is_optional=True)
        is_optional = not self.is_ordered
        tensors["weight_g_idx"] = TensorSpec((in_features,), ("I32", "I64"), is_optional)
        if is_asymmetric:
            packed_zeros = (_words(out_features, self.num_bits), num_groups)
            tensors["weight_zero_point"] = TensorSpec(packed_zeros, ("I32",))
        return tensors

    def decode(self, out_features: int, in_features: int, tensors: Mapping[str, Tensor]) -> Rows:
        form = self.format
        scales = finite_scales(
            "weight_scale",
            tensors["weight_scale"],
            torch.float32 if form is None else form.scale_dtype,
        )
        scales = self._by_output(scales, out_features)
        if self.is_float:
            assert form is not None
            self._require_no_zeros(tensors)
            return float8_rows(form, tensors["weight"], scales)
        if not self.is_packed:
            return self._int8_rows(tensors, scales, in_features)
        _require_shape(tensors.get("weight_shape"), (out_features, in_features))
        codes = unpack(tensors["weight_packed"], self.num_bits)[:, :in_features]
        zeros = None
        if not self.is_symmetric:
            columns = tensors["weight_zero_point"].T
            zeros = unpack(columns, self.num_bits)[:, :out_features].T
        groups = self._groups(tensors.get("weight_g_idx"), in_features)
        return integer_rows(form, codes, scales, zeros, self.num_bits, groups)

    def _by_output(self, scales: Tensor, out_features: int) -> Tensor:
        """Returns scales [out, groups]."""
        if self.strategy == "block":
            return scales.repeat_interleave(self.block_rows, dim=0)[:out_features]
        if self.strategy == "tensor":
            return scales.reshape(1, 1).expand(out_features, 1).contiguous()
        return scales

    def _int8_rows(self, tensors: Mapping[str, Tensor], scales: Tensor, in_features: int) -> Rows:
        codes = tensors["weight"].view(torch.uint8) ^ 128
        zeros = None
        if self.is_symmetric:
            self._require_no_zeros(tensors)
        else:
            zeros = self._by_output(tensors["weight_zero_point"].int() + 128, len(codes))
        groups = groups_of("", None, in_features, self.size)
        return integer_rows(self.format, codes, scales, zeros, self.num_bits, groups)

    def _require_no_zeros(self, tensors: Mapping[str, Tensor]) -> None:
        zeros = tensors.get("weight_zero_point")
        if zeros is not None and zeros.float().any():
            raise broken("weight_zero_point", "is not 0, but config.json says symmetric")

    def _groups(self, order: Tensor | None, in_features: int) -> Tensor:
        """Returns each input's group. Before actorder was removed, a module without it could have
        -1 for each."""
        end = "weight_g_idx"
        if order is not None and bool((order == -1).all()) and not self.is_ordered:
            order = None
        groups = groups_of(end, order, in_features, self.size)
        if not self.is_ordered:
            require_runs(end, order, in_features, self.size)
        elif bool((torch.bincount(groups) != self.size).any()):
            # The library sorts inputs by group, and then takes runs of the group's size.
            raise broken(end, f"has groups of other sizes than {self.size}")
        return groups


@dataclass(frozen=True, slots=True)
class _Group:
    """Modules that are quantised in one way. `is_linear`: all linear ones."""

    targets: ModuleNames
    is_linear: bool
    weights: _Weights


class CompressedTensors:
    """A checkpoint in which each group of modules is quantised in its own way."""

    def __init__(self, settings: Settings, dtype: str) -> None:
        """Raises UnsupportedModel for a config that is not honoured."""
        reason = "only weights and inputs of products are quantised here"
        settings.require_empty("kv_cache_scheme", reason)
        settings.require_empty("moe_sparsity_config", "sparse experts are not supported")
        _require_no_sparsity(settings.part("sparsity_config"))
        _require_no_transforms(settings.part("transform_config"))
        settings.require_known(
            {*_CONFIG_KEYS, "kv_cache_scheme", "sparsity_config", "transform_config"}
        )
        groups = settings.part("config_groups")
        if groups is None or not groups.values:
            raise settings.refused("config_groups", "must name how modules are quantised")
        self._ignored = names_or_patterns(settings, "ignore")
        form = settings.one_of("format", (*_FORMATS, _MIXED))
        self._groups = [_group(groups, key, form, dtype) for key in groups.values]

    @property
    def form(self) -> str:
        """See `Scheme`."""
        forms = {
            "fp8" if each.weights.is_float else f"int{each.weights.num_bits}"
            for each in self._groups
        }
        return " ".join(sorted(forms))

    @property
    def name(self) -> str:
        forms = dict.fromkeys(
            f"{each.weights.num_bits} bits in groups by activations"
            if each.weights.is_ordered
            else str(each.weights.format or f"{each.weights.num_bits} bits with zero points")
            for each in self._groups
        )
        return f"compressed-tensors, {' and '.join(forms)}"

    def matrix(
        self, module: str, out_features: int, in_features: int, num_experts: int = 0
    ) -> StoredMatrix | None:
        """See `Scheme`. Raises UnsupportedModel if inputs do not divide into groups."""
        group = None if module in self._ignored else self._group_of(module)
        if group is None or num_experts:
            return None
        weights = group.weights
        if weights.strategy == "group" and in_features % weights.size:
            raise UnsupportedModel(
                f"{module}: {in_features} inputs are no multiple of group_size = {weights.size}; "
                f"{NEXT_STEP}"
            )
        return StoredMatrix(
            weights.format,
            weights.tensors(out_features, in_features),
            partial(weights.decode, out_features, in_features),
        )

    def _group_of(self, module: str) -> _Group | None:
        """Returns the group of a module: the one that names it, else the one whose pattern matches,
        else the one of all linear modules."""
        named = (each for each in self._groups if each.targets.is_named(module))
        matched = (each for each in self._groups if each.targets.is_matched(module))
        linear = (each for each in self._groups if each.is_linear)
        return next(named, None) or next(matched, None) or next(linear, None)


def _group(groups: Settings, key: str, form: str, dtype: str) -> _Group:
    """Reads an entry of `config_groups`. Raises UnsupportedModel."""
    group = groups.part(key) if isinstance(groups.values[key], Mapping) else None
    if group is None:
        raise groups.refused(key, "must be an object with targets and weights")
    group.require_empty("output_activations", "quantised outputs are not supported")
    group.require_known(_GROUP_KEYS)
    form = group.one_of("format", _FORMATS, None if form == _MIXED else form)
    targets = group.names("targets")
    classes = [each for each in targets if each[:1].isupper() and each != "Linear"]
    if classes or not targets:
        reason = 'supported are "Linear", paths of modules, and patterns that begin with "re:"'
        raise group.refused("targets", reason)
    args = group.part("weights")
    if args is None:
        raise group.refused("weights", "a group must quantise weights")
    weights = _weights(args, form, _activations(group.part("input_activations"), args, form), dtype)
    return _Group(names_or_patterns(group, "targets"), "Linear" in targets, weights)


def _weights(args: Settings, form: str, activations: Activations, dtype: str) -> _Weights:
    """Reads the `weights` of a group. Raises UnsupportedModel."""
    args.require_known(_ARGS_KEYS)
    is_packed = form == PACKED
    kind = args.one_of("type", ("int",) if is_packed else _TYPES[form], "int")
    num_bits = args.one_of("num_bits", (4, 8) if is_packed else (8,), 8)
    if args.get("dynamic") not in (None, False):
        raise args.refused("dynamic", "weights must have scales in the checkpoint")
    is_symmetric = args.flag("symmetric", True)
    if kind == "float" and not is_symmetric:
        raise args.refused("symmetric", "FP8 has no zero points")
    strategy, size = _strategy(args)
    supported = (
        ("tensor", "channel", "block") if kind == "float" else ("tensor", "channel", "group")
    )
    if strategy not in supported:
        raise args.refused("strategy", f"supported with {kind} are {', '.join(supported)}")
    if is_packed and strategy == "tensor" and not is_symmetric:
        raise args.refused("symmetric", "one zero point for a tensor is not supported")
    order = args.one_of("actorder", (False, True, "weight", "static", "group", "dynamic"), False)
    is_ordered = order in (True, "group", "dynamic")
    if is_ordered and (not is_packed or strategy != "group"):
        raise args.refused("actorder", f"supported with {PACKED} in groups")
    block_rows, columns = _block(args) if strategy == "block" else (1, size)
    return _Weights(
        num_bits=num_bits,
        is_float=kind == "float",
        is_packed=is_packed,
        is_symmetric=is_symmetric,
        strategy=strategy,
        size=columns,
        block_rows=block_rows,
        is_ordered=is_ordered,
        activations=activations,
        scales=dtype,
    )


def _strategy(args: Settings) -> tuple[str, int]:
    """Returns the strategy, by default the one that the size of groups means, and that size."""
    size = 0 if args.get("group_size") is None else args.group_size()
    default = "group" if size else "channel" if args.get("group_size") == -1 else "tensor"
    strategy = args.get("strategy", default)
    if strategy == "group" and not size:
        raise args.refused("group_size", "groups must have a size")
    if strategy != "group" and size:
        raise args.refused("group_size", f"strategy is {strategy!r}")
    return str(strategy), size


def _block(args: Settings) -> tuple[int, int]:
    """Returns the outputs and inputs of a block."""
    sizes = args.get("block_structure")
    if isinstance(sizes, str) and re.fullmatch(r"\d{1,5}x\d{1,5}", sizes):
        sizes = [int(each) for each in sizes.split("x")]  # as the first versions wrote it
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if not is_pair or any(type(each) is not int or not 8 <= each <= 65536 for each in sizes):
        raise args.refused("block_structure", "must be two sizes, such as [128, 128]")
    return sizes[0], sizes[1]


def _activations(args: Settings | None, weights: Settings, form: str) -> Activations:
    """Reads `input_activations`, which a group need not have. Raises UnsupportedModel."""
    if args is None:
        return Activations.EXACT
    args.require_known(_ARGS_KEYS)
    args.one_of("num_bits", (8,), 8)
    if args.one_of("type", ("int", "float"), "int") == "float":
        return Activations.EXACT
    if form == PACKED or weights.get("type", "int") != "int":
        raise args.refused("type", "inputs in INT8 are supported with weights of int-quantized")
    if weights.get("symmetric", True) is not True or _strategy(weights)[0] == "group":
        raise args.refused("type", "inputs in INT8 need symmetric weights, a scale per output")
    if args.get("dynamic") is not True:
        raise args.refused("dynamic", "inputs in INT8 must get their scale from each token")
    args.one_of("strategy", ("token",))
    if not args.flag("symmetric", True):
        raise args.refused("symmetric", "inputs in INT8 must be symmetric")
    return Activations.INT8


def _require_no_sparsity(settings: Settings | None) -> None:
    if settings is not None and settings.get("format", "dense") != "dense":
        raise settings.refused("format", "sparse weights are not supported")


def _require_no_transforms(settings: Settings | None) -> None:
    if settings is not None:
        settings.require_empty("config_groups", "rotated weights are not supported")


def _require_shape(shape: Tensor | None, expected: tuple[int, int]) -> None:
    if shape is not None and tuple(shape.tolist()) != expected:
        raise broken("weight_shape", f"is {shape.tolist()}, must be {list(expected)}")


def _words(num_codes: int, num_bits: int) -> int:
    return -(-num_codes * num_bits // _WORD_BITS)
