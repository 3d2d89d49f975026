"""The native kernels, for tests."""

from __future__ import annotations

import pytest

from kernels.native import build
from kernels.native.library import Library, load


def native_library(variant: str | None = None) -> Library:
    """That of `variant`, or the best one. Skips where this processor has none, or where there is
    neither a library nor a compiler: then the product has none either."""
    runnable = build.runnable_variants()
    if not runnable or variant not in (None, *runnable):
        pytest.skip(f"this processor has no {variant or 'variant'}")
    loaded = load(variant)
    if loaded is None and build.find_compiler() is None:
        pytest.skip("no compiler for the native kernels")
    assert loaded is not None, "they are compiled, or can be"
    return loaded
