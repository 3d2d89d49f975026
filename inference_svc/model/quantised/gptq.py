"""Checkpoints of GPTQ in 4 and 8 bits, `quant_method: gptq`, of both versions of its format.

Version 1 stores zero points less one. Libraries read a stored maximum in three ways (AutoGPTQ's
kernels as 16 or as 0, GPTQModel changes the next one), so it is refused. With act-order, inputs are
in groups in any order, and rows are made plain.

Source: gptqmodel 7.7, nn_modules/qlinear/__init__.py; auto_gptq 0.7, nn_modules/qlinear/.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.quantised.names import ModuleNames
from inference_svc.model.quantised.packing import (
    broken,
    finite_scales,
    groups_of,
    integer_rows,
    require_runs,
    unpack,
)
from inference_svc.model.quantised.scheme import Rows, StoredMatrix, TensorSpec
from inference_svc.model.quantised.settings import NEXT_STEP, Settings, words
from kernels.quantised import Codes, WeightFormat

_V1, _V2 = "gptq", "gptq_v2"
_KNOWN = words(
    "quant_method bits group_size sym desc_act static_groups checkpoint_format format lm_head",
    "modules_in_block_to_quantize dynamic pack_dtype",
    # How weights were quantised, and by which program.
    "damp_percent damp_auto_increment true_sequential act_group_aware mse meta tokenizer dataset",
    "model_name_or_path model_file_base_name model_seqlen block_name_to_quantize batch_size",
    "module_name_preceding_first_block pad_token_id cache_block_outputs hyb_act method",
    # How other programs compute.
    "disable_exllama max_input_length exllama_config backend parallel_packing offload_to_disk",
)
_WORD_BITS = 32


class Gptq:
    """A checkpoint of GPTQ, in which the linear modules of layers are quantised."""

    def __init__(self, settings: Settings, dtype: str) -> None:
        """Raises UnsupportedModel for a config that is not honoured."""
        # Kernels of other programs are chosen by keys such as "use_exllama".
        settings.require_known({*_KNOWN, *(each for each in settings.values if each[:4] == "use_")})
        self._num_bits = settings.one_of("bits", (4, 8))
        self._size = settings.group_size(128)
        self._is_symmetric = settings.flag("sym", True)
        key = "checkpoint_format" if settings.get("checkpoint_format") is not None else "format"
        self._is_v1 = settings.one_of(key, (_V1, _V2), _V1) == _V1
        settings.one_of("pack_dtype", ("int32", "torch.int32"), "int32")
        has_act_order = settings.flag("desc_act") and not settings.flag("static_groups")
        self._has_act_order = has_act_order and self._size > 0
        self._has_head = settings.flag("lm_head")
        self._excluded = _excluded(settings)
        self._parts = _parts_of_block(settings)

    @property
    def format(self) -> WeightFormat | None:
        """None for weights with act-order, which are not computed with in few bits."""
        if self._has_act_order:
            return None
        if self._is_symmetric:
            codes = Codes.INT4 if self._num_bits == 4 else Codes.INT8
            return WeightFormat(codes, self._size, scales="float16")
        # Only fp32 holds the products of scales and zero points exactly.
        codes = Codes.UINT4 if self._num_bits == 4 else Codes.INT8
        return WeightFormat(codes, self._size, has_offsets=True)

    @property
    def form(self) -> str:
        """See `Scheme`."""
        return f"int{self._num_bits}"

    @property
    def name(self) -> str:
        """See `Scheme`."""
        groups = f"groups of {self._size}" if self._size else "per output"
        order = ", act-order" if self._has_act_order else ""
        return f"gptq, {self._num_bits} bits, {groups}{order}"

    def matrix(
        self, module: str, out_features: int, in_features: int, num_experts: int = 0
    ) -> StoredMatrix | None:
        """See `Scheme`. Raises UnsupportedModel if inputs do not divide into words."""
        if num_experts or not self._is_quantised(module):
            return None
        per_word = _WORD_BITS // self._num_bits
        if in_features % per_word:
            raise UnsupportedModel(
                f"{module}: {in_features} inputs are no multiple of {per_word}; {NEXT_STEP}"
            )
        num_groups = -(-in_features // self._size) if self._size else 1
        form = self.format
        has_half_scales = form is not None and form.scales == "float16"
        dtypes = ("F16",) if has_half_scales else ("F16", "BF16")
        words_of_zeros = -(-out_features // per_word)
        return StoredMatrix(
            form,
            {
                "qweight": TensorSpec((in_features // per_word, out_features), ("I32",)),
                "qzeros": TensorSpec((num_groups, words_of_zeros), ("I32",)),
                "scales": TensorSpec((num_groups, out_features), dtypes),
                "g_idx": TensorSpec((in_features,), ("I32", "I64"), not self._has_act_order),
            },
            partial(self._decode, out_features, in_features),
        )

    def _decode(self, out_features: int, in_features: int, tensors: Mapping[str, Tensor]) -> Rows:
        form, order = self.format, tensors.get("g_idx")
        if form is not None:
            require_runs("g_idx", order, in_features, self._size)
        groups = groups_of("g_idx", order, in_features, self._size)
        scales = finite_scales(
            "scales", tensors["scales"].T, *(() if form is None else (form.scale_dtype,))
        )
        zeros = unpack(tensors["qzeros"], self._num_bits)[:, :out_features].T.int()
        if self._is_v1:
            most = (1 << self._num_bits) - 1
            if bool((zeros == most).any()):
                raise broken("qzeros", f"has {most}, of which libraries make different zero points")
            zeros += 1
        middle = 1 << self._num_bits - 1
        if self._is_symmetric and bool((zeros != middle).any()):
            raise broken("qzeros", f"has other zero points than {middle}, and sym is true")
        codes = unpack(tensors["qweight"].T, self._num_bits)
        has_zeros = not self._is_symmetric
        zero_points = zeros if has_zeros else None
        return integer_rows(form, codes, scales.contiguous(), zero_points, self._num_bits, groups)

    def _is_quantised(self, module: str) -> bool:
        """Returns whether a module has few bits: those in the blocks of layers that the config does
        not exclude, and the head if it says so."""
        if module in self._excluded:
            return False
        if not any(each.isdigit() for each in module.split(".")):
            return self._has_head and module.endswith("lm_head")
        return self._parts is None or any(module.endswith(f".{each}") for each in self._parts)


def _excluded(settings: Settings) -> ModuleNames:
    """Reads `dynamic`: patterns of modules that begin with "-:" exclude them. Raises
    UnsupportedModel for one that gives modules other bits."""
    dynamic = settings.part("dynamic")
    keys = [] if dynamic is None else list(dynamic.values)
    if any(not each.startswith("-:") for each in keys):
        raise settings.refused("dynamic", 'modules with other bits: supported is "-:" alone')
    where = f"{settings.where}.dynamic"
    return ModuleNames(where, (), [each[2:] for each in keys], are_parts=False)


def _parts_of_block(settings: Settings) -> tuple[str, ...] | None:
    """Returns the modules of a block that are quantised, None for all linear ones."""
    lists = settings.get("modules_in_block_to_quantize")
    if lists is None:
        return None
    flat: list[Any] = []
    for each in lists if isinstance(lists, list) else [None]:
        flat += each if isinstance(each, list) else [each]
    if not all(isinstance(name, str) for name in flat):
        raise settings.refused("modules_in_block_to_quantize", "must be lists of names")
    return tuple(dict.fromkeys(flat))
