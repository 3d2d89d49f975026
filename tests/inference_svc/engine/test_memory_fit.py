"""Sizes that are chosen for a device: models on cards of several sizes, with default settings."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.images.header import ImageHeader, Segment
from contract.images.segment_kinds import SegmentKind
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.app import resolve_settings
from inference_svc.auto_settings import Machine, to_engine_config
from inference_svc.backends.base import DeviceMemory
from inference_svc.backends.cuda.factory import CudaFactory
from inference_svc.backends.cuda.needs import LIBRARIES_BYTES
from inference_svc.backends.cuda.rank_needs import NCCL_BYTES, STAGE_PAIR_BYTES
from inference_svc.config import InferenceSettings
from inference_svc.engine.memory_budget import plan_budgets
from inference_svc.engine.memory_fit import (
    ARENA_SHARE,
    NO_ADAPTERS_BYTES,
    RUNNING_SHARE,
    SPARE_SHARE,
    STEP_SHARE,
    STORED_SHARE,
)
from inference_svc.model.architectures import load_description
from inference_svc.model.description import Decoder
from inference_svc.model.kv_caches import kv_page_bytes
from inference_svc.model.recurrent_states import slot_bytes
from tools.pages.sizing_docs import plan_card
from tools.sizing import Adapters, Plan
from tools.sizing_models import CARDS, GB, LLAMA_8B, MODELS, QWEN3_5_08B, card_bytes

MIB = 1 << 20
STARTS = {
    "Qwen3-0.6B": CARDS,
    "Qwen3-4B": CARDS,
    "Llama-3.1-8B": (24, 40, 48, 80, 141),
    "Qwen2.5-14B": (40, 48, 80, 141),
    "Qwen3-30B-A3B": (80, 141),
    "Qwen3-32B": (80, 141),
    "half of Llama-3.3-70B": (80, 141),
    "Llama-3.3-70B": (),
}
"""The cards on which a model starts; on all others it is refused."""
STARTED = [(model, card) for model, cards in STARTS.items() for card in cards]

planned_on = cache(plan_card)


def started(model: str, gigabytes: int) -> Plan:
    plan = planned_on(model, gigabytes)
    assert plan is not None
    return plan


def test_ranks_have_a_device_each() -> None:
    """A model that no card holds fits on four. Adapters come through the host's memory, which is of
    all ranks, and no tier of it."""
    plan = plan_card("Llama-3.3-70B", 80, {"tensor_parallel": "4"})
    assert plan is not None
    device, host = plan.budgets
    device.check()
    assert 32 << 30 < device.bytes_of("weights") < 34 << 30
    assert device.bytes_of("libraries") == LIBRARIES_BYTES + NCCL_BYTES
    assert plan.kv_tokens > 400_000
    assert plan.config.host_memory == 0
    assert host.bytes_of("landing") == 4 * device.bytes_of("arena") > 0
    assert plan_card("Llama-3.3-70B", 80, {"tensor_parallel": "2"}) is not None
    assert plan_card("Llama-3.3-70B", 40, {"tensor_parallel": "2"}) is None


def test_stages_have_a_device_each() -> None:
    """Sizes are the ones of the stage that needs the most."""
    plan = plan_card("Llama-3.3-70B", 80, {"tensor_parallel": "2", "pipeline_parallel": "2"})
    assert plan is not None
    device, host = plan.budgets
    device.check()
    assert 32 << 30 < device.bytes_of("weights") < 36 << 30
    assert device.bytes_of("libraries") == LIBRARIES_BYTES + 2 * NCCL_BYTES + 2 * STAGE_PAIR_BYTES
    assert plan.kv_tokens > 400_000
    assert plan.config.host_memory == 0
    assert host.bytes_of("landing") == 4 * device.bytes_of("arena") > 0
    assert plan_card("Llama-3.3-70B", 40, {"pipeline_parallel": "2"}) is None


def test_machines_choose_equal_sizes(folder: Path) -> None:
    """Whatever is free on each."""
    decoder = load_description(folder)
    nodes = {"tensor_parallel": 2, "nnodes": 2, "rendezvous": "leader:29500"}
    config = InferenceSettings(model=folder, rendezvous_token="a secret of both", **nodes)
    sizes = [
        resolve_settings(config, Machine(True, free, 24 * GB, host), decoder)
        for free, host in ((23 * GB, 64 * GB), (21 * GB, 32 * GB))
    ]
    assert sizes[0] == sizes[1]
    assert sizes[0].host_memory == 0


@pytest.mark.parametrize("model", MODELS)
def test_where_a_model_starts(model: str) -> None:
    assert tuple(card for card in CARDS if planned_on(model, card)) == STARTS[model]


@pytest.mark.parametrize(("model", "card"), STARTED)
def test_all_lines_fit_and_little_is_left(model: str, card: int) -> None:
    device, _host = started(model, card).budgets
    assert device.limit_bytes == card_bytes(card)
    spare_bytes = device.limit_bytes - device.needed_bytes
    # The tables were planned for the model's longest sequence, and pages may allow a shorter one.
    assert 1 <= spare_bytes / device.limit_bytes * SPARE_SHARE < 1.2


@pytest.mark.parametrize(("model", "card"), STARTED)
def test_a_step_takes_its_share_at_most(model: str, card: int) -> None:
    plan = started(model, card)
    step_bytes = plan.bytes_of("workspace") + plan.bytes_of("graphs")
    fixed = sum(plan.bytes_of(area) for area in ("weights", "libraries", "in use"))
    assert step_bytes <= (card_bytes(card) - fixed) / STEP_SHARE
    config = plan.config
    assert config.max_batch_tokens == 32 * config.max_sequences
    is_widest = config.max_sequences == 256
    assert is_widest or plan.kv_tokens < 64 * 2048, "it could be wider"


def test_adapters_of_all_experts_leave_space_for_keys_and_values() -> None:
    """Two of the highest rank would take all that a mixture's weights leave of a card."""
    plan = started("Qwen3-30B-A3B", 80)
    arena_bytes = plan.bytes_of("arena")
    assert arena_bytes < plan.layout.largest_image(plan.config.max_rank).num_bytes
    assert 2 * plan.layout.largest_image(16).num_bytes <= arena_bytes <= plan.bytes_of("kv_pages")


@pytest.mark.parametrize(
    ("model", "card"), [each for each in STARTED if each != ("Qwen3-30B-A3B", 80)]
)
def test_every_adapter_can_be_pinned_beside_another(model: str, card: int) -> None:
    """Wherever the pinned one lies."""
    plan = started(model, card)
    largest = plan.layout.largest_image(plan.config.max_rank)
    capacity = plan.bytes_of("arena")
    assert plan.bytes_of("host_tier") >= largest.num_bytes
    for before in (0, largest.num_bytes // 3, 256):
        slots = Slots(capacity, plan.config.max_loras, [largest])
        if before:
            assert slots.reserve(header("other", before, (0,)))
        reserved = slots.reserve(header("pinned", largest.num_bytes, largest.cuts))
        assert reserved is not None
        reserved.resident.ready = True
        if before:
            slots.remove("other")
        assert slots.pin("pinned").pinned
        assert slots.pins.admits(header("next", largest.num_bytes, largest.cuts))


def header(digest: str, num_bytes: int, cuts: tuple[int, ...]) -> ImageHeader:
    """An image of this shape: a segment for each target."""
    ends = (*cuts[1:], num_bytes)
    segments = tuple(
        Segment(target, SegmentKind.A, 1, offset, end - offset)
        for target, (offset, end) in enumerate(zip(cuts, ends, strict=True))
    )
    return ImageHeader(digest, digest, "layout", 1, num_bytes, segments)


def test_an_8b_on_24_and_on_141_gigabytes() -> None:
    small, large = started("Llama-3.1-8B", 24), started("Llama-3.1-8B", 141)
    assert small.kv_tokens > 32_000
    assert (small.config.max_sequences, small.config.max_batch_tokens) == (64, 2048)
    assert small.num_adapters("arena", Adapters(16)) >= 8
    assert large.kv_tokens > 750_000
    assert (large.config.max_sequences, large.config.max_batch_tokens) == (256, 8192)
    assert large.num_adapters("arena", Adapters(16)) == large.config.max_loras
    assert large.num_adapters("arena", Adapters(64)) >= 32
    assert large.config.max_model_len == LLAMA_8B["max_position_embeddings"]


# --- a model with recurrent layers --------------------------------------------------------------


@pytest.fixture
def hybrid(tmp_path: Path) -> Decoder:
    """Qwen3.5-0.8B, whose folder sizes have."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_5_08B))
    return load_description(tmp_path)


def test_states_have_their_share_of_a_card(tmp_path: Path, hybrid: Decoder) -> None:
    """The step's width says how many sequences may run, and memory how many do."""
    state_bytes = slot_bytes(hybrid)
    assert 19 * MIB < state_bytes < 20 * MIB
    sequences, stored = [], []
    for gigabytes in (24, 40, 80):
        machine = machine_of(gigabytes)
        config = resolved(tmp_path, machine)
        assert resolve_settings(config, machine, hybrid) == config
        engine_config = to_engine_config(config)
        needs = CudaFactory().memory_needs(engine_config, hybrid)
        memory = DeviceMemory(machine.free_bytes, machine.total_bytes)
        device, _host = plan_budgets(engine_config, needs, memory)
        device.check()
        assert device.limit_bytes is not None
        left_bytes = device.limit_bytes - sum(
            device.bytes_of(name) for name in ("weights", "libraries", "in use")
        )
        running_bytes = 2 * config.max_sequences * state_bytes
        assert running_bytes <= left_bytes / RUNNING_SHARE
        is_most = config.max_sequences == 256
        assert is_most or running_bytes + 2 * state_bytes > left_bytes / RUNNING_SHARE
        assert config.stored_states is not None
        in_share = config.stored_states * state_bytes * STORED_SHARE / left_bytes
        assert 1 - STORED_SHARE * state_bytes / left_bytes < in_share <= 1
        # Adapters' share counts the memory that states take, too.
        assert config.adapter_memory is not None
        assert config.adapter_memory >= left_bytes // ARENA_SHARE
        sequences.append(config.max_sequences)
        stored.append(config.stored_states)
        assert config.max_batch_tokens == 8192, "states make no step narrower"
    assert sequences == sorted(sequences)
    assert stored == sorted(stored)
    assert sequences[0] < 256 == sequences[-1]


def test_given_numbers_of_states_count(tmp_path: Path, hybrid: Decoder) -> None:
    config = resolved(tmp_path, machine_of(24), max_sequences=128, stored_states=3)
    assert (config.max_sequences, config.stored_states) == (128, 3)
    assert resolved(tmp_path, machine_of(24), prefix_cache=False).stored_states == 0
    with pytest.raises(ValueError, match="memory is too small") as refused:
        resolved(tmp_path, machine_of(24), stored_states=2000)
    (line,) = (each for each in str(refused.value).splitlines() if "recurrent_states" in each)
    assert line.endswith("--max-sequences, --stored-states")


def test_few_pages_have_few_stored_states(tmp_path: Path, hybrid: Decoder) -> None:
    page_bytes = kv_page_bytes(hybrid, 16, torch.bfloat16)
    config = resolved(tmp_path, machine_of(80), kv_memory=100 * page_bytes, max_model_len=512)
    assert config.stored_states == 100 * 16 // 512 + config.max_sequences


# --- settings of an 8B --------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def machine_of(gigabytes: float, in_use: int = 600 * MIB, host_bytes: int = 64 << 30) -> Machine:
    total_bytes = int(gigabytes * GB)
    return Machine(True, total_bytes - in_use, total_bytes, host_bytes)


def resolved(folder: Path, machine: Machine, **settings: Any) -> InferenceSettings:
    config = InferenceSettings(model=folder, **({"store": "127.0.0.1:1"} | settings))
    return resolve_settings(config, machine, load_description(folder))


def test_what_is_decided_stays(folder: Path) -> None:
    config = resolved(folder, machine_of(24))
    assert resolve_settings(config, machine_of(24), load_description(folder)) == config


def test_what_is_set_counts(folder: Path) -> None:
    sizes = {"adapter_memory": 1 << 30, "host_memory": 2 << 30, "max_sequences": 100}
    config = resolved(folder, machine_of(80), **sizes)
    assert {name: getattr(config, name) for name in sizes} == sizes
    assert config.max_batch_tokens == 8192
    config = resolved(folder, machine_of(80), max_batch_tokens=100, kv_memory=1 << 30)
    assert (config.max_sequences, config.kv_memory) == (100, 1 << 30)
    on_little = resolved(folder, machine_of(24), max_sequences=200)
    assert on_little.max_batch_tokens == 256, "tokens alone are halved"


def test_without_a_store_nothing_is_for_adapters(folder: Path) -> None:
    config = resolved(folder, machine_of(24), store="")
    assert config.adapter_memory == config.host_memory == NO_ADAPTERS_BYTES


def test_the_host_tier_follows_arena_and_host(folder: Path) -> None:
    config = resolved(folder, machine_of(80, host_bytes=1 << 40))
    assert config.adapter_memory is not None
    assert config.host_memory == 4 * config.adapter_memory
    assert resolved(folder, machine_of(80)).host_memory == 16 << 30
    least = resolved(folder, machine_of(80, host_bytes=MIB), max_rank=16).host_memory
    assert least is not None
    assert 80 * MIB < least < 100 * MIB, "every adapter passes through it"


def test_a_limit_is_kept(folder: Path) -> None:
    config = resolved(folder, machine_of(80), memory_limit=40 * GB)
    alone = resolved(folder, machine_of(40))
    assert config.kv_memory == pytest.approx(int(alone.kv_memory or 0), rel=0.05)


@pytest.mark.parametrize(
    ("settings", "gigabytes"),
    [
        ({}, 16),
        ({"adapter_memory": 8 << 30}, 24),
        ({"kv_memory": 8 << 30}, 24),
        ({"max_sequences": 2048}, 24),
        ({"max_model_len": 131072}, 24),
        ({"max_rank": 1024}, 24),
        ({"memory_limit": 16 << 30}, 80),
    ],
    ids=str,
)
def test_a_refusal_shows_the_arithmetic(
    folder: Path, settings: dict[str, int], gigabytes: int
) -> None:
    with pytest.raises(ValueError, match="the device memory is too small") as refused:
        resolved(folder, machine_of(gigabytes), **settings)
    lines = str(refused.value).splitlines()
    named = [line.split()[0] for line in lines[1:]]
    assert named[:5] == ["weights", "kv_pages", "arena", "workspace", "graphs"]
    assert named[-4:] == ["libraries", "in", "needed", "limit"]
    for flag in ("--kv-memory", "--adapter-memory", "--max-sequences", "memory-limit"):
        assert flag in str(refused.value)


def test_a_little_more_in_use_is_no_reason_to_refuse(folder: Path) -> None:
    """The engine asks the device again, and other programs come and go."""
    machine = machine_of(24)
    config = to_engine_config(resolved(folder, machine))
    needs = CudaFactory().memory_needs(config, load_description(folder))
    for more, fits in ((machine.total_bytes // 200, True), (machine.total_bytes // 50, False)):
        memory = DeviceMemory(machine.free_bytes - more, machine.total_bytes)
        device, _host = plan_budgets(config, needs, memory)
        assert (device.needed_bytes <= machine.total_bytes) == fits


def test_an_arena_without_space_for_every_adapter_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        resolved(folder, machine_of(80), adapter_memory=256 * MIB)
    assert [record.getMessage() for record in caplog.records] == [
        "--adapter-memory 256.0 MiB: an adapter of --max-rank 64 may take 352.3 MiB, and is refused"
    ]


def test_the_hosts_limit_stands_for_what_the_host_says(folder: Path) -> None:
    """A machine whose memory grows with its use says that it has little."""
    config = to_engine_config(resolved(folder, machine_of(80), host_memory_limit=1 << 40))
    config = replace(config, host_bytes=1 << 39)
    needs = CudaFactory().memory_needs(config, load_description(folder))
    _device, host = plan_budgets(config, needs, DeviceMemory(1, 1))
    assert (host.limit_bytes, host.limit_change) == (1 << 40, "host-memory-limit")
    host.check()
    with pytest.raises(ValueError, match="host-memory-limit"):
        plan_budgets(replace(config, host_bytes=2 << 40), needs, DeviceMemory(1, 1))[1].check()
