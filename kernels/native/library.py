"""The compiled library: its operations by name, and programs made of them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.native.build import TILE_VARIANTS, CompileFailed, ensure, runnable_variants
from kernels.native.tile_permission import request_tiles

logger = logging.getLogger(__name__)

_COUNTER_BYTES = 64
MAX_FAULT_CHARS = 200
"""Of each fault in `Choice`."""


class _Op(ctypes.Structure):
    _fields_ = (("function", ctypes.c_void_p), ("args", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class NativeOp:
    """One operation with its arguments at a fixed address. `keep` is whatever they point to."""

    name: str
    args: ctypes.Structure
    keep: object = None


def dtype_name(dtype: torch.dtype) -> str:
    """How the library's symbols name a storage type. Raises KeyError for one it has not."""
    return {torch.float32: "float", torch.bfloat16: "bf16"}[dtype]


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Returns the address of a contiguous tensor of any shape; None without a tensor."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


class Library:
    """The library of one variant ("avx2", "avx512", "avx512_bf16", "amx_bf16"). Raises OSError if
    it cannot be loaded, or if the system refuses the registers that it needs."""

    def __init__(self, path: Path, variant: str) -> None:
        if variant in TILE_VARIANTS:
            request_tiles()
        self.variant = variant
        self._dll = ctypes.CDLL(str(path))
        self._dll.loadout_run.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        self._dll.loadout_run.restype = None
        self._dll.loadout_place_threads.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        self._dll.loadout_place_threads.restype = None
        self._addresses: dict[str, int] = {}

    def program(self, ops: Sequence[NativeOp]) -> Program:
        """Raises AttributeError for an operation that the library does not have."""
        addresses = [self._address(op.name) for op in ops]
        table = (_Op * len(ops))()
        for entry, op, address in zip(table, ops, addresses, strict=True):
            entry.function, entry.args = address, ctypes.addressof(op.args)
        return Program(self._dll.loadout_run, tuple(ops), table)

    def run(self, *ops: NativeOp) -> None:
        """Runs `ops` in order, once, on torch's threads."""
        self.program(ops).run()

    def place_threads(self, processors: Sequence[Collection[int]]) -> None:
        """Thread i of programs that the calling thread runs from now on, with as many threads as
        there are parts, stays on the processors of part i; the caller is thread 0.

        Else two threads that have slept may be woken on one processor, and share it for tens of
        milliseconds while another is idle. Nothing happens where OpenMP has been told so already.
        """
        num_words = 1 + max(max(part) for part in processors) // 64
        masks = (ctypes.c_uint64 * (num_words * len(processors)))()
        for thread, part in enumerate(processors):
            for processor in part:
                masks[thread * num_words + processor // 64] |= 1 << processor % 64
        self._dll.loadout_place_threads(ctypes.addressof(masks), num_words, len(processors))

    def _address(self, name: str) -> int:
        if name not in self._addresses:
            address = ctypes.cast(getattr(self._dll, f"loadout_{name}"), ctypes.c_void_p).value
            assert address is not None
            self._addresses[name] = address
        return self._addresses[name]


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """Operations that run one after the other, each on all threads. Arguments may change between
    runs, in place."""

    _function: ctypes._NamedFuncPointer
    ops: tuple[NativeOp, ...]
    _table: ctypes.Array[_Op]
    _counters: ctypes.Array[ctypes.c_char] = field(init=False)

    def __post_init__(self) -> None:
        raw = ctypes.create_string_buffer(_COUNTER_BYTES * (len(self.ops) + 1))
        object.__setattr__(self, "_counters", raw)

    def run(self, num_threads: int | None = None) -> None:
        """Runs once, on so many threads; None: on as many as torch has."""
        self._run(None, num_threads or torch.get_num_threads())

    def profile(self) -> list[tuple[str, float]]:
        """Runs once; every operation's name and seconds."""
        seconds = (ctypes.c_double * len(self.ops))()
        self._run(ctypes.addressof(seconds), torch.get_num_threads())
        return [(op.name, spent) for op, spent in zip(self.ops, seconds, strict=True)]

    def _run(self, seconds: int | None, num_threads: int) -> None:
        # Counters lie on cache lines of their own.
        counters = -(-ctypes.addressof(self._counters) // _COUNTER_BYTES) * _COUNTER_BYTES
        table = ctypes.addressof(self._table)
        self._function(table, len(self.ops), counters, num_threads, seconds)


class Choice(NamedTuple):
    """The library that serves, if there is one, and why each better one does not: "avx512: no
    compiler"."""

    library: Library | None
    faults: tuple[str, ...]


def load(variant: str | None = None) -> Library | None:
    """The library of `variant`, or of the best that this machine executes; see `choose`."""
    return choose(variant).library


@cache
def choose(variant: str | None) -> Choice:
    """Chooses the library of `variant`, or of the best that this machine executes; compiled at
    first use.

    The next best serves where that one is neither there nor compiles (an old compiler) nor loads (a
    compiler whose OpenMP is not torch's), or the system refuses its registers. What a compiler said
    is in the log.
    """
    faults: list[str] = []
    for each in runnable_variants() if variant is None else [variant]:
        try:
            path = ensure(each)
            if path is not None:
                return Choice(Library(path, each), tuple(faults))
            faults.append(f"{each}: no compiler")
        except (CompileFailed, OSError) as error:
            logger.info("the native kernels for %s cannot be used: %s", each, error)
            faults.append(f"{each}: {_summary(str(error))}")
    return Choice(None, tuple(faults) or ("none are for this processor",))


def _summary(text: str) -> str:
    """Returns the line of a compiler's output that names the first error, or the first line."""
    lines = text.splitlines() or [""]
    found = next((line for line in lines if "error" in line), lines[0])
    return found.strip()[:MAX_FAULT_CHARS]
