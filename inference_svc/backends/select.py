"""Chooses the backend that computes a model with given settings on this machine."""

from __future__ import annotations

from inference_svc.backends.base import BackendFactory
from inference_svc.backends.cuda.factory import CudaFactory
from inference_svc.backends.native.backend import NativeFactory
from inference_svc.backends.torch import TorchFactory
from inference_svc.core import EngineConfig
from inference_svc.errors import UnsupportedModel
from inference_svc.model.description import Decoder
from inference_svc.model.features import features

BACKENDS: tuple[BackendFactory, ...] = (CudaFactory(), NativeFactory(), TorchFactory())
"""In order of preference."""


def select_backend(config: EngineConfig, decoder: Decoder) -> BackendFactory:
    """Returns the first backend that supports these settings. Raises ValueError if none does, and
    UnsupportedModel if it does not compute all that the decoder has: a slower one in its place
    would be a surprise."""
    for factory in BACKENDS:
        if factory.supports(config):
            check_features(factory, decoder)
            return factory
    raise ValueError(f"no backend computes on device {config.device}")


def check_features(factory: BackendFactory, decoder: Decoder) -> None:
    """Raises UnsupportedModel that names the features of a decoder that a backend does not
    compute."""
    found, definition = features(decoder), BACKENDS[-1]
    missing = found - factory.features
    if not missing:
        return
    remedy = ""
    if factory is not definition and found <= definition.features:
        remedy = f"; {factory.disabled_by} has it computed by {definition.name}"
    raise UnsupportedModel(
        f"the {factory.name} backend does not compute {', '.join(sorted(missing))}, which "
        f"{decoder.architecture} has{remedy}"
    )
