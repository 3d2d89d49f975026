"""Replaces the device where there is none: Triton's interpreter, over the CPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.gpu_run.context import Context
from inference_svc.backends.cuda.backend import CudaBackend
from inference_svc.backends.cuda.exchange import DeviceMeeting
from inference_svc.backends.cuda.factory import CudaFactory
from inference_svc.backends.exchange import LOCAL, gloo_group
from inference_svc.core import EngineConfig
from inference_svc.engine import build
from inference_svc.model.description import Decoder, Rank
from kernels import tuning
from kernels.dispatch import interpreted


class EmulatedMeeting(DeviceMeeting):
    """The meeting of ranks over a CPU's memory, which exchange by gloo."""

    name = "gloo, emulated"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def make_group(self, rank: Rank, store: Any) -> Any:
        return gloo_group(rank, store, self._num_stages * self._timeout_s, LOCAL)


class EmulatedFactory(CudaFactory):
    """Makes the backend of a CUDA device over a CPU's memory, without recorded graphs."""

    has_device_memory = False

    def supports(self, config: EngineConfig) -> bool:
        return True

    def speed_notes(self, config: EngineConfig, num_threads: int) -> list[str]:
        return []

    def device_memory(self, config: EngineConfig) -> None:
        return None


@contextmanager
def emulated() -> Iterator[None]:
    """Within the context, Triton's kernels run on the CPU, and engines use the device's backend.

    The interpreter runs one program after the other, so decode rows are cut into few segments. It
    does not compile, so there is no warm-up. Import Triton with TRITON_INTERPRET=1.
    """
    from tests.support.kernels.worker import teach_the_interpreter_ranges

    torch.set_num_threads(1)
    teach_the_interpreter_ranges()
    with ExitStack() as stack:
        stack.enter_context(interpreted())
        stack.enter_context(np.errstate(all="ignore"))
        stack.enter_context(tuning.overridden("decode", programs=2))
        stack.enter_context(tuning.overridden("delta_chunks", chunk=16))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_name", _name_device))
        stack.enter_context(mock.patch.object(build, "select_backend", _select))
        stack.enter_context(mock.patch.object(CudaBackend, "warm_up", _do_nothing))
        yield


def _select(config: EngineConfig, decoder: Decoder) -> EmulatedFactory:
    return EmulatedFactory()


def _do_nothing(backend: CudaBackend) -> None:
    """Replaces the warm-up."""


def _name_device(device: object = None) -> str:
    return "an emulated device"


@contextmanager
def on_device(context: Context) -> Iterator[None]:
    """Within the context, everything computes on `context.device`, with constants that this run has
    found, or else from the device's table."""
    with ExitStack() as stack:
        if context.is_emulated:
            stack.enter_context(emulated())
        else:
            tuning.use_device(torch.cuda.get_device_name())
        for kernel, constants in context.found.get("tune", {}).get("best", {}).items():
            stack.enter_context(tuning.overridden(kernel, **constants))
        yield
