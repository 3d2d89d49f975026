"""The device that computes: whether there is a GPU, its name and its properties.

All but `find_machine` is called in the engine's process only: asking torch about a GPU takes memory
of it.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch

from inference_svc.host.cpus import cpu_name, usable_cpus
from inference_svc.host.cuda_memory import CudaUnavailable, ask_memory, has_driver
from inference_svc.host.device_faults import start_failed
from inference_svc.host.memory import available_bytes, resident_bytes

if TYPE_CHECKING:
    from inference_svc.auto_settings import Machine
    from inference_svc.config import InferenceSettings

logger = logging.getLogger(__name__)

RECORDING_SETTING = "--cuda-graphs"
"""Switches the recording of steps on a device."""


def find_machine(settings: InferenceSettings) -> Machine:
    """Returns the facts that decide on settings that are left open. Raises EngineFailed, or
    CudaUnavailable for an unnamed fault, where the driver does not answer or has no device that was
    asked for."""
    try:
        return _find_machine(settings)
    except CudaUnavailable as error:
        failure = start_failed(error)
        raise error if failure is None else failure from error


def _find_machine(settings: InferenceSettings) -> Machine:
    from inference_svc.auto_settings import Machine  # an engine runs without pydantic, too

    if settings.device == "cpu":
        return Machine(has_cuda=False, host_free_bytes=available_bytes())
    if not torch.cuda.is_available():
        why = _why_no_device(settings.device)
        machine = Machine(has_cuda=False, host_free_bytes=available_bytes(), why_no_device=why)
        if settings.device == "auto":
            for note in machine.speed_notes:
                logger.warning("%s", note)
        return machine
    host_bytes = available_bytes()
    if settings.host_memory_limit is not None:
        host_bytes = max(0, settings.host_memory_limit - resident_bytes())
    num_ranks = settings.num_ranks // settings.nnodes
    num_devices = torch.cuda.device_count()
    memory = ask_memory(max(1, min(num_ranks, num_devices)))
    return Machine(True, *memory, host_bytes, num_devices=num_devices)


def _why_no_device(setting: str) -> str:
    """Asks the driver, where there is one, why torch finds no device: slow tokens should not be the
    only sign of a vanished device, or of a torch that cannot use it. Returns "" without a driver.
    Raises CudaUnavailable if the device was asked for and does not answer."""
    if not has_driver():
        return ""
    try:
        ask_memory()
    except CudaUnavailable as error:
        if setting == "cuda":
            raise
        return f"there is a driver, but {error} (--device cuda refuses to start then)"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install its build for CUDA"
    return (
        f"torch {torch.__version__} cannot use the device: its CUDA {torch.version.cuda} may need "
        "a newer driver"
    )


def device_of(device: str, local_rank: int) -> str:
    """Returns the device of a rank, by its number on its machine: of several CUDA devices that are
    visible it has the one with this number."""
    return f"{device}:{local_rank}" if device == "cuda" else device


def use_device(device: str) -> None:
    """Makes a device the current one of the calling thread."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)


@cache
def machine_name(device: str) -> str:
    """Returns a name such as "AMD EPYC 9B14, 2 processors" or "NVIDIA H200", by which measurements
    can be compared. Must be called first before threads are bound to processors."""
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_name()}, {usable_cpus()} processors"


def torch_versions() -> dict[str, str | None]:
    """Returns the versions of torch and of the CUDA that it was built for."""
    return {"version": torch.__version__, "cuda": torch.version.cuda}


def device_facts(device: str) -> dict[str, object]:
    """Returns the device's properties for the debug bundle."""
    facts: dict[str, object] = {
        "device": device,
        "machine": machine_name(device),
        "torch_threads": torch.get_num_threads(),
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        facts |= {
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "total_bytes": total_bytes,
            "free_bytes": free_bytes,
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
        }
    return facts
