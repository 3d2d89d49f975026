"""What the benchmarks draw, and how they reckon."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch

from bench.engine import Track
from bench.kernels import roofline
from bench.kernels.gemm_shapes import Products, step_shapes
from bench.kernels.roofline import ModelFloor
from bench.models import (
    NAME,
    SHAPES,
    arena_bytes,
    decoder,
    image_bytes,
    kv_bytes,
    make_adapter,
    projections,
)
from bench.results import percentile
from bench.step_breakdown import name_operations
from bench.store.adapters import BENCH_200M
from bench.store.memory_store import MemoryStore
from bench.workloads.interference import largest_bucket_s
from bench.workloads.many_adapters import observe
from bench.workloads.throughput import summarize
from bench.workloads.trace import Traffic
from contract.images.header import ImageHeader
from inference_svc.adapters.targets import build_layout
from loadout.prometheus import parse

ROOT = Path(__file__).parents[2]
SAME_SIZE = (NAME, "bench-gemma3", "bench-phi4")


def test_skewed_traffic_prefers_the_first_adapters() -> None:
    def share_of_first_tenth(alpha: float) -> float:
        drawn = [a.adapter or 0 for a in islice(Traffic(100, alpha).arrivals(3), 4000)]
        assert set(drawn) <= set(range(100))
        return sum(adapter < 10 for adapter in drawn) / len(drawn)

    # P(adapter < n / 10) = P(U < 0.1 ** alpha)
    for alpha in (0.3, 0.6, 1.0):
        assert share_of_first_tenth(alpha) == pytest.approx(0.1**alpha, abs=0.03)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_arrivals_have_their_rate_and_variation(cv) -> None:
    moments = [a.at_s for a in islice(Traffic(1, rate=50.0, cv=cv).arrivals(1), 20000)]
    gaps = [after - before for before, after in pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.15)
    assert deviation / mean == pytest.approx(cv, rel=0.15)


def test_traffic_of_one_seed_has_the_same_lengths_for_every_n() -> None:
    few, many = (
        [(a.num_in, a.num_out) for a in islice(Traffic(n).arrivals(7), 50)] for n in (5, 1000)
    )
    assert few == many


def test_the_base_alone_has_no_adapters() -> None:
    assert {a.adapter for a in islice(Traffic(0).arrivals(0), 20)} == {None}


def test_ratios_take_the_best_of_vllm() -> None:
    summary = summarize(
        {
            "base": {"ours": [100.0], "vllm": [50.0], "vllm-tuned": [80.0]},
            "16 adapters": {
                "ours": [90.0, 70.0, 75.0],
                "vllm": [5.0],
                "floor": [100.0],
                "bound": [150.0],
            },
        }
    )
    assert summary["base"]["ours / vllm best"] == pytest.approx(1.25)
    assert summary["16 adapters"]["ours / our base"] == pytest.approx(0.75)
    assert summary["16 adapters"]["ours / floor"] == pytest.approx(0.75)
    assert summary["16 adapters"]["ours / bound"] == pytest.approx(0.5)


def test_a_bound_takes_the_longer_of_reading_and_arithmetic() -> None:
    products = Products([(64, 32), (32, 64)])
    assert products.num_bytes == 2 * products.flops_per_token / 2 == 8192
    assert products.bound_seconds(1, 8192.0, 1e9) == pytest.approx(1.0)
    assert products.bound_seconds(10, 8192e3, 8192.0) == pytest.approx(10.0)
    assert products.best(4, 1).seconds > 0


def test_products_are_told_apart_by_their_place() -> None:
    ops = [(name, 1.0) for name in ("linear_bf16", "norm", *["linear_bf16"] * 8)]
    assert name_operations(ops) == {
        "linear qkv": 2.0,
        "linear o": 2.0,
        "linear gate_up": 2.0,
        "linear down": 2.0,
        "linear head": 1.0,
        "norm": 1.0,
    }


def test_the_largest_observation_between_two_scrapes() -> None:
    def scraped(*counts: int) -> str:
        borders = ("0.1", "1", "10", "+Inf")
        lines = [f'x_bucket{{le="{b}"}} {c}' for b, c in zip(borders, counts, strict=True)]
        return "# TYPE x histogram\n" + "\n".join([*lines, f"x_count {counts[-1]}", "x_sum 1"])

    before, after = parse(scraped(0, 0, 0, 3)), parse(scraped(4, 5, 5, 8))
    assert largest_bucket_s(before, after, "x") == 1.0
    assert largest_bucket_s(before, after, "y") is None


def test_percentiles_are_nearest_ranks() -> None:
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 102), 99) == 100  # 99 % of 101 are 99.99
    assert percentile([1.0, 2.0], 50) == 1.0
    assert percentile([1.0, 2.0, 3.0], 0) == 1.0
    assert percentile([1.0, 2.0, 3.0], 100) == 3.0
    assert percentile([3.0], 50) == 3.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_first_tokens_after_the_window_count_and_missing_ones_make_a_lower_bound() -> None:
    came = [Track(0.0, token_times_s=[1.0 + index, 11.0]) for index in range(8)]
    late = Track(5.0, token_times_s=[12.0])
    found = observe([*came, late], 0.0, 10.0, 12.0)
    assert found["tokens_per_second"] == pytest.approx(0.8)
    assert found["waiting at the end"] == 1
    assert found["first_token_p99_s"] == 8.0
    assert not found["first_token_p99_s is a lower bound"]

    never = Track(4.0)
    found = observe([*came, late, never], 0.0, 10.0, 13.0)
    assert found["without a token"] == 1
    assert found["first_token_p99_s"] == 9.0
    assert found["first_token_p99_s is a lower bound"]
    assert not found["first_token_p50_s is a lower bound"]


@pytest.mark.processes
def test_the_protocol_of_sides_needs_no_packages() -> None:
    """Peers' environments have none of ours."""
    code = (
        "import bench.systems.protocol, bench.systems.serve, sys; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)


def test_a_floor_leaves_out_what_nobody_reads_of_the_last_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roofline, "HEAD_BYTES", 1)  # nothing is measured here
    floor, found = ModelFloor("bench-tiny"), projections("bench-tiny")
    assert floor.flops_per_token == 2.0 * sum(into * out for _, into, out in found)
    sizes = {name: (into, out) for name, into, out in found}  # the same in all layers
    whole = 2.0 * sum(into * out for into, out in sizes.values())
    assert floor.prefill_flops(7, 7) == 7 * floor.flops_per_token
    stored = 2.0 * sum(into * out for into, out in (sizes["k_proj"], sizes["v_proj"]))
    assert floor.prefill_flops(7, 0) == 7 * (floor.flops_per_token - whole + stored)


@pytest.mark.parametrize("name", SAME_SIZE)
def test_models_of_one_size_have_the_same_products_and_caches(name: str) -> None:
    assert step_shapes(decoder(name)) == step_shapes(decoder(NAME))
    assert decoder(name).vocab_size == decoder(NAME).vocab_size
    assert kv_bytes(name, 7) == kv_bytes(NAME, 7)


@pytest.mark.long
def test_floors_of_models_of_one_size_differ_by_their_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fused module's A is one, and is read once."""
    monkeypatch.setattr(roofline, "HEAD_BYTES", 1)  # nothing is measured here
    llama, gemma, phi = (ModelFloor(name) for name in SAME_SIZE)
    assert llama.prefill_flops(7, 1) == gemma.prefill_flops(7, 1) == phi.prefill_flops(7, 1)
    assert llama.adapter_bytes == gemma.adapter_bytes
    num_shared = 3 * 1024 * 16  # values: k and v read q's A, up reads gate's
    assert phi.adapter_bytes == llama.adapter_bytes - 2 * num_shared * 16


@pytest.mark.parametrize("name", SAME_SIZE)
def test_adapters_of_every_model_become_images_of_the_size_that_is_reckoned(
    name: str, tmp_path: Path
) -> None:
    SHAPES[name].make_config().save_pretrained(tmp_path)
    make_adapter(tmp_path, tmp_path / "adapter", seed=0, name=name)
    store, layout = MemoryStore(), build_layout(decoder(name), name, torch.bfloat16)
    layout_id = store.accept_layout(layout)
    digest = store.register(tmp_path / "adapter")
    (variant,) = store.add_variants(digest, 1)
    for each in (digest, variant):
        header = next(iter(store.pull(each, layout_id)))
        assert isinstance(header, ImageHeader)
        assert (header.digest, header.layout_id) == (each, layout_id)
        changed = {segment.target for segment in layout.read_header(header).segments}
        assert changed == {i for i, t in enumerate(layout.targets) if t.layer is not None}
        assert header.total_bytes == image_bytes(name)
    assert arena_bytes(name, 16) == 16 * image_bytes(name)
    assert arena_bytes(name, 1) > image_bytes(name)


def test_the_stores_benchmarks_have_the_shape_of_the_model() -> None:
    found = {name: (into, out) for name, into, out in projections(NAME)}
    assert {path.rpartition(".")[2]: sizes for path, sizes in BENCH_200M.items()} == found
