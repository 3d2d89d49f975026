"""Faults of a device that computes: recognised by the words of CUDA, torch, Triton and the driver,
and reported to operators with a remedy.

The one place that knows these words. A fault is `fatal` when the process can use the device no
more: only memory that has run out leaves it as it was.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from inference_svc.errors import DeviceFault, DeviceFull, EngineFailed
from inference_svc.host.cuda_memory import CudaUnavailable, describe_programs

MAX_CHARS = 200
"""The longest part of an error's own words in a message; the log has all of them."""

_WORDS: tuple[tuple[DeviceFault, tuple[str, ...]], ...] = (
    (
        DeviceFault.HARDWARE,
        (
            "uncorrectable ecc error",
            "uncorrectable nvlink error",
            "hardware stack error",
            "hardware error",
        ),
    ),
    (
        DeviceFault.HUNG,
        ("the launch timed out and was terminated", "the driver has not answered"),
    ),
    (
        DeviceFault.BUSY,
        ("cuda-capable devices are busy", "is/are busy or unavailable"),
    ),
    (
        DeviceFault.DRIVER,
        (
            "driver version is insufficient",
            "driver on your system is too old",
            "unsupported display driver",
            "driver/library version mismatch",
            "forward compatibility was attempted",
            "system not yet initialized",
            "driver shutting down",
            "found no nvidia driver",
            "driver initialization failed",
            "driver not initialized",
            "initialization error",
            "os call failed",
            "cuda driver is a stub",
            "mps server",
            "mps client",
            "libcuda.so",
        ),
    ),
    (
        DeviceFault.LOST,
        (
            "gpu is lost",
            "device lost",
            "fallen off the bus",
            "no cuda-capable device",
            "no cuda gpus are available",
            "invalid device ordinal",
            "device not ready",
            "cuda unknown error",
            "cuda error: unknown error",
            "triton error [cuda]: unknown error",
        ),
    ),
    (
        DeviceFault.KERNEL,
        (
            "illegal memory access",
            "illegal address",
            "illegal instruction",
            "misaligned address",
            "invalid program counter",
            "invalid address space",
            "unspecified launch failure",
            "device-side assert",
            "cublas_status_execution_failed",
            "cublas_status_internal_error",
        ),
    ),
)
"""In this order: "CUDA driver initialization failed, you might not have a CUDA gpu" is one."""
_MEMORY = (
    "out of memory",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized when calling `cublascreate",
    "cudnn_status_alloc_failed",
)
_SPEAKERS = ("cuda", "cublas", "cudnn", "nvml", "nvidia", "triton error", "gpu", "driver")
"""Every error of a device names one of them, so that errors of other code are not taken for one."""
_PACKAGES = ("torch", "triton")
_CODE = re.compile(r"\bcuda error (\d+)\b")
_CODES = {
    2: DeviceFault.MEMORY,
    3: DeviceFault.DRIVER,
    4: DeviceFault.DRIVER,
    34: DeviceFault.DRIVER,
    46: DeviceFault.BUSY,
    100: DeviceFault.LOST,
    101: DeviceFault.LOST,
    214: DeviceFault.HARDWARE,
    220: DeviceFault.HARDWARE,
    304: DeviceFault.DRIVER,
    700: DeviceFault.KERNEL,
    702: DeviceFault.HUNG,
    719: DeviceFault.KERNEL,
    802: DeviceFault.DRIVER,
    803: DeviceFault.DRIVER,
    804: DeviceFault.DRIVER,
    805: DeviceFault.DRIVER,
    999: DeviceFault.LOST,
}
"""The driver's own numbers, where it has given no words."""

SENTENCES = {
    DeviceFault.MEMORY: "the device's memory is taken by others",
    DeviceFault.HARDWARE: "the device is damaged: its memory or a link has an uncorrectable error",
    DeviceFault.LOST: "the device has vanished: the driver does not find it, or cannot reach it",
    DeviceFault.DRIVER: "the device's driver cannot be used",
    DeviceFault.KERNEL: "a computation on the device failed, and the process cannot continue",
    DeviceFault.HUNG: "a computation on the device does not end",
    DeviceFault.BUSY: "another program uses the device exclusively",
}
_DRAIN = "drain the node (`kubectl drain`), read the kernel's log (`dmesg`, Xid lines)"
_RESET = "reset the device (`nvidia-smi -r`, with no program on it)"
REMEDIES = {
    DeviceFault.MEMORY: (
        "move the other programs elsewhere, or lower --kv-memory, --adapter-memory or memory-limit"
    ),
    DeviceFault.HARDWARE: (
        f"{_DRAIN}, {_RESET} or reboot; replace the device if the error comes back"
    ),
    DeviceFault.LOST: (
        f"{_DRAIN}, {_RESET}; reboot the node if `nvidia-smi` does not list the device then"
    ),
    DeviceFault.DRIVER: (
        "run `nvidia-smi` on the node and in the container: after an update of the driver reboot "
        "the node; with NVSwitch, see that the fabric manager runs"
    ),
    DeviceFault.KERNEL: (
        "a restart clears it; if it happens on one node alone, read the kernel's log (`dmesg`, Xid "
        f"lines) and {_RESET}; on several, report it with the log: it is a bug"
    ),
    DeviceFault.HUNG: (
        f"read the kernel's log (`dmesg`, Xid lines) and `nvidia-smi`; if it comes back, {_DRAIN}, "
        f"and {_RESET}"
    ),
    DeviceFault.BUSY: (
        "find the other program (`nvidia-smi`), or set the compute mode back to shared "
        "(`nvidia-smi -c 0`)"
    ),
}


class FoundFault(NamedTuple):
    """A fault, and the error's own words in one line."""

    kind: DeviceFault
    words: str

    @property
    def is_fatal(self) -> bool:
        """Whether this process can use the device no more."""
        return self.kind is not DeviceFault.MEMORY

    @property
    def sentence(self) -> str:
        """Describes the fault."""
        return f"{SENTENCES[self.kind]} ({self.words})"

    @property
    def remedy(self) -> str:
        return REMEDIES[self.kind]


def find_fault(error: BaseException) -> FoundFault | None:
    """Returns the device's fault that an error, or a cause of it, is about; None if it is about
    none."""
    seen = set[int]()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        if _may_tell(each):
            words = _first_line(str(each))  # torch's lines below name other faults
            kind = _kind_of(words.lower())
            if isinstance(each, torch.OutOfMemoryError):
                kind = DeviceFault.MEMORY
            if kind is not None:
                return FoundFault(kind, _shortened(words))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return None


def _may_tell(error: BaseException) -> bool:
    """Returns whether an error can be about a device: torch and Triton have types of their own,
    of which some are a mere Exception."""
    if isinstance(error, RuntimeError | CudaUnavailable):
        return True
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, Exception) and package in _PACKAGES


def _kind_of(text: str) -> DeviceFault | None:
    if not any(speaker in text for speaker in _SPEAKERS):
        return None
    for kind, words in _WORDS:
        if any(each in text for each in words):
            return kind
    if any(each in text for each in _MEMORY):
        return DeviceFault.MEMORY
    code = _CODE.search(text)
    return None if code is None else _CODES.get(int(code[1]))


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0].strip()


def _shortened(line: str) -> str:
    return line if len(line) <= MAX_CHARS else f"{line[:MAX_CHARS]}..."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory for something: others may have it, less may fit."""
    found = find_fault(error)
    return found is not None and not found.is_fatal


def engine_failed(error: BaseException, doing: str) -> EngineFailed:
    """Returns the error of an engine that has failed `doing` something; for a device's fault it
    names the fault, and the operators' remedy."""
    if isinstance(error, EngineFailed):
        return error
    found = find_fault(error)
    if found is None:
        return EngineFailed.because(f"{doing} failed")
    return EngineFailed.because(f"{doing} failed: {found.sentence}", found.kind, found.remedy)


def engine_hung(seconds: float) -> EngineFailed:
    """Returns the error that ends an engine without an answer for so long."""
    why = f"it has not answered for {seconds:g} s: a step hangs"
    return EngineFailed.because(why, DeviceFault.HUNG, REMEDIES[DeviceFault.HUNG])


def start_failed(error: BaseException) -> EngineFailed | None:
    """Returns the error of a start that a device's fault has failed; None for other errors."""
    found = find_fault(error)
    if found is None:
        return None
    message = f"the engine cannot start: {found.sentence}; {found.remedy}"
    return EngineFailed(message).with_fault(found.kind, found.remedy)


def device_failure(error: EngineFailed | DeviceFull) -> EngineFailed | None:
    """Returns the device's fault that a server ends with; None if it is none. Blocks: where others
    have the memory it asks who they are."""
    if isinstance(error, EngineFailed):
        return None if error.fault is None else error
    remedy = REMEDIES[DeviceFault.MEMORY]
    message = f"the engine cannot start: {error}\n{describe_programs()}\n{remedy}"
    return EngineFailed(message).with_fault(DeviceFault.MEMORY, remedy)


def fault_fields(failure: EngineFailed) -> dict[str, str]:
    """Returns a log line's fields about a failure."""
    return {} if failure.fault is None else {"fault": failure.fault.value}
