"""The metadata of a GGUF file's model: values by key, of which each has to be known."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.model.gguf.families import ARCHITECTURE
from inference_svc.model.gguf.file import Header

TOKENS = "tokenizer.ggml.tokens"
_HARMLESS: Mapping[str, Any] = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "leading_dense_block_count": 0,
    "pooling_type": 0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.finetuned": ...,
    "tensor_data_layout": "Meta AI original pth",
    "use_parallel_residual": False,
}
"""Keys of an architecture that change nothing with this value; `...`: with any."""


def short(value: float) -> float:
    """Returns the number with the fewest digits that is the same in single precision: files have
    9.999999747378752e-06 for 1e-05."""
    try:
        single = struct.pack("<f", value)
        texts = (f"{value:.{digits}g}" for digits in range(1, 10))
        return next(float(each) for each in texts if struct.pack("<f", float(each)) == single)
    except (OverflowError, StopIteration):
        return value


class Values:
    """The metadata of the model's architecture; it remembers the keys that were asked for. Every
    method raises UnsupportedModel for a value that has no meaning here."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._prefix = f"{header.metadata[ARCHITECTURE]}."
        self._known: set[str] = set()

    def get(self, name: str) -> Any:
        self._known.add(name)
        return self._header.metadata.get(self._prefix + name)

    def fail(self, name: str, reason: str) -> UnsupportedModel:
        return self._header.unsupported(self._prefix + name, reason)

    def fail_of(self, tensor: str, has: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._header.path}: the tensor {tensor} has {has}")

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a positive integer; of a list, with one for each layer, the one that all are."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise self.fail(name, "layers of different shapes are not supported")
            value = value[0]
        if type(value) is not int or value <= 0:
            raise self.fail(name, "must be a positive integer")
        return value

    def num_heads(self, *, is_of_keys: bool) -> int:
        """Returns the number of heads of queries, or of keys."""
        heads = self.count("attention.head_count")
        return self.count("attention.head_count_kv", heads) if is_of_keys else heads

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.fail(name, "must be a number above 0")
        return short(float(value))

    def require(self, name: str, expected: int) -> None:
        """Raises UnsupportedModel unless a key is left out, or has this value."""
        if self.get(name) is not None and self.count(name) != expected:
            raise self.fail(name, f"must be {expected} here")

    def check_tokens(self, most: int) -> None:
        """Raises UnsupportedModel if there are more tokens than that."""
        tokens = self._header.metadata.get(TOKENS)
        if isinstance(tokens, list) and len(tokens) > most:
            reason = f"{len(tokens)} tokens, but the embedding has {most} rows"
            raise self._header.unsupported(TOKENS, reason)

    def check_all_known(self) -> None:
        """Raises UnsupportedModel for keys of the architecture that nobody has asked for."""
        for key, value in self._header.metadata.items():
            name = key.removeprefix(self._prefix)
            if not key.startswith(self._prefix) or name in self._known:
                continue
            if name in _HARMLESS and _HARMLESS[name] in (..., value):
                continue
            reason = "not known, and it may change the maths; serve the model's safetensors"
            raise self.fail(name, reason)
