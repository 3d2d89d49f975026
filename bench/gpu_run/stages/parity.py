"""Compares the whole engine's tokens with tokens recorded on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_run.context import Context, Found
from bench.gpu_run.pack.store import (
    PackStore,
    Recorded,
    RunningEngine,
    engine_config,
    generate,
    make_store,
    read_manifest,
    read_recorded,
)
from inference_svc.core import EngineConfig
from inference_svc.engine.transport.process import EngineProcess
from inference_svc.engine.transport.thread import EngineThread

HOST_BYTES = 16 << 20
MIN_SHARE = 0.99
"""Minimum share of equal greedy requests, because rounding decides between equally likely
tokens."""
NUM_SHOWN = 5


def run(context: Context) -> Found:
    """Runs the stage. Raises AssertionError if too many tokens differ."""
    manifest = read_manifest(context.pack)
    recorded = _chosen(context)
    found: Found = {"pack": manifest["made"], "adapters": len(manifest["adapters"])}
    engines = {"thread": start_engine}
    if not context.is_emulated:
        engines["process"] = _process  # the engine's own process would not be emulated
    for name, make in engines.items():
        requests = [each.request for each in recorded]
        tokens = generate(make(context), requests, max(1.0, context.deadline.left_s))
        found[name] = compare(recorded, tokens)
        context.save(found)
        assert found[name]["greedy_share"] >= MIN_SHARE, f"engine in a {name}: {found[name]}"
    return found


def _chosen(context: Context) -> list[Recorded]:
    """Returns recorded requests, limited to the sizes' numbers of requests and tokens."""
    sizes, chosen = context.sizes, []
    for request, token_ids in read_recorded(context.pack)[: sizes.parity_requests]:
        # A request that asked for fewer tokens is recorded with these alone.
        most = min(request.sampling.max_tokens, sizes.parity_tokens)
        sampling = replace(request.sampling, max_tokens=most)
        chosen.append(Recorded(replace(request, sampling=sampling), token_ids[:most]))
    return chosen


def _config(context: Context) -> EngineConfig:
    others: dict[str, Any] = {"host_bytes": HOST_BYTES}
    if context.is_emulated:
        others |= {"record_steps": False, "max_sequences": 4, "max_batch_tokens": 64}
    return engine_config(context.pack, str(context.device), **others)


def start_engine(context: Context) -> RunningEngine:
    """Returns an engine in a thread of this process, with its model loaded."""
    return EngineThread(_config(context), make_store(context.pack))


def _process(context: Context) -> RunningEngine:
    return EngineProcess(_config(context), partial(store_of_child, context.pack)).load()


def store_of_child(pack: Path, post: Callable[[Any], None]) -> PackStore:
    return make_store(pack)


def compare(recorded: list[Recorded], tokens: dict[str, tuple[int, ...]]) -> Found:
    """Returns the shares of greedy and of sampled requests with the recorded tokens, and some of
    the other requests."""
    same: dict[bool, list[bool]] = {True: [], False: []}
    different = []
    for request, wanted in recorded:
        got = tokens[request.request_id]
        same[request.sampling.temperature == 0].append(got == wanted)
        if got != wanted:
            different.append({"request": request.request_id, "wanted": wanted, "got": got})
    return {
        "requests": len(recorded),
        "greedy_share": _share(same[True]),
        "sampled_share": _share(same[False]),
        "different": different[:NUM_SHOWN],
    }


def _share(same: list[bool]) -> float | None:
    return sum(same) / len(same) if same else None
