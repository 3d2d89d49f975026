"""The operations in C++, which the sampler runs after a step's program."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.native.library import Library, NativeOp

MAX_SPACES = 16
"""Threads that work at most: each needs as much memory as two rows of logits."""
MIN_SHARED_ELEMENTS = 1 << 17
"""Fewer logits take less time than other threads need to begin, and much less on a busy machine."""


class _ChooseArgs(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("num_sorted", ctypes.c_void_p),
        ("spaces", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("num_spaces", ctypes.c_int64),
    )


class RowParams(NamedTuple):
    """The sampling parameters of a row: a temperature of 0 takes the largest logit; 0, 1 and 0 cut
    nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class NativeChoice:
    """Chooses the tokens of the same rows in every step; see `reference` for their definition.

    A row's token depends on the row alone. It may differ from the definition's where the number of
    a row lies within rounding of the border of two tokens.
    """

    def __init__(self, library: Library, params: list[RowParams], vocab_size: int) -> None:
        """`params`: of each row of the logits, which have `vocab_size` columns."""
        self._library = library
        num_rows = len(params)
        self._temperatures = np.array([each.temperature for each in params], np.float32)
        self._top_k = np.array([each.top_k for each in params], np.int64)
        self._top_p = np.array([each.top_p for each in params], np.float32)
        self._min_p = np.array([each.min_p for each in params], np.float32)
        self.numbers = np.zeros(num_rows, np.float64)
        """The number of each row, of [0, 1); of ones whose temperature is 0 it is not used."""
        self._masks = np.zeros(num_rows, np.uintp)
        self._tokens = np.zeros(num_rows, np.int64)
        self._num_sorted = np.zeros(num_rows, np.int64)
        self._num_threads = _num_threads(num_rows, vocab_size)
        num_spaces = min(self._num_threads, num_rows, MAX_SPACES)
        self._spaces = np.empty((num_spaces, vocab_size), np.int64)
        self._args = _ChooseArgs(
            masks=self._masks.ctypes.data,
            temperatures=self._temperatures.ctypes.data,
            numbers=self.numbers.ctypes.data,
            top_k=self._top_k.ctypes.data,
            top_p=self._top_p.ctypes.data,
            min_p=self._min_p.ctypes.data,
            tokens=self._tokens.ctypes.data,
            num_sorted=self._num_sorted.ctypes.data,
            spaces=self._spaces.ctypes.data,
            num_rows=num_rows,
            vocab_size=vocab_size,
            num_spaces=num_spaces,
        )
        self._program = library.program([NativeOp("choose", self._args)])

    def choose(
        self, logits: Tensor, rows: list[int] | None = None, masks: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows' tokens, or NOT_FINITE, and how many tokens had to be sorted for each:
        int64 [R] both, valid until the next call.

        Args:
            logits: fp32 [R, vocab_size]. Rows have unit stride and may be apart.
            rows: N rows of the logits that have masks.
            masks: A bit for each token that such a row may choose, the least bit first: uint8 [N,
                vocab_size / 8, rounded up]. Not used without such rows.
        """
        assert logits.shape == (len(self._tokens), self._args.vocab_size)
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        if rows:
            assert masks is not None
            assert masks.shape == (len(rows), -(-logits.shape[1] // 8))
            assert masks.dtype == np.uint8
            assert masks.flags.c_contiguous
            size = masks.shape[1]
            self._masks[rows] = masks.ctypes.data + size * np.arange(len(rows), dtype=np.uintp)
        self._args.logits, self._args.stride = logits.data_ptr(), logits.stride(0)
        self._program.run(self._num_threads)
        if rows:
            self._masks[:] = 0
        return self._tokens, self._num_sorted


def _num_threads(num_rows: int, vocab_size: int) -> int:
    is_shared = num_rows > 1 and num_rows * vocab_size >= MIN_SHARED_ELEMENTS
    return torch.get_num_threads() if is_shared else 1
