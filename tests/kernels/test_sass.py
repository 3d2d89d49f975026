"""What the assembler makes of every launch on an H200: no spills, enough programs at a time, wide
loads, and the tensor cores."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.gpu_model.time import CTAS_PER_SM

OPERATIONS = Path(__file__).parent / "launches.py"
SHAPES = {
    "8B": (4096, 14336, 32, 8, 128),
    "an eighth of 70B": (8192, 3584, 8, 1, 128),
    "heads of 64": (2048, 8192, 32, 8, 64),
    "heads of 96": (3072, 8192, 32, 32, 96),
    "heads of 256": (2560, 10240, 8, 4, 256),
    "heads of 512": (2560, 10240, 8, 2, 512),
}
DECODE = {f"{count} rows": [(500, 1)] * count for count in (1, 32, 128)}
PROMPTS = {"a short prompt": [(0, 100), (500, 1)], "a long prompt": [(0, 2048)]}
STEPS = DECODE | PROMPTS

MIN_CTAS = {
    "add_rms_norm_kernel": 4,
    "swiglu_kernel": 8,
    "rotary_angles_kernel": 32,
    "store_kernel": 8,
    "decode_kernel": 4,
    "combine_kernel": 8,
    "prefill_kernel": 2,
    "shrink_kernel": 4,
    "expand_kernel": 2,
}
"""Programs that fit an SM at once, at least."""
MIN_CTAS_OF_WIDE_HEADS = {
    "heads of 256": {"decode_kernel": 3, "combine_kernel": 6},
    "heads of 512": {
        "decode_kernel": 2,
        "combine_kernel": 6,
        "store_kernel": 6,
        "prefill_kernel": 1,
    },
}
MIN_CTAS_OF_KINDS = {
    "shrink_kernel": 3,
    "expand_kernel": 2,
    "token_weights_kernel": 16,
    "replace_embeddings_kernel": 16,
    "replace_logits_kernel": 3,
}
MIN_CTAS_OF_EXPERTS = {
    "route_kernel": 16,
    "rank_pairs_kernel": 3,
    "count_pairs_kernel": 8,
    "scan_counts_kernel": 1,
    "place_pairs_kernel": 2,
    "experts_linear_kernel": 2,
    "combine_experts_kernel": 8,
    "mark_tiles_kernel": 16,
    "describe_pairs_kernel": 8,
    "plan_items_kernel": 3,
}
STREAMS = ("add_rms_norm", "swiglu", "decode", "prefill", "shrink", "expand")
"""Kernels that read much: 16 bytes at a time, and nothing element by element."""
LOCAL_MEMORY = {"rotary_angles_kernel"}
"""Sine and cosine of large angles, from CUDA's library, use a table of local memory."""
MAX_STACK_BYTES = {"prefill_kernel": 96}
"""With so many bytes spilled, mostly outside the loop, two programs fit an SM. On an H200 they
reach 457 TFLOP/s at 4,096 tokens; one program without a spill reaches 349."""


@pytest.fixture(scope="module")
def compiler(start_worker):
    return start_worker(OPERATIONS, interpret=False)


SHORT = {
    ("8B", "32 rows"),
    ("8B", "a short prompt"),
    ("heads of 256", "a long prompt"),
    ("heads of 512", "a long prompt"),
}
"""The others take minutes to compile."""
CASES = [
    pytest.param(shape, step, marks=() if (shape, step) in SHORT else pytest.mark.long)
    for shape in SHAPES
    for step in STEPS
]

pytestmark = pytest.mark.slow


def assert_spills_little(kernel: SimpleNamespace, label: str) -> None:
    most = MAX_STACK_BYTES.get(label.split()[0].rstrip(","), 0)
    assert kernel.stack_bytes <= most, (label, kernel)
    assert most or kernel.spills == 0, (label, kernel)


@pytest.mark.parametrize(("shape", "step"), CASES)
def test_launches(compiler, shape, step):
    found = compiler.call("compiled_step", SHAPES[shape], STEPS[step])
    min_ctas = MIN_CTAS | MIN_CTAS_OF_WIDE_HEADS.get(shape, {})
    for name, facts in found.items():
        kernel = SimpleNamespace(**facts)
        label = f"{name}, {shape}, {step}: {kernel}"
        kind = name.split()[0]
        if kind not in LOCAL_MEMORY:
            assert_spills_little(kernel, label)
        assert kernel.num_ctas >= min_ctas[kind], label
        if shape == "8B" and step in DECODE:
            assert kernel.num_ctas >= CTAS_PER_SM[kind], (
                f"bench/gpu_model/time.py has more: {label}"
            )
        if kind.removesuffix("_kernel") in STREAMS:
            assert kernel.wide_loads > 0, label
            assert kernel.narrow_loads == 0, label
        if kind in ("decode_kernel", "shrink_kernel", "expand_kernel"):
            assert kernel.mma > 0, label
    assert ("prefill_kernel" in found) == (step in PROMPTS)
    for name in ("prefill_kernel", "shrink_kernel qkv", "expand_kernel qkv"):
        if step in PROMPTS:
            assert found[name]["wgmma"] > 0, found[name]


@pytest.mark.parametrize("step", ["32 rows", "a short prompt"])
@pytest.mark.parametrize(
    "shape",
    [
        *("heads of 256", "heads of 512"),
        *(pytest.param(s, marks=pytest.mark.long) for s in ("8B", "heads of 64", "heads of 96")),
    ],
)
def test_what_families_compute_otherwise(compiler, shape, step):
    """Nothing spills at the heads that they have."""
    found = compiler.call("compiled_families", SHAPES[shape], STEPS[step])
    min_ctas = {"prefill_kernel": 2} | MIN_CTAS_OF_WIDE_HEADS.get(shape, {})
    for label, facts in found.items():
        kernel = SimpleNamespace(**facts)
        assert_spills_little(kernel, label)
        least = min_ctas.get(label.split()[0], 4)
        assert kernel.num_ctas >= least, (label, kernel)
        if shape == "8B" and label == "norm_rows_kernel a norm of all queries":
            assert kernel.num_ctas == CTAS_PER_SM["norm_rows_kernel"], "bench/gpu_model/time.py"
    assert {label.split()[0] for label in found} >= {
        *("decode_kernel", "store_kernel", "norm_rows_kernel", "swiglu_kernel"),
        *("add_rms_norm_kernel", *(["prefill_kernel"] if step in PROMPTS else [])),
    }


@pytest.mark.parametrize("shape", ["8B", pytest.param("heads of 256", marks=pytest.mark.long)])
def test_prompts_in_fp32(compiler, shape):
    """Twice the bytes take other blocks."""
    found = compiler.call("compiled_attention", SHAPES[shape], [(0, 100)], torch.float32)
    kernel = SimpleNamespace(**found["prefill_kernel"])
    assert_spills_little(kernel, "prefill_kernel")
    assert kernel.num_ctas >= 1


HYBRIDS = {
    "16 and 16 of 128": (16, 16, 128, 128),
    "16 and 48 of 128": (16, 48, 128, 128),
}
"""Heads of keys and of values, and their elements, of the smallest and the largest Qwen3.5."""
MIN_CTAS_OF_RECURRENCES = CTAS_PER_SM | {"delta_chunks_kernel": 2}


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        ("16 and 16 of 128", [1] * 32),
        ("16 and 16 of 128", [100, 1]),
        pytest.param("16 and 48 of 128", [2048], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_recurrences(compiler, heads, lengths):
    """The state stays in registers, is read 16 bytes at a time, and prompts are multiplied by
    tensor cores."""
    found = compiler.call("compiled_recurrence", HYBRIDS[heads], lengths, torch.bfloat16)
    for name, facts in found.items():
        kernel = SimpleNamespace(**facts)
        label = f"{name}, {heads}, {lengths}: {kernel}"
        assert kernel.spills == kernel.stack_bytes == 0, label
        assert kernel.num_ctas >= MIN_CTAS_OF_RECURRENCES[name], label
        assert kernel.wide_loads > 0, label
    is_prompt = max(lengths) > 1
    assert ("delta_chunks_kernel" in found) == is_prompt
    if is_prompt:
        chunks = found["delta_chunks_kernel"]
        assert chunks["mma"] + chunks["wgmma"] > 0, chunks


def test_recurrences_in_fp32(compiler):
    found = compiler.call("compiled_recurrence", HYBRIDS["16 and 16 of 128"], [9], torch.float32)
    for name, facts in found.items():
        kernel = SimpleNamespace(**facts)
        assert kernel.spills == kernel.stack_bytes == 0, (name, kernel)


MIXTURES = {
    "8 of 128": (128, 8, 2048, 768),
    "4 of 32": (32, 4, 2880, 2880),
    "2 of 8": (8, 2, 4096, 14336),
    "8 of 256": (256, 8, 7168, 2048),
    "10 of 512": (512, 10, 2048, 512),
}
"""Experts chosen and all, with hidden and intermediate sizes, of models that there are."""
SHORT_MIXTURES = {("8 of 128", 1), ("8 of 128", 512), ("4 of 32", 2048)}


@pytest.mark.parametrize(
    ("mixture", "num_tokens"),
    [
        pytest.param(
            *(mixture, num_tokens),
            marks=() if (mixture, num_tokens) in SHORT_MIXTURES else pytest.mark.long,
        )
        for mixture in MIXTURES
        for num_tokens in (1, 32, 512, 2048)
    ],
)
def test_mixtures(compiler, mixture, num_tokens):
    """Few pairs and many are multiplied by the instructions of whole warp groups, nothing spills,
    and pairs are read 16 bytes at a time."""
    found = compiler.call("compiled_experts", MIXTURES[mixture], num_tokens, torch.bfloat16)
    for name, facts in found.items():
        kernel = SimpleNamespace(**facts)
        label = f"{name}, {mixture}, {num_tokens} tokens: {kernel}"
        kind = name.split()[0]
        assert kernel.spills == kernel.stack_bytes == 0, label
        assert kernel.num_ctas >= MIN_CTAS_OF_EXPERTS[kind], label
        if kind in ("experts_linear_kernel", "combine_experts_kernel"):
            assert kernel.wide_loads > 0, label
        if kind == "experts_linear_kernel":
            assert kernel.wgmma > 0, label
            assert kernel.mma == 0, label
            assert kernel.narrow_loads <= 4, f"only of biases: {label}"
        if kind == "combine_experts_kernel":
            assert kernel.narrow_loads == 0, label


@pytest.mark.parametrize("num_tokens", [1, pytest.param(512, marks=pytest.mark.long), 2048])
def test_mixtures_in_fp32(compiler, num_tokens):
    found = compiler.call("compiled_experts", MIXTURES["8 of 128"], num_tokens, torch.float32)
    for label, facts in found.items():
        kernel = SimpleNamespace(**facts)
        assert kernel.spills == kernel.stack_bytes == 0, (label, kernel)


@pytest.mark.parametrize("step", ["32 rows", "a short prompt"])
@pytest.mark.parametrize("shape", ["8B", pytest.param("heads of 256", marks=pytest.mark.long)])
def test_what_adapters_have_besides(compiler, shape, step):
    """Vectors over outputs, sums of adapters, and weights in the base's place: nothing spills."""
    found = compiler.call("compiled_kinds", SHAPES[shape], STEPS[step])
    for label, facts in found.items():
        kernel = SimpleNamespace(**facts)
        assert kernel.spills == kernel.stack_bytes == 0, (label, kernel)
        assert kernel.num_ctas >= MIN_CTAS_OF_KINDS[label.split()[0]], (label, kernel)


@pytest.mark.parametrize("step", ["32 rows", "a short prompt"])
@pytest.mark.parametrize("shape", ["8B", pytest.param("heads of 256", marks=pytest.mark.long)])
def test_adapters_beside_products(compiler, shape, step):
    """Nothing spills, as many programs fit as of the same kernels without addends, and addends are
    read 16 bytes at a time, too."""
    found = compiler.call("compiled_beside", SHAPES[shape], STEPS[step])
    min_ctas = MIN_CTAS | MIN_CTAS_OF_WIDE_HEADS.get(shape, {})
    for name, facts in found.items():
        kernel, kind = SimpleNamespace(**facts), name.split()[0]
        assert kernel.spills == kernel.stack_bytes == 0, (name, kernel)
        assert kernel.num_ctas >= min_ctas[kind], (name, kernel)
        if shape == "8B" and step in DECODE:
            assert kernel.num_ctas >= CTAS_PER_SM[kind], (name, kernel)
        if kind.removesuffix("_kernel") in STREAMS:
            assert kernel.wide_loads > 0, (name, kernel)
            assert kernel.narrow_loads == 0, (name, kernel)
    assert {name.split()[0] for name in found} == {
        *("store_kernel", "swiglu_kernel", "add_rms_norm_kernel"),
        *("shrink_kernel", "expand_kernel"),
    }


FORMATS = {
    "int4": ("int4", 128, False, "bfloat16"),
    "uint4 with offsets": ("uint4", 128, True, "float16"),
    "nf4": ("nf4", 64, False, "float32"),
    "fp4": ("fp4", 32, False, "bfloat16"),
    "int8": ("int8", 0, False, "float32"),
    "int8, small groups": ("int8", 16, False, "float16"),
    "fp8": ("fp8", 0, False, "float32"),
    "fp8, blocks": ("fp8", 128, False, "float32"),
}
NARROW_FORMATS = {"int8, small groups"}
"""A group's codes of an output are too few bytes: four are copied at a time."""
SHORT_FORMATS = {("int4", 1), ("uint4 with offsets", 1), ("nf4", 256), ("fp8", 40)}


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [
        pytest.param(*cell, marks=() if cell in SHORT_FORMATS else pytest.mark.long)
        for cell in product(FORMATS, (1, 40, 256))
    ],
)
def test_weights_in_few_bits(compiler, name, num_rows):
    """Nothing spills, weights are copied 8 or 16 bytes at a time while others are multiplied, and
    tensor cores multiply few rows and many; many, with weights that stay in registers."""
    found = compiler.call("compiled_quantised", *FORMATS[name], num_rows, torch.bfloat16)
    for label, facts in found.items():
        kernel = SimpleNamespace(**facts)
        text = f"{label}, {name}, {num_rows} rows: {kernel}"
        assert kernel.spills == kernel.stack_bytes == 0, text
        if label.startswith("few_rows"):
            assert kernel.num_ctas >= 3, text
            assert kernel.mma > 0, text
            assert kernel.wide_copies > 0 or name in NARROW_FORMATS, text
        elif label.startswith("many_rows"):
            assert kernel.num_ctas >= 2, text
            assert kernel.wgmma > 0, text
            assert kernel.mma == 0, text
            assert kernel.wide_copies > 0, text
    kinds = {label.split()[0] for label in found}
    assert kinds - {"sum_splits_kernel"} == (
        {"few_rows_kernel", "many_rows_kernel"} if num_rows == 1 else {"many_rows_kernel"}
    )


def test_weights_in_few_bits_in_fp32(compiler):
    found = compiler.call("compiled_quantised", *FORMATS["nf4"], 1, torch.float32)
    for label, facts in found.items():
        kernel = SimpleNamespace(**facts)
        assert kernel.spills == kernel.stack_bytes == 0, (label, kernel)
