"""Checkpoints of AutoAWQ, `quant_method: awq`, of its version "gemm": 4 bits with zero points.

Source: awq/modules/linear/gemm.py and awq/utils/packing_utils.py, AutoAWQ 0.2.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.quantised.names import kept_plain
from inference_svc.model.quantised.packing import finite_scales, groups_of, integer_rows, unpack
from inference_svc.model.quantised.scheme import Rows, StoredMatrix, TensorSpec
from inference_svc.model.quantised.settings import NEXT_STEP, Settings, words
from kernels.quantised import Codes, WeightFormat

_NUM_BITS = 4
_PER_WORD = 8
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word the code of each of its outputs is, from the lowest bits."""
_KNOWN = words(
    "quant_method bits group_size zero_point version format modules_to_not_convert",
    # How other programs compute, and defaults of GPTQ's config, which transformers writes too.
    "backend do_fuse fuse_max_seq_len modules_to_fuse exllama_config",
    "sym tokenizer dataset damp_percent act_group_aware true_sequential meta model_seqlen",
    "block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id",
    "max_input_length cache_block_outputs",
)


class Awq:
    """A checkpoint of AutoAWQ, with all but some linear modules in 4 bits."""

    form = "int4"

    def __init__(self, settings: Settings, dtype: str) -> None:
        """Raises UnsupportedModel for a config that is not honoured."""
        settings.require_known(_KNOWN)
        settings.one_of("bits", (_NUM_BITS,))
        settings.one_of("zero_point", (True,), True)
        key = "version" if settings.get("version") is not None else "format"
        settings.one_of(key, ("gemm", "GEMM"), "gemm")
        self._size = settings.group_size(128)
        # The library never quantises the head, whatever its list has.
        self._plain = kept_plain(settings, "modules_to_not_convert", adds=True)
        # Only fp32 holds the products of scales and zero points exactly.
        self._format = WeightFormat(Codes.UINT4, self._size, has_offsets=True)

    @property
    def name(self) -> str:
        """See `Scheme`."""
        return f"awq, 4 bits, {f'groups of {self._size}' if self._size else 'per output'}"

    def matrix(
        self, module: str, out_features: int, in_features: int, num_experts: int = 0
    ) -> StoredMatrix | None:
        """See `Scheme`. Raises UnsupportedModel if inputs do not divide into groups, or
        outputs into words."""
        if num_experts or module in self._plain:
            return None
        size = self._size or in_features
        if in_features % size or out_features % _PER_WORD:
            raise UnsupportedModel(
                f"{module}: {in_features} inputs and {out_features} outputs are no multiples of "
                f"group_size = {size} and {_PER_WORD}; {NEXT_STEP}"
            )
        num_groups, num_words = in_features // size, out_features // _PER_WORD
        return StoredMatrix(
            self._format,
            {
                "qweight": TensorSpec((in_features, num_words), ("I32",)),
                "qzeros": TensorSpec((num_groups, num_words), ("I32",)),
                "scales": TensorSpec((num_groups, out_features), ("F16", "BF16")),
            },
            partial(self._decode, in_features),
        )

    def _decode(self, in_features: int, tensors: Mapping[str, Tensor]) -> Rows:
        scales = finite_scales("scales", tensors["scales"].T).contiguous()
        codes, zeros = _by_output(tensors["qweight"]), _by_output(tensors["qzeros"])
        groups = groups_of("", None, in_features, self._size)
        return integer_rows(self._format, codes, scales, zeros, _NUM_BITS, groups)


def _by_output(packed: Tensor) -> Tensor:
    """Returns the codes of words [N, out / 8] as uint8 [out, N]."""
    codes = unpack(packed, _NUM_BITS).view(len(packed), -1, _PER_WORD)
    return codes[:, :, _PLACES].flatten(1).T.contiguous()
