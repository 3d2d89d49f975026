"""The CUDA device's free memory, as seen by a process that ends at once; and who has the rest.

Run as a program, this file prints free and total bytes of as many devices as it reads from standard
input, a line each. A context of CUDA takes half a gigabyte of
the device, and as much of the host, for as long as its process lives; the process that serves calls
computes nothing there.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from typing import NamedTuple

logger = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"
TIMEOUT_S = 60.0
PROGRAMS_COMMAND = (
    "nvidia-smi",
    "--query-compute-apps=pid,process_name,used_gpu_memory",
    "--format=csv,noheader",
)
PROGRAMS_TIMEOUT_S = 10.0
"""A driver that hangs does not answer its tool either."""
MAX_PROGRAMS = 16
"""Listed in a message; the tool lists all."""
UNKNOWN_PROGRAMS = "`nvidia-smi` on the node lists them"


class CudaMemory(NamedTuple):
    free_bytes: int
    total_bytes: int


class CudaUnavailable(OSError):
    """The driver does not answer; the message has its error."""


def ask_memory(num_devices: int = 1) -> CudaMemory:
    """Returns the least memory of the first of the visible devices; the free memory is counted
    without a context's, as the engine will have one. Raises CudaUnavailable."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", __file__],
            input=str(num_devices),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise CudaUnavailable(f"the driver has not answered for {TIMEOUT_S:g} s") from None
    if done.returncode:
        reason = done.stderr.strip() or f"it ended with status {done.returncode}"
        raise CudaUnavailable(f"cannot read the size of the device's memory: {reason}")
    found = [CudaMemory(*map(int, line.split())) for line in done.stdout.splitlines()]
    return CudaMemory(
        min(each.free_bytes for each in found), min(each.total_bytes for each in found)
    )


def has_driver() -> bool:
    """Whether the driver's library is installed, with any answer."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def read_memory(index: int = 0) -> CudaMemory:
    """Asks the driver in this process about a visible device. Raises OSError without a driver,
    CudaUnavailable with the driver's error."""
    driver = ctypes.CDLL(LIBRARY)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free_bytes, total_bytes = ctypes.c_size_t(), ctypes.c_size_t()
    calls = (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(device), index),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
        ("cuCtxSetCurrent", context),
        ("cuMemGetInfo_v2", ctypes.byref(free_bytes), ctypes.byref(total_bytes)),
    )
    for name, *arguments in calls:
        if status := getattr(driver, name)(*arguments):
            raise CudaUnavailable(f"{name}: CUDA error {status}{_words(driver, status)}")
    return CudaMemory(free_bytes.value, total_bytes.value)


def _words(driver: ctypes.CDLL, status: int) -> str:
    """Returns the driver's own words for an error; "" if it has none."""
    text = ctypes.c_char_p()
    try:
        driver.cuGetErrorString(status, ctypes.byref(text))
    except AttributeError:
        return ""
    return f" ({text.value.decode(errors='replace')})" if text.value else ""


def describe_programs() -> str:
    """Returns a line for each program with its process id and memory; where the tool is missing or
    lists none, who can tell: a container does not see the programs of others. Blocks."""
    try:
        done = subprocess.run(
            PROGRAMS_COMMAND,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAMS_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.debug("the programs on the device are not listed", exc_info=error)
        return UNKNOWN_PROGRAMS
    rows = [line.split(",") for line in done.stdout.splitlines() if line.count(",") >= 2]
    if done.returncode or not rows:
        return UNKNOWN_PROGRAMS
    lines = [
        f"  process {row[0].strip()}: {row[-1].strip()}, {','.join(row[1:-1]).strip()}"
        for row in rows[:MAX_PROGRAMS]
    ]
    if len(rows) > MAX_PROGRAMS:
        lines.append(f"  and {len(rows) - MAX_PROGRAMS} more")
    return "programs on the device:\n" + "\n".join(lines)


if __name__ == "__main__":
    try:
        for number in range(int(sys.stdin.read())):
            print(*read_memory(number))
    except OSError as error:
        sys.exit(str(error))
