"""The formats of weights in few bits: of checkpoints, and of servers that quantise plain ones.

scheme              the protocol of a checkpoint's format
modules             which weights a checkpoint has in few bits, module by module
chosen              formats that a server chooses for a plain checkpoint
conversion          writes a plain checkpoint anew, in few bits
bitsandbytes        NF4 and INT8
compressed_tensors  of llm-compressor: INT4, INT8 and FP8
gptq                4 and 8 bits
awq                 4 bits with zero points
float8              FP8 of DeepSeek, Qwen and FBGEMM
mxfp4               the experts of gpt-oss
gguf                types of blocks, by module, of a GGUF file
settings            reads the keys of a quantisation's config
names               the modules that a list of a config means
packing             unpacks codes, and checks scales and codes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.model.quantised.awq import Awq
from inference_svc.model.quantised.bitsandbytes import BitsAndBytes
from inference_svc.model.quantised.compressed_tensors import CompressedTensors
from inference_svc.model.quantised.float8 import FbgemmFloat8, Float8
from inference_svc.model.quantised.gguf import GgufScheme
from inference_svc.model.quantised.gptq import Gptq
from inference_svc.model.quantised.mxfp4 import Mxfp4
from inference_svc.model.quantised.scheme import Rows, Scheme, StoredMatrix, TensorSpec
from inference_svc.model.quantised.settings import NEXT_STEP, Settings, model_dtype

__all__ = ["Rows", "Scheme", "StoredMatrix", "TensorSpec", "plain_config", "read_scheme"]

_METHODS: Mapping[str, Callable[[Settings, str], Scheme]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": FbgemmFloat8,
    "fp8": Float8,
    "gguf": GgufScheme.read,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
    "sparseml": CompressedTensors,  # its name in the first versions
}
"""The reader of each `quant_method`: it gets the config, and the model's dtype."""
_KEYS = ("quantization_config", "compression_config")
_TEXT = "text_config"
_PLACES = (*((key,) for key in _KEYS), *((_TEXT, key) for key in _KEYS))


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Returns the quantisation that a config.json describes. None: weights are plain.

    Raises UnsupportedModel naming the key and value that are not honoured.
    """
    settings = _settings_of(config)
    if settings is None:
        return None
    method = settings.get("quant_method", _method_without_name(settings))
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise settings.refused("quant_method", f"supported are {', '.join(_METHODS)}")
    return reader(settings, model_dtype(config))


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json without its quantisation: images of adapters do not depend on that, so
    that servers of one model share them whatever its weights are held in."""
    plain = {key: value for key, value in config.items() if key not in _KEYS}
    text = plain.get(_TEXT)
    if isinstance(text, Mapping):
        plain[_TEXT] = {key: value for key, value in text.items() if key not in _KEYS}
    return plain


def _settings_of(config: Mapping[str, Any]) -> Settings | None:
    """Returns the one quantisation of a config.json. Raises UnsupportedModel for two that
    differ."""
    found: list[Settings] = []
    for place in _PLACES:
        part: Settings | None = Settings(config, "config.json")
        for key in place:
            part = part.part(key) if part is not None else None
        if part is not None and part.values:
            found.append(Settings(part.values, f"config.json: {'.'.join(place)}"))
    for other in found[1:]:
        if other.values != found[0].values:
            raise UnsupportedModel(f"{other.where} differs from {found[0].where}; {NEXT_STEP}")
    return _unwrapped(found[0]) if found else None


def _unwrapped(settings: Settings) -> Settings:
    """Returns compressed-tensors' config, which older versions of transformers wrapped."""
    inner = settings.part("quantization_config")
    if inner is None:
        return settings
    outer = {key: value for key, value in settings.values.items() if key != "quantization_config"}
    return Settings({**outer, **inner.values}, inner.where)


def _method_without_name(settings: Settings) -> str | None:
    """Returns the method of a config that was written before there was a key for it."""
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return "compressed-tensors" if settings.get("config_groups") else None
