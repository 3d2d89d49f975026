"""Element types of adapters' weights."""

from __future__ import annotations

import enum


class DataType(enum.Enum):
    """Element types; the value is the safetensors name. Adapters may be saved in all of them but
    INT32."""

    FLOAT32 = "F32"
    FLOAT16 = "F16"
    BFLOAT16 = "BF16"
    FLOAT8_E4M3 = "F8_E4M3"
    FLOAT8_E5M2 = "F8_E5M2"
    INT32 = "I32"

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self._value_]  # to hash a member takes longer

    @property
    def torch_name(self) -> str:
        """Returns the name of the type in torch, such as "bfloat16"."""
        return _TORCH_NAMES[self._value_]

    @property
    def is_computable(self) -> bool:
        """Whether models compute in it."""
        return self in (DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16)


FLOAT8 = DataType.FLOAT8_E4M3
"""The type of an adapter's A and B in images whose segments have scales."""
FLOAT8_FORMAT = 3
"""The first image format that has it. Formats 2 and 3 differ in nothing else."""

_ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I32": 4}
_TORCH_NAMES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I32": "int32",
}
