"""The formats of weights in few bits: of checkpoints, and of servers that quantise plain ones.

scheme   the protocol of a checkpoint's format
modules  which weights a checkpoint has in few bits, module by module
chosen   formats that a server chooses for a plain checkpoint
conversion  writes a plain checkpoint anew, in few bits
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference_svc.errors import UnsupportedModel
from inference_svc.model.quantised.scheme import Scheme

_KEYS = ("quantization_config", "compression_config")
_TEXT = "text_config"


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Returns the quantisation that config.json says; None: the checkpoint is plain."""
    for where in (config, config.get(_TEXT) or {}):
        if any(where.get(key) for key in _KEYS):
            raise UnsupportedModel("config.json: quantization_config is not supported")
    return None


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json without its quantisation: images of adapters do not depend on that, so
    that servers of one model share them whatever its weights are held in."""
    plain = {key: value for key, value in config.items() if key not in _KEYS}
    text = plain.get(_TEXT)
    if isinstance(text, Mapping):
        plain[_TEXT] = {key: value for key, value in text.items() if key not in _KEYS}
    return plain
