"""Linux's permission for the tile registers of AMX, which a process has to ask for."""

from __future__ import annotations

import ctypes
import os
import platform

# Of asm/prctl.h and the processor's manual: Linux has them since 5.16. See
# https://docs.kernel.org/arch/x86/xstate.html
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
REFUSED = "the system does not allow tile registers"
"""How the message of the error begins."""


def request_tiles() -> None:
    """Asks for this process, all its threads and its forks. It may be asked again.

    Raises OSError where the system refuses: it is too old, or a sandbox, or a thread's stack for
    signals has no room for the registers.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(f"{REFUSED}: the processor has none")
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(_ARCH_REQ_XCOMP_PERM), ctypes.c_long(_XFEATURE_XTILEDATA))
    if libc.syscall(ctypes.c_long(_SYS_ARCH_PRCTL), *arguments):
        error = ctypes.get_errno()
        raise OSError(f"{REFUSED}: {os.strerror(error)}")
