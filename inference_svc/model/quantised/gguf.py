"""The quantisation of a GGUF file: a type of blocks for each module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.gguf.blocks import FORMATS, decode
from inference_svc.model.gguf.file import TYPES, ElementType
from inference_svc.model.quantised.scheme import Rows, StoredMatrix, TensorSpec
from inference_svc.model.quantised.settings import Settings

QUANT_METHOD = "gguf"
"""The name in config.json that `expand` writes."""
_END = "weight"
_TYPES: Mapping[str, ElementType] = {each.name: each for each in TYPES.values()}


@dataclass(frozen=True)
class GgufScheme:
    """The types of modules' weights, by their paths; others are plain.

    Rows of q and k are in the order of transformers' once they are read: `tensors.read` does that
    for plain weights and biases, too.
    """

    types: Mapping[str, str]

    @classmethod
    def read(cls, settings: Settings, dtype: str) -> GgufScheme:
        """Reads `quantization_config` as `to_config` makes it. Raises UnsupportedModel."""
        settings.require_known(("quant_method", "modules"))
        modules = settings.part("modules")
        if modules is None or not modules.values.keys() <= FORMATS.keys():
            raise settings.refused("modules", "must map types of blocks to modules")
        return cls({path: kind for kind in modules.values for path in modules.names(kind)})

    def to_config(self) -> dict[str, Any]:
        """Returns `quantization_config` of config.json."""
        modules: dict[str, list[str]] = {}
        for path, kind in self.types.items():
            modules.setdefault(kind, []).append(path)
        return {"quant_method": QUANT_METHOD, "modules": modules}

    @property
    def name(self) -> str:
        """The types, those of most modules first, such as "gguf, Q4_K and Q6_K"."""
        return f"{QUANT_METHOD}, {' and '.join(self._ordered)}"

    @property
    def form(self) -> str:
        """See `Scheme`."""
        return f"{QUANT_METHOD} {self._ordered[0].lower()}"

    @property
    def _ordered(self) -> list[str]:
        """The types, those of most modules first."""
        kinds = list(self.types.values())
        return sorted(set(kinds), key=lambda each: (-kinds.count(each), each))

    def matrix(
        self, module: str, out_features: int, in_features: int, num_experts: int = 0
    ) -> StoredMatrix | None:
        """Returns the form of a module's weight. None: the file has it plain.

        Raises UnsupportedModel where rows are not of whole blocks.
        """
        kind = self.types.get(module)
        if kind is None:
            return None
        stored = _TYPES[kind]
        if in_features % stored.block or num_experts:
            raise UnsupportedModel(
                f"{module} has {in_features} inputs by config.json, but {kind} blocks of "
                f"{stored.block}"
            )
        spec = TensorSpec((out_features, stored.bytes_of(in_features)), (kind,))
        return StoredMatrix(
            FORMATS[kind].format, {_END: spec}, partial(_rows, kind), is_by_rows=True
        )


def _rows(kind: str, tensors: Mapping[str, Tensor]) -> Rows:
    return decode(tensors[_END], kind)
