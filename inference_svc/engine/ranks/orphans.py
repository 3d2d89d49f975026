"""Starts a process that ends with the thread that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""A number of Linux's prctl.h."""


# This process's path, so that the child imports the same modules, and none from the working folder.
_PROGRAM = """
import sys
sys.path[:] = {path!r}
from inference_svc.engine.ranks.orphans import end_with
end_with({parent})
from {module} import main
main()
"""


def rank_command(module: str) -> list[str]:
    """Returns the command of a process that runs a module's `main`, and ends with the calling
    thread."""
    program = _PROGRAM.format(path=sys.path, parent=os.getpid(), module=module)
    return [sys.executable, "-P", "-c", program]


def end_with(parent: int) -> None:
    """Has the kernel kill this process, even while it is stopped, once the thread that started it
    has ended; `parent` is that thread's process. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)  # it had ended before
