"""What stands for the device where there is none: Triton's interpreter, over the CPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import torch

from bench.gpu_run.context import Context
from inference_svc.backends import cuda
from inference_svc.core import EngineConfig
from inference_svc.engine import build
from inference_svc.model.description import Decoder
from kernels import tuning
from kernels.dispatch import interpreted


class EmulatedFactory(cuda.CudaFactory):
    """Makes the backend of a CUDA device, with a CPU's memory. Nothing is recorded."""

    has_device_memory = False

    def supports(self, config: EngineConfig) -> bool:
        return True

    def device_memory(self, config: EngineConfig) -> None:
        return None


@contextmanager
def emulated() -> Iterator[None]:
    """While it lasts, Triton's kernels compute on the CPU, and engines are those of a device.

    The interpreter runs one program after the other, so that decode rows are cut into few, and
    nothing is warmed up: it compiles nothing. Triton must have been imported with
    TRITON_INTERPRET=1.
    """
    from tests.support.kernels.worker import teach_the_interpreter_ranges

    torch.set_num_threads(1)
    teach_the_interpreter_ranges()
    with ExitStack() as stack:
        stack.enter_context(interpreted())
        stack.enter_context(np.errstate(all="ignore"))
        stack.enter_context(tuning.overridden("decode", programs=2))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_name", _name_device))
        stack.enter_context(mock.patch.object(build, "select_backend", _select))
        stack.enter_context(mock.patch.object(cuda.CudaBackend, "warm_up", _do_nothing))
        yield


def _select(config: EngineConfig, decoder: Decoder) -> EmulatedFactory:
    return EmulatedFactory()


def _do_nothing(backend: cuda.CudaBackend) -> None:
    """In place of the warm-up."""


def _name_device(device: object = None) -> str:
    return "an emulated device"


@contextmanager
def on_device(context: Context) -> Iterator[None]:
    """While it lasts, everything computes on `context.device`, with the constants for it: those
    that this run has found, or those of the device's table."""
    with ExitStack() as stack:
        if context.is_emulated:
            stack.enter_context(emulated())
        else:
            tuning.use_device(torch.cuda.get_device_name())
        for kernel, constants in context.found.get("tune", {}).get("best", {}).items():
            stack.enter_context(tuning.overridden(kernel, **constants))
        yield
