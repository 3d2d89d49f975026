"""The native kernels, for tests."""

from __future__ import annotations

import pytest

from kernels.native import build
from kernels.native.library import Library, load
from kernels.native.tile_permission import request_tiles


def variants_here() -> list[str]:
    """Returns the variants that this machine executes and its system allows, best first."""
    runnable = build.runnable_variants()
    try:
        request_tiles()
    except OSError:
        return [each for each in runnable if each not in build.TILE_VARIANTS]
    return runnable


def native_library(variant: str | None = None) -> Library:
    """That of `variant`, or the best one. Skips where this machine has none, or where there is
    neither a library nor a compiler: then the product has none either."""
    here = variants_here()
    if not here or variant not in (None, *here):
        pytest.skip(f"this machine has no {variant or 'variant'}")
    loaded = load(variant)
    if loaded is None and build.find_compiler() is None:
        pytest.skip("no compiler for the native kernels")
    assert loaded is not None, "they are compiled, or can be"
    return loaded
