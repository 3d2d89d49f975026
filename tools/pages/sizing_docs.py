"""Writes the tables of sizes of docs/operations/sizing.md, docs/operations/ranks.md and
docs/kubernetes.md, computed by the services' own code.

python -m tools.pages.sizing_docs
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from adapter_store.config import StoreSettings
from inference_svc.adapters.targets import build_layout
from inference_svc.config import InferenceSettings
from inference_svc.engine.memory_budget import human
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.parameters import weights_bytes
from inference_svc.model.description import Rank
from inference_svc.model.kv_caches import kv_page_bytes
from inference_svc.model.sharding.description import of_rank
from inference_svc.model.sharding.stages import of_stage
from tools.sizing import LINEAR, Adapters, Plan, hit_share, image_bytes, plan, rows
from tools.sizing_models import (
    BENCH_200M,
    CARDS,
    LLAMA_8B,
    MODELS,
    QWEN3_5_08B,
    SHARED,
    card_bytes,
)

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "operations" / "sizing.md"
RANKS_PATH = ROOT / "docs" / "operations" / "ranks.md"
KUBERNETES_PATH = ROOT / "docs" / "kubernetes.md"
OVERLAY = ROOT / "deploy" / "kubernetes" / "overlays" / "production"

DEVICE_BYTES = 79 << 30
"""Free memory of 80 GB after the driver's part."""
HOST_BYTES = 128 << 30
"""Memory of the machine with the card."""
USUAL, MAX_RANK = Adapters(16), 64
NUM_STORES = 3
NUM_STORED = 100_000
CATALOG_BYTES = 2048
"""Maximum bytes of one adapter with one version, including indexes and its event."""
GIGABIT_BYTES = 10**9 / 8
SEQUENCE_TOKENS = 2048
FULL_SEQUENCES = 256
"""Sequences of a step, unless the card is too small."""
NAMED_TARGETS = {
    "q, v": ("q_proj", "v_proj"),
    "all linear layers": LINEAR,
    "all linear layers, embedding and head": (*LINEAR, "embed_tokens", "lm_head"),
}
RANKS = (8, 16, 32, 64)
RANK_COUNTS = (1, 2, 4, 8)
"""Processes that compute a model together."""
STAGE_COUNTS = ((2, 1), (4, 1), (2, 4), (4, 4))
"""Stages, and processes of each."""
RANK_COLUMNS = ("weights", "adapter of rank 16", "1,000 tokens")
STATES_GIB = (4, 8, 16, 32, 64)
KV_TYPES = {"auto": "bf16", "fp8": "FP8"}
QUANTIZE = {"none": "bf16", "int8": "INT8", "fp8": "FP8", "int4": "INT4"}
CHECKPOINTS: Mapping[str, Mapping[str, Any]] = {
    "NF4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
}
"""Configs of checkpoints in few bits."""
QUANTISED = ("Qwen3-0.6B", "Qwen3-4B", "Llama-3.1-8B", "Qwen2.5-14B", "Qwen3-30B-A3B")
ALPHAS = (1.0, 0.6, 0.3)
GIB = 1 << 30
NUM_ON_HOST, NUM_ON_DISK = 200, 1000
"""Adapters of one kind that fit into the pods of docs/kubernetes.md."""
PROCESS_GIB = 8
"""Memory of inference's container besides host tier and the model's files, with a reserve."""


def render() -> dict[Path, dict[str, str]]:
    """Returns the tables of each page, by name."""
    return {
        PATH: render_sizing(),
        RANKS_PATH: {"ranks": _ranks(), "stages": _stages()},
        KUBERNETES_PATH: render_kubernetes(),
    }


def render_sizing() -> dict[str, str]:
    """Returns the tables of docs/operations/sizing.md by name."""
    production = _overlay("inference.env", "LOADOUT_INFERENCE_")
    ours = _plan(LLAMA_8B, production, DEVICE_BYTES)
    larger = {"adapter_memory": "8GiB", "host_memory": "80GiB", "max_loras": "256"}
    thousand = _plan(LLAMA_8B, production | larger, DEVICE_BYTES)
    on_cpu = _plan(BENCH_200M, {"device": "cpu", "num_threads": "2"}, None)
    return {
        "images": _images(ours),
        "gpu": _side_by_side({"`production`": ours, "1,000 adapters": thousand}),
        "cards": _cards(),
        "kv": _kv_types(),
        "forms": _weight_forms(),
        "cpu": _side_by_side({"defaults, two cores": on_cpu}),
        "states": _states(),
        "hits": _hits(ours, 1000),
        "store": _stores(ours),
    }


def render_kubernetes() -> dict[str, str]:
    """Returns the tables of docs/kubernetes.md by name."""
    whole = [model for model in MODELS if not model.startswith("half")]
    lines = [_pods(model, *found) for model in whole if (found := _smallest_card(model))]
    columns = (
        *("model", "GPU", "`memory` of inference", "`ADAPTER_MEMORY`", "`HOST_MEMORY`"),
        *("adapters on GPU, host", "tokens of keys and values", "model's volume"),
        f"each store's volume, {NUM_ON_DISK:,} adapters",
    )
    return {"pods": _table(columns, lines)}


def _smallest_card(model: str) -> tuple[int, Plan] | None:
    """Returns the gigabytes and the plan of the smallest card that runs all sequences of a step and
    has room for an adapter of the maximum rank."""
    for gigabytes in CARDS:
        planned = plan_card(model, gigabytes, {"max_loras": "256"})
        if planned is None or planned.config.max_sequences < FULL_SEQUENCES:
            continue
        if planned.num_adapters("arena", Adapters(MAX_RANK)) > 0:
            return gigabytes, planned
    return None


def _pods(model: str, gigabytes: int, by_default: Plan) -> list[str]:
    image = image_bytes(by_default.layout, USUAL)
    arena_gib, host_gib = by_default.bytes_of("arena") // GIB, _gib(NUM_ON_HOST * image)
    settings = {
        "max_loras": "256",
        "adapter_memory": f"{arena_gib}GiB",
        "host_memory": f"{host_gib}GiB",
    }
    planned = _plan(MODELS[model], settings, card_bytes(gigabytes))
    weights_gib = _gib(planned.bytes_of("weights"))
    memory_gib = max(2 * host_gib, host_gib + weights_gib + PROCESS_GIB)
    held = [planned.num_adapters(area, USUAL) for area in ("arena", "host_tier")]
    # Nine tenths of the volume hold images, and half as many bytes of copies of sources.
    store_gib = _gib(NUM_ON_DISK * image * 3 // 2 * 10 // 9)
    return [
        *(model, f"{gigabytes} GB", f"{_up(memory_gib, 8)}Gi"),
        *(settings["adapter_memory"], settings["host_memory"]),
        *(f"{held[0]}, {held[1]}", f"{planned.kv_tokens:,}"),
        *(f"{weights_gib + 1}Gi", f"{_up(store_gib, 10)}Gi"),
    ]


def _gib(num_bytes: int) -> int:
    return -(-num_bytes // GIB)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def replaced(page: str, tables: Mapping[str, str]) -> str:
    """Returns the page with these tables between its marks. Raises KeyError for a missing mark."""
    for name, table in tables.items():
        mark = rf"(?<=<!-- sizes: {name} -->\n)(?:.*?\n)??(?=<!-- end -->)"
        page, count = re.subn(mark, table.replace("\\", r"\\") + "\n", page, flags=re.DOTALL)
        if count != 1:
            raise KeyError(name)
    return page


def _overlay(file: str, prefix: str) -> dict[str, str]:
    """Returns an overlay's settings by their names in the code."""
    lines = (OVERLAY / file).read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {name.removeprefix(prefix).lower(): value for name, value in pairs}


def _plan(model: Mapping[str, Any], settings: Mapping[str, str], device_bytes: int | None) -> Plan:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        config = InferenceSettings.model_validate({**settings, "model": folder})
        return plan(config, device_bytes, HOST_BYTES)


def plan_card(
    model: str, gigabytes: int, settings: Mapping[str, str] = MappingProxyType({})
) -> Plan | None:
    """Plans one of MODELS with default settings except these; None if it does not fit."""
    return _card_plan(model, gigabytes, frozenset(settings.items()))


@cache
def _card_plan(model: str, gigabytes: int, settings: Set[tuple[str, str]]) -> Plan | None:
    """Is asked by several tables and tests, and counts every tensor of a model."""
    try:
        return _plan(MODELS[model], dict(settings), card_bytes(gigabytes))
    except ValueError:
        return None


def _cards() -> str:
    lines = [
        [f"{model}, weights {human(_weights_bytes(model))}", *map(_card, plans)]
        for model in MODELS
        if any(plans := [plan_card(model, gigabytes) for gigabytes in CARDS])
    ]
    return _table(["", *(f"{gigabytes} GB" for gigabytes in CARDS)], lines)


def _kv_types() -> str:
    lines = []
    for name, model in MODELS.items():
        plans = [_plan(model, {"kv_dtype": kind}, 1 << 40) for kind in KV_TYPES]
        sizes = [planned.page_bytes // planned.config.page_size for planned in plans]
        lines.append([name, *map(human, sizes), f"{sizes[0] / sizes[1]:.2f} x"])
    return _table(["a token in", *KV_TYPES.values(), "tokens in the same memory"], lines)


def _weight_forms() -> str:
    """Returns the table of the weights' bytes on a CPU, by the form that a server holds."""
    settings = {"device": "cpu", "num_threads": "2", "memory_limit": "128GiB"}
    lines = []
    for name in QUANTISED:
        model = MODELS[name]
        plans = [_plan(model, {**settings, "quantize": form}, None) for form in QUANTIZE]
        for config in CHECKPOINTS.values():
            plans.append(_plan({**model, "quantization_config": config}, settings, None))
        lines.append([name, *(human(planned.bytes_of("weights")) for planned in plans)])
    return _table(["weights in", *QUANTIZE.values(), *CHECKPOINTS], lines)


def _weights_bytes(model: str) -> int:
    planned = _plan(MODELS[model], {}, 1 << 40)
    return planned.bytes_of("weights")


def _card(planned: Plan | None) -> str:
    if planned is None:
        return ""
    config = planned.config
    few, many = (planned.num_adapters("arena", Adapters(rank)) for rank in (16, 64))
    tokens = f"{planned.kv_tokens:,} / {config.max_sequences} / {config.max_batch_tokens}"
    return f"{tokens} / {few}, {many}"


def _table(columns: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(columns)
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def _images(planned: Plan) -> str:
    lines = [
        [name, *(human(image_bytes(planned.layout, Adapters(rank, targets))) for rank in RANKS)]
        for name, targets in NAMED_TARGETS.items()
    ]
    return _table(["LoRA on", *(f"rank {rank}" for rank in RANKS)], lines)


def _side_by_side(plans: Mapping[str, Plan]) -> str:
    columns = [_rows(planned) for planned in plans.values()]
    lines = [[name, *(column.get(name, "") for column in columns)] for name in columns[0]]
    return _table(["", *plans], lines)


def _rows(planned: Plan) -> dict[str, str]:
    sizes = {
        name: human(getattr(planned.config, name)).replace(" ", "")
        for name in ("adapter_memory", "host_memory")
    }
    given = {**sizes, "max_loras": planned.config.max_loras}
    settings = ", ".join(f"`--{name.replace('_', '-')} {value}`" for name, value in given.items())
    sequences = f"{planned.kv_tokens // SEQUENCE_TOKENS:,}"
    return {
        "set": settings,
        **dict(rows(planned, USUAL)),
        f"sequences of {SEQUENCE_TOKENS:,} tokens": sequences,
    }


def _states() -> str:
    """Returns the table of a model with recurrent layers, by the memory of a CPU's machine."""
    lines = []
    for gib in STATES_GIB:
        settings = {"device": "cpu", "num_threads": "2", "memory_limit": f"{gib}GiB"}
        planned = _plan(QWEN3_5_08B, settings, None)
        config, num_bytes = planned.config, planned.bytes_of("recurrent_states")
        numbers = (config.max_sequences, 2 * config.max_sequences, config.stored_states)
        lines.append([f"{gib} GiB", *map(str, numbers), human(num_bytes)])
    columns = ("free memory", "`--max-sequences`", "states of these", "`--stored-states`", "all")
    return _table(columns, lines)


def _ranks() -> str:
    """Returns the table of the memory of one rank, by the number of ranks."""
    lines = [
        [name, str(count), *map(human, _rank_bytes(model, count))]
        for name, model in SHARED.items()
        for count in RANK_COUNTS
    ]
    columns = ("model, bf16", "ranks", *RANK_COLUMNS)
    return _table(columns, lines)


def _stages() -> str:
    """Returns the table of the most memory that a rank of any stage has."""
    lines = [
        [name, str(num_stages), str(count), *map(human, _rank_bytes(model, count, num_stages))]
        for name, model in SHARED.items()
        for num_stages, count in STAGE_COUNTS
    ]
    columns = ("model, bf16", "stages", "ranks of each", *RANK_COLUMNS)
    return _table(columns, lines)


def _rank_bytes(model: Mapping[str, Any], count: int, num_stages: int = 1) -> Sequence[int]:
    """Returns the most bytes that a rank of any stage has of weights, of an adapter, and of keys
    and values."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        stage = of_stage(load_description(Path(folder)), 0, num_stages)
    stages = of_rank(stage, Rank(0, count)).every_stage
    layouts = [build_layout(each, "base", torch.bfloat16) for each in stages]
    return (
        max(weights_bytes(each, torch.bfloat16) for each in stages),
        max(image_bytes(layout, USUAL) for layout in layouts),
        max(kv_page_bytes(each, 1000, torch.bfloat16) for each in stages),
    )


def _hits(planned: Plan, num_adapters: int) -> str:
    on_device = planned.num_adapters("arena", USUAL)
    held = {
        f"device ({on_device})": on_device,
        f"device or host ({(both := planned.num_adapters('host_tier', USUAL))})": both,
        f"device of {NUM_STORES + 1} replicas, chosen by hash": on_device * (NUM_STORES + 1),
    }
    lines = [
        [name, *(f"{hit_share(count, num_adapters, alpha):.0%}" for alpha in ALPHAS)]
        for name, count in held.items()
    ]
    return _table(
        [f"of {num_adapters:,} adapters", *(f"alpha {alpha:g}" for alpha in ALPHAS)], lines
    )


def _stores(planned: Plan) -> str:
    settings = StoreSettings.model_validate(_overlay("adapter-store.env", "LOADOUT_STORE_"))
    image = image_bytes(planned.layout, USUAL)
    in_memory = NUM_STORES * settings.image_memory // image
    on_disk = NUM_STORES * settings.disk_cache_bytes // image
    lines = [
        ["one image, and its source in bf16", human(image)],
        ["stored sources, shared bucket", human(NUM_STORED * image)],
        ["images, shared bucket, for each layout in use", human(NUM_STORED * image)],
        ["catalog, at most", human(NUM_STORED * CATALOG_BYTES)],
        [f"memory of {NUM_STORES} replicas", _tier(settings.image_memory, in_memory)],
        [f"disks of {NUM_STORES} replicas", _tier(settings.disk_cache_bytes, on_disk)],
        ["copies of sources, each replica", human(settings.fetched_bytes)],
        ["cold loads that 10 Gbit/s carry", f"{10 * GIGABIT_BYTES / image:.0f} per second"],
        ["one cold load at 10 Gbit/s, at least", f"{1e3 * image / (10 * GIGABIT_BYTES):.0f} ms"],
    ]
    return _table([f"{NUM_STORED:,} adapters", ""], lines)


def _tier(replica_bytes: int, num_images: int) -> str:
    return f"{human(NUM_STORES * replica_bytes)}: {num_images:,} images"


def main() -> None:
    for path, tables in render().items():
        path.write_text(replaced(path.read_text(), tables))


if __name__ == "__main__":
    main()
