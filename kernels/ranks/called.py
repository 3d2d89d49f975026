"""Operations that call a function in the middle of a program, such as one that exchanges with ranks
of other machines."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kernels.native.library import NativeOp

_FUNCTION = ctypes.CFUNCTYPE(None)


class _CallArgs(ctypes.Structure):
    _fields_ = (("function", _FUNCTION),)


def call_op(function: Callable[[], None]) -> NativeOp:
    """Builds a call of a function, in the thread that runs the program, after the operations before
    and before those behind. It must not raise: nobody would know."""
    callback = _FUNCTION(function)
    return NativeOp("call", _CallArgs(callback), callback)
