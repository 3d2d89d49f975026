"""Ends this process with the thread that started it."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
"""A number of Linux's prctl.h."""


def end_with(parent: int) -> None:
    """Has the kernel kill this process, even while it is stopped, once the thread that started it
    has ended; `parent` is that thread's process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)  # it had ended before
