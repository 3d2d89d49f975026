"""Locks the memory of images, so that the system never swaps it out."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from servicekit.errors import FailedPrecondition

logger = logging.getLogger(__name__)

LockMode = Literal["auto", "on", "off"]

_ON_FAULT = 1
"""Linux's MLOCK_ONFAULT: each page is locked once it is there. Locking itself faults none in."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIMIT = resource.RLIMIT_MEMLOCK


@dataclass(frozen=True, slots=True)
class LockStatus:
    """Whether the memory of images is to be locked, whether it is, and why not."""

    is_wanted: bool
    is_locked: bool
    reason: str


NOT_LOCKED = LockStatus(False, False, "")


class MemoryLock:
    """Locks memory, up to `num_bytes`, if `mode` and the system's limit allow it. `reason` is why
    it does not, "" if it does. Thread-safe.

    Raises FailedPrecondition if the mode is "on", and the limit is too low.
    """

    def __init__(self, mode: LockMode, num_bytes: int = 0) -> None:
        self.mode = mode
        self.reason = "--lock-images off" if mode == "off" else _refusal(num_bytes)
        if mode == "on" and self.reason:
            raise FailedPrecondition(f"--lock-images on: {self.reason}", subject="lock_images")
        if mode == "auto" and self.reason:
            logger.info("memory of images is not locked", extra={"why": self.reason})

    @property
    def is_on(self) -> bool:
        return not self.reason

    def status(self) -> LockStatus:
        return LockStatus(self.mode != "off", self.is_on, self.reason)

    def lock(self, data: torch.Tensor) -> None:
        """Locks a mapping; what it holds stays locked until it is unmapped."""
        if self.is_on and data.numel() and not data.is_pinned():
            error = _mlock(data.data_ptr(), data.numel())
            if error:
                self.reason = f"the system refused to lock {data.numel()} bytes: {error}"
                logger.warning("memory of images is no longer locked", extra={"why": self.reason})

    def unlock(self, data: torch.Tensor) -> None:
        """Unlocks a mapping that another one takes the place of."""
        if self.is_on and data.numel():
            _LIBC.munlock(ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel()))


def swap_bytes() -> int:
    """Returns the machine's swap space; 0 if the system does not say."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("SwapTotal:"):
                return int(line.split()[1]) << 10
    return 0


def _refusal(num_bytes: int) -> str:
    """Returns why the system does not lock so many bytes, "" if it does. Raises this process's own
    limit as far as it may."""
    if sys.platform != "linux":
        return "only Linux locks memory page by page"
    _, hard = resource.getrlimit(_LIMIT)
    resource.setrlimit(_LIMIT, (hard, hard))
    with mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ) as tried:
        error = _mlock(np.frombuffer(tried, np.uint8).ctypes.data, num_bytes)
    if not error:
        return ""
    limit = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard} bytes"
    return (
        f"the limit of locked memory is {limit}, and images take up to {num_bytes}: raise it "
        "(ulimit -l, LimitMEMLOCK=, or the capability IPC_LOCK)"
    )


def _mlock(address: int, num_bytes: int) -> str:
    """Returns the system's error, "" if there is none."""
    try:
        lock = _LIBC.mlock2
    except AttributeError:
        return "the system's library has no mlock2"
    if lock(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _ON_FAULT) == 0:
        return ""
    return os.strerror(ctypes.get_errno())
