"""Compares the cost of each kind of adapter with plain ones: 16 requests, 64 tokens in, 32 out.

    python -m bench.workloads.adapter_kinds [--model bench-200m] [--rounds 5] [--kinds dora,rows]
        [--out FILE]

The engine runs in this process, over a store in memory. Within a round the kinds take turns, in
reverse order every other round. Plain adapters run twice, as two sets of the same shape: their
difference is the accuracy of a ratio. All adapters have LoRA of rank 16 on every linear layer, and
the addition of their kind. Both parts of a sum have that LoRA, and `lora of rank 32` has as much in
one adapter. Requests share one adapter, or each has its own. A decode step's time is the median
over the steps after all prompts.

The images give the bytes that a step reads in addition to plain adapters. `explained` is the time
to read them at the machine's memory rate, as a share of the step's additional time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.engine import BenchEngine, Track
from bench.kernels.roofline import THREADS, read_rate
from bench.models import (
    RANK,
    SHAPES,
    Prepared,
    decoder,
    kv_bytes,
    prepare,
    prepare_adapter,
    prompts,
)
from bench.results import FOLDER, median, report
from bench.store.memory_store import MemoryStore
from contract.images.header import ImageHeader
from contract.images.segment_kinds import LORA_KINDS, REPLACED_KINDS
from inference_svc.core import AdapterKey, EngineConfig, Part, Sum

NUM_REQUESTS, NUM_IN, NUM_OUT = 16, 64, 32
PLAIN, AGAIN, WIDE, SUM = "lora", "lora again", "lora of rank 32", "sum of two"
ALORA = "alora"
ROWS = 32
WARM_UP = 4
"""Decode steps that do not count, because other requests still compute their prompts."""


@dataclass(frozen=True, slots=True)
class Case:
    """Requests for adapters of one kind: all share one, or each has its own."""

    kind: str
    num_distinct: int


def options_of(name: str) -> dict[str, dict[str, Any]]:
    """Returns the options of each kind in addition to LoRA on all linear layers."""
    rows = list(range(0, 2 * ROWS, 2))
    return {
        PLAIN: {},
        "bias of B": {"lora_bias": True},
        "rows": {"trainable_token_indices": {"embed_tokens": rows, "lm_head": rows}},
        "norms": {"modules_to_save": ["norm", "input_layernorm", "post_attention_layernorm"]},
        "dora": {"use_dora": True},
        "head": {"modules_to_save": ["lm_head"]},
        "embedding": {"modules_to_save": ["embed_tokens"]},
        ALORA: {"alora_invocation_tokens": [1, 2], "task_type": "CAUSAL_LM"},
        WIDE: {"rank": 2 * RANK},
    }


def adapter_folders(prepared: Prepared) -> dict[str, Path]:
    """Returns an adapter of each kind, and makes missing ones."""
    folders = {}
    for number, (kind, options) in enumerate(options_of(prepared.name).items()):
        folders[kind] = folder = prepared.model_dir.parent / f"cost-{kind.replace(' ', '-')}"
        prepare_adapter(prepared, folder, number, **options)
    return folders


class Bench:
    """An engine that has all adapters on its device."""

    def __init__(self, prepared: Prepared) -> None:
        store = MemoryStore()
        originals = {
            kind: store.register(folder) for kind, folder in adapter_folders(prepared).items()
        }
        largest = 2 * decoder(prepared.name).vocab_size * decoder(prepared.name).hidden_size
        most = (len(originals) + 1) * NUM_REQUESTS
        self.engine = BenchEngine(
            EngineConfig(
                prepared.model_dir,
                prepared.name,
                dtype="bfloat16",
                max_sequences=NUM_REQUESTS,
                max_model_len=512,
                kv_bytes=kv_bytes(prepared.name, NUM_REQUESTS * (NUM_IN + NUM_OUT + 32)),
                arena_bytes=2 * NUM_REQUESTS * largest
                + sum(path.stat().st_size for path in _weights(store)) * NUM_REQUESTS * 11 // 10,
                max_loras=most,
                max_lora_rank=2 * RANK,
                prefix_cache=False,
                num_threads=THREADS,
            ),
            store,
        )
        digests = {
            kind: self.engine.add_variants(digest, (1 + (kind == PLAIN)) * NUM_REQUESTS)
            for kind, digest in originals.items()
        }
        for each in originals:
            self.engine.load(digests[each])
        plain = digests[PLAIN]
        digests[PLAIN], digests[AGAIN] = plain[:NUM_REQUESTS], plain[NUM_REQUESTS:]
        self.headers = {kind: store.header(digest) for kind, digest in originals.items()}
        self.keys: dict[str, list[AdapterKey]] = {kind: [*each] for kind, each in digests.items()}
        self.keys[SUM] = [
            Sum((Part(one, 1.0), Part(other, 1.0)))
            for one, other in zip(digests[PLAIN], digests[AGAIN], strict=True)
        ]
        self.prompts = prompts(NUM_REQUESTS, NUM_IN, prepared.vocab)

    def run(self, case: Case) -> tuple[float, float]:
        """Returns output tokens per second, and the seconds of a decode step."""
        keys = (self.keys[case.kind][: case.num_distinct] * NUM_REQUESTS)[:NUM_REQUESTS]
        activation = 2 if case.kind == ALORA else 0
        tracks = [
            self.engine.submit(prompt, NUM_OUT, key, activation=activation)
            for prompt, key in zip(self.prompts, keys, strict=True)
        ]
        self.engine.wait(tracks)
        for track in tracks:
            if track.error is not None:
                raise track.error
        start_s = min(track.sent_s for track in tracks)
        end_s = max(track.token_times_s[-1] for track in tracks)
        return NUM_REQUESTS * NUM_OUT / (end_s - start_s), median(list(_steps(tracks)))

    def extra_bytes(self, case: Case) -> int:
        """Returns the bytes that a decode step reads in addition to plain adapters."""
        plain = _bytes_of_lora(self.headers[PLAIN])
        if case.kind == SUM:
            return case.num_distinct * plain
        header = self.headers.get(case.kind, self.headers[PLAIN])
        return case.num_distinct * (_bytes_of_lora(header) - plain + _bytes_of_others(header))


def _weights(store: MemoryStore) -> Iterator[Path]:
    for folder in store.folders.values():
        yield folder / "adapter_model.safetensors"


def _steps(tracks: Sequence[Track]) -> Iterator[float]:
    last = max(tracks, key=lambda track: track.token_times_s[0])
    times_s = last.token_times_s[WARM_UP:]
    for before_s, after_s in pairwise(times_s):
        yield after_s - before_s


def _bytes_of_lora(header: ImageHeader) -> int:
    return sum(each.length_bytes for each in header.segments if each.kind in LORA_KINDS)


def _bytes_of_others(header: ImageHeader) -> int:
    """Returns the bytes that a step reads of segments other than A and B.

    An embedding, which comes first, does not count: a step reads only a row of it for each token.
    """
    embedding = header.segments[0].target if header.segments[0].kind in REPLACED_KINDS else None
    return sum(
        each.length_bytes
        for each in header.segments
        if each.kind not in LORA_KINDS and each.target != embedding
    )


def measure(model: str, rounds: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    bench = Bench(prepare(model, 0))
    chosen = [PLAIN, *(kind for kind in bench.keys if kind in kinds and kind != PLAIN)]
    chosen = [*(kind for kind in chosen if kind != AGAIN), AGAIN]
    cases = [Case(kind, count) for count in (1, NUM_REQUESTS) for kind in chosen]
    found: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    for index in range(rounds + 1):  # the first warms up
        for case in cases[:: 1 if index % 2 else -1]:
            result = bench.run(case)
            if index:
                found[case].append(result)
    rate = read_rate()
    bench.engine.stop()
    return [
        summary(case, found[case], found[Case(PLAIN, case.num_distinct)], bench, rate)
        for case in cases
    ]


def summary(
    case: Case,
    runs: Sequence[tuple[float, float]],
    plain: Sequence[tuple[float, float]],
    bench: Bench,
    rate: float,
) -> dict[str, Any]:
    """Returns a case's row, with ratios within the same round."""
    rates, steps_s = zip(*runs, strict=True)
    plain_rates, plain_steps_s = zip(*plain, strict=True)
    extra_s = median([a - b for a, b in zip(steps_s, plain_steps_s, strict=True)])
    extra_bytes = bench.extra_bytes(case)
    return {
        "adapters": case.num_distinct,
        "kind": case.kind,
        "tokens/s": median(rates),
        "of plain": median([a / b for a, b in zip(rates, plain_rates, strict=True)]),
        "step ms": 1e3 * median(steps_s),
        "step of plain": median([a / b for a, b in zip(steps_s, plain_steps_s, strict=True)]),
        "reads more, MB": extra_bytes / 1e6,
        "explained": extra_bytes / rate / extra_s if extra_s > 0.0001 else None,
        "all": list(runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="bench-200m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", help="kinds to measure (default: all)")
    parser.add_argument("--out", type=Path, default=FOLDER / "adapter_kinds.json")
    options = parser.parse_args()
    every = [*options_of(options.model), SUM]
    kinds = options.kinds.split(",") if options.kinds else every
    rows = measure(options.model, options.rounds, kinds)
    workload = {"model": options.model, "rounds": options.rounds}
    report(options.out, "kinds of adapters", workload, rows)


if __name__ == "__main__":
    main()
