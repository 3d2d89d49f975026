"""The kernels compile for sm_80 and sm_90 without a GPU, and load A and B 16 bytes at a time."""

from __future__ import annotations

import re

import pytest
import torch

from kernels import tuning

TOKENS, TILES = [1] * 8, [100, 1]
THREADS = 4 * 32
SHRINK, EXPAND = (tuning.constants(name) for name in ("shrink", "expand"))


def vector_bytes(ptx: str) -> int:
    """Bytes that one program's 16-byte loads of global memory bring, all threads together."""
    direct = re.findall(r"ld\.global(?:\.\w+)*\.v4\.[bfu]32", ptx)
    staged = re.findall(r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", ptx)
    return 16 * THREADS * (len(direct) + len(staged))


def num_element_loads(ptx: str) -> int:
    """Loads of a single 16-bit element: what weights cost whose alignment is not proven."""
    return len(re.findall(r"ld\.global(?:\.\w+)*\.[bu]16", ptx))


MIXTURE = pytest.mark.parametrize("has_experts", [False, True], ids=["plain", "experts"])


@MIXTURE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("capability", [80, 90], ids=["sm_80", "sm_90"])
def test_rows_load_vectors_and_use_tensor_cores(compiler, capability, dtype, has_experts):
    args = (capability, dtype, 4096, (4096, 1024, 1024), TOKENS)
    ptx = compiler.call("compile_ptx", *args, has_experts=has_experts)
    b_block = EXPAND["block_r"] * EXPAND["block_n"] * dtype.itemsize
    a_block = SHRINK["block_r"] * SHRINK["chunk"] * dtype.itemsize
    assert vector_bytes(ptx["shrink"]) >= a_block
    assert num_element_loads(ptx["shrink"]) == 0
    assert vector_bytes(ptx["expand"]) >= b_block
    assert num_element_loads(ptx["expand"]) == 0
    if not has_experts:
        assert vector_bytes(ptx["embedding"]) >= b_block
    for name in ptx.keys() - {"gather"}:
        assert "mma.sync" in ptx[name], name


@MIXTURE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("capability", [80, 90], ids=["sm_80", "sm_90"])
def test_tiles_load_vectors_and_use_tensor_cores(compiler, capability, dtype, has_experts):
    args = (capability, dtype, 4096, (4096, 1024, 1024), TILES)
    ptx = compiler.call("compile_ptx", *args, has_experts=has_experts)
    b_block = EXPAND["tile_block_r"] * EXPAND["block_n"] * dtype.itemsize
    a_block = SHRINK["tile_block_r"] * SHRINK["tile_block_k"] * dtype.itemsize
    assert "cp.async" in ptx["shrink"], "the loads of the inner loop overlap its products"
    assert vector_bytes(ptx["shrink"]) >= a_block
    assert num_element_loads(ptx["shrink"]) == 0
    assert vector_bytes(ptx["expand"]) >= b_block
    assert num_element_loads(ptx["expand"]) == 0
    if not has_experts:
        assert vector_bytes(ptx["embedding"]) >= b_block
    for name in ptx.keys() - {"gather"}:
        assert re.search(r"wgmma\.mma_async|mma\.sync", ptx[name]), name


def test_widths_that_no_vector_divides_load_elements(compiler):
    """The check can fail: rows of odd length cannot all start on 16 bytes."""
    ptx = compiler.call("compile_ptx", 80, torch.bfloat16, 4095, (1023,), TOKENS)
    assert vector_bytes(ptx["shrink"]) == 0
    assert num_element_loads(ptx["shrink"]) >= 16
    assert num_element_loads(ptx["expand"]) >= 16


def test_fp32_compiles_without_reduced_precision(compiler):
    ptx = compiler.call("compile_ptx", 90, torch.float32, 1024, (1024,), TILES)
    assert not any("tf32" in kernel for kernel in ptx.values())


def test_layers_and_decode_steps_share_one_compilation(compiler):
    steps = [[1], [1] * 3, [1] * 16]
    args = (80, torch.bfloat16, 1024, (1024, 256, 256))
    num = compiler.call("count_compilations", *args, first_targets=[1, 7, 16], steps=steps)
    assert num == 2, "one shrink and one expand"


@pytest.mark.parametrize("lengths", [TOKENS, TILES], ids=["rows", "tiles"])
def test_float8_loads_vectors_and_is_converted_by_the_processor(compiler, lengths):
    args = (90, torch.bfloat16, 4096, (4096, 1024, 1024), lengths)
    ptx = compiler.call("compile_ptx", *args, is_float8=True)
    size = "block_r" if lengths is TOKENS else "tile_block_r"
    depth = "chunk" if lengths is TOKENS else "tile_block_k"
    assert vector_bytes(ptx["shrink"]) >= SHRINK[size] * SHRINK[depth]
    for name in ("shrink", "expand"):
        assert not re.search(r"ld\.global(?:\.\w+)*\.[bu]8", ptx[name]), "bytes are read in vectors"
        assert "cvt.rn.f16x2.e4m3x2" in ptx[name], name
