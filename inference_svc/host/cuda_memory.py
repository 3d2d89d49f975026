"""What is free on the CUDA device, asked for by a process that ends at once.

Run as a program, this file prints free and total bytes. A context of CUDA takes half a gigabyte of
the device, and as much of the host, for as long as its process lives; the one that serves calls
computes nothing there.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import NamedTuple

LIBRARY = "libcuda.so.1"
TIMEOUT_S = 60.0


class CudaMemory(NamedTuple):
    free_bytes: int
    total_bytes: int


class CudaUnavailable(OSError):
    """The driver does not answer; the message has its error."""


def ask_memory() -> CudaMemory:
    """Returns the memory of the first device that is visible; of what is free, what a context takes
    is gone, as the engine will have one. Raises CudaUnavailable."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", __file__],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise CudaUnavailable(f"the driver has not answered for {TIMEOUT_S:g} s") from None
    if done.returncode:
        reason = done.stderr.strip() or f"it ended with status {done.returncode}"
        raise CudaUnavailable(f"the device's memory cannot be asked for: {reason}")
    free_bytes, total_bytes = done.stdout.split()
    return CudaMemory(int(free_bytes), int(total_bytes))


def read_memory() -> CudaMemory:
    """Asks the driver in this process. Raises OSError without a driver, CudaUnavailable with the
    driver's error."""
    driver = ctypes.CDLL(LIBRARY)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free_bytes, total_bytes = ctypes.c_size_t(), ctypes.c_size_t()
    calls = (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(device), 0),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
        ("cuCtxSetCurrent", context),
        ("cuMemGetInfo_v2", ctypes.byref(free_bytes), ctypes.byref(total_bytes)),
    )
    for name, *arguments in calls:
        if status := getattr(driver, name)(*arguments):
            raise CudaUnavailable(f"{name}: CUDA error {status}")
    return CudaMemory(free_bytes.value, total_bytes.value)


if __name__ == "__main__":
    try:
        print(*read_memory())
    except OSError as error:
        sys.exit(str(error))
