"""Chooses the backend that computes a model with given settings on this machine."""

from __future__ import annotations

from inference_svc.backends.base import BackendFactory
from inference_svc.backends.cuda import CudaFactory
from inference_svc.backends.native import NativeFactory
from inference_svc.backends.torch import TorchFactory
from inference_svc.core import EngineConfig

BACKENDS: tuple[BackendFactory, ...] = (CudaFactory(), NativeFactory(), TorchFactory())
"""In order of preference."""


def select_backend(config: EngineConfig) -> BackendFactory:
    """Returns the first backend that supports these settings. Raises ValueError if none does."""
    for factory in BACKENDS:
        if factory.supports(config):
            return factory
    raise ValueError(f"no backend computes on device {config.device}")
