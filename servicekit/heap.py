"""The C heap of the process: bounds the number of its arenas, and gives back their free memory.

glibc makes eight arenas per processor, and each keeps the memory that was freed in it. After a
flood of small allocations in gRPC's threads a process holds memory that nothing uses. Without glibc
both functions do nothing.
"""

from __future__ import annotations

import ctypes

MAX_ARENAS = 2
_M_ARENA_MAX = -8


def bound_arenas(max_arenas: int = MAX_ARENAS) -> bool:
    """Lets the heap have at most so many arenas from now on; those that exist stay. Returns whether
    the heap can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, max_arenas) == 1


def give_back() -> bool:
    """Gives free memory back to the system, which takes milliseconds, without the interpreter's
    lock. Returns whether anything was given."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) == 1
