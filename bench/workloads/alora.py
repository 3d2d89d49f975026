"""Measures the time that an activated LoRA (aLoRA) saves as second adapter over one long context.

    python -m bench.workloads.alora [--model bench-200m] [--lengths 512,1900] [--rounds 5]
        [--out FILE]

The engine runs in this process with the prefix cache, and takes one request after the other. A
prompt is a context, then the tokens that invoke an adapter, then a few of the request's own tokens.
Each round has a new context, over which three adapters take turns. Activated adapters share the
base model's pages up to the invocation; plain ones of the same rank have their own pages.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engine import BenchEngine
from bench.kernels.roofline import THREADS
from bench.models import RANK, SHAPES, arena_bytes, kv_bytes, prepare, prompts
from bench.results import FOLDER, median, report
from bench.store.memory_store import MemoryStore
from bench.workloads.adapter_kinds import ALORA, PLAIN, adapter_folders
from inference_svc.core import EngineConfig

INVOCATION = [1, 2]
NUM_OWN, NUM_OUT, NUM_ADAPTERS = 16, 4, 3
KINDS = (ALORA, PLAIN)


def start(model: str, longest: int, num_contexts: int) -> tuple[BenchEngine, dict[str, list[str]]]:
    """Starts an engine with NUM_ADAPTERS of each kind on its device, and with room for the pages of
    all contexts."""
    prepared, store = prepare(model, 0), MemoryStore()
    originals = {kind: store.register(adapter_folders(prepared)[kind]) for kind in KINDS}
    most = NUM_ADAPTERS * len(KINDS)
    length = longest + len(INVOCATION) + NUM_OWN + NUM_OUT
    engine = BenchEngine(
        EngineConfig(
            prepared.model_dir,
            prepared.name,
            dtype="bfloat16",
            max_sequences=4,
            max_model_len=length + 16,
            kv_bytes=kv_bytes(model, (NUM_ADAPTERS + 1) * num_contexts * (length + 16)),
            arena_bytes=arena_bytes(model, 2 * most),
            max_loras=most,
            max_lora_rank=RANK,
            prefix_cache=True,
            num_threads=THREADS,
        ),
        store,
    )
    digests = {kind: engine.add_variants(one, NUM_ADAPTERS) for kind, one in originals.items()}
    for each in digests.values():
        engine.load(each)
    return engine, digests


def ask(
    engine: BenchEngine, kind: str, digest: str, context: list[int], own: list[int]
) -> tuple[float, int]:
    """Returns the seconds to the first token, and the prompt's tokens that were cached."""
    activation = len(context) if kind == ALORA else 0
    prompt = [*context, *INVOCATION, *own]
    track = engine.submit(prompt, NUM_OUT, digest, activation=activation)
    engine.wait([track])
    if track.error is not None:
        raise track.error
    assert track.usage is not None
    return track.first_token_s, track.usage.cached_prompt_tokens


def measure(model: str, lengths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    engine, digests = start(model, max(lengths), len(lengths) * (rounds + 1))
    found: dict[tuple[int, str, int], list[tuple[float, int]]] = {}
    vocab = SHAPES[model].values["vocab_size"]
    for index in range(rounds + 1):  # the first warms up
        for length in lengths:
            context, own = (
                prompts(1, n, vocab, 1000 * index + length)[0] for n in (length, NUM_OWN)
            )
            for kind in KINDS:
                for place, digest in enumerate(digests[kind]):
                    result = ask(engine, kind, digest, context, own)
                    if index:
                        found.setdefault((length, kind, place), []).append(result)
    engine.check_idle()
    engine.stop()
    return [
        {
            "context": length,
            "adapters": kind,
            "adapter": place + 1,
            "cached tokens": median([cached for _, cached in results]),
            "first token ms": 1e3 * median([seconds for seconds, _ in results]),
            "all": results,
        }
        for (length, kind, place), results in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="bench-200m")
    parser.add_argument("--lengths", default="512,1900", help="tokens of the contexts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FOLDER / "alora.json")
    options = parser.parse_args()
    rows = measure(options.model, [int(n) for n in options.lengths.split(",")], options.rounds)
    workload = {"model": options.model, "rounds": options.rounds}
    report(options.out, "several adapters over one context", workload, rows)


if __name__ == "__main__":
    main()
