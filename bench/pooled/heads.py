"""The time of a text with one adapter that has a head of its own, and with 1,024.

    python -m bench.pooled.heads [--n 1 1024] [--seconds 20] [--rounds 3] [--out FILE]

all-MiniLM-L6-v2 in bf16 with `--classifiers`, as both services serve it over gRPC. Each adapter has
LoRA of queries and values and a head of 2 to 9 labels. A call classifies one text of 64 tokens, by
an adapter that is drawn anew. The capacity of one adapter is measured with as many callers as the
engine has sequences; then calls arrive at half of it, at random times, for any number of
adapters. All are resident. A call's time begins when it was due. Rounds take turns over n; results
are medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file, save_file

from bench.pooled.texts import Ours, make_texts, prepare
from bench.results import FOLDER, median, percentile, report
from loadout import AsyncClient

NUM_TOKENS, RANK, NUM_CALLERS, CAPACITY_S = 64, 8, 64, 5.0
LABELS = range(2, 10)
WEIGHTS = "adapter_model.safetensors"


def make_adapters(model_dir: Path, folder: Path, count: int) -> dict[str, Path]:
    """Returns the folders of so many adapters, by name: PEFT saves one, and others have its names
    with random numbers."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(model_dir)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=RANK, target_modules=["query", "value"])
    peft.get_peft_model(model, config).save_pretrained(folder / "first")
    first = load_file(folder / "first" / WEIGHTS)
    settings = (folder / "first" / "adapter_config.json").read_bytes()
    made = {}
    for index in range(count):
        rng, num_labels = np.random.default_rng(index), LABELS[index % len(LABELS)]
        tensors = {}
        for name, tensor in first.items():
            shape = (num_labels, *tensor.shape[1:]) if "classifier" in name else tensor.shape
            tensors[name] = (0.05 * rng.standard_normal(shape)).astype(np.float32)
        made[f"adapter-{index}"] = path = folder / f"adapter-{index}"
        path.mkdir()
        (path / "adapter_config.json").write_bytes(settings)
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return made


class Calls:
    """Calls of one client, whose adapters and texts come from `rng`."""

    def __init__(self, client: AsyncClient, names: Sequence[str], texts: Sequence[str]) -> None:
        self._client = client
        self._names = names
        self._texts = texts

    async def call(self, rng: np.random.Generator) -> None:
        index = int(rng.integers(len(self._names)))
        text = self._texts[int(rng.integers(len(self._texts)))]
        [found] = await self._client.classify([text], adapter=self._names[index])
        assert len(found.probabilities) == LABELS[index % len(LABELS)]

    async def load_all(self) -> None:
        for index in range(0, len(self._names), NUM_CALLERS):
            some = self._names[index : index + NUM_CALLERS]
            await asyncio.gather(
                *(self._client.classify(self._texts[:1], adapter=name) for name in some)
            )

    async def capacity(self, seconds: float) -> float:
        """Returns how many calls end in a second if each caller waits for its own."""
        end_s, count = time.perf_counter() + seconds, 0

        async def caller(seed: int) -> None:
            nonlocal count
            rng = np.random.default_rng(seed)
            while time.perf_counter() < end_s:
                await self.call(rng)
                count += 1

        await asyncio.gather(*map(caller, range(NUM_CALLERS)))
        return count / seconds

    async def times(self, per_second: float, seconds: float, seed: int) -> list[float]:
        """Returns the seconds of calls that arrive at random times, so many per second."""
        rng, taken = np.random.default_rng(seed), []
        due_s, end_s = time.perf_counter(), time.perf_counter() + seconds

        async def timed(due_s: float, seed: int) -> None:
            await self.call(np.random.default_rng(seed))
            taken.append(time.perf_counter() - due_s)

        async with asyncio.TaskGroup() as tasks:
            while (due_s := due_s + rng.exponential(1 / per_second)) < end_s:
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                tasks.create_task(timed(due_s, int(rng.integers(1 << 31))))
        return taken


async def measure(ours: Ours, texts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the capacity of one adapter, and the times of each round by the number of
    adapters."""
    addresses = ours.addresses
    client = AsyncClient(inference=addresses.inference, store=addresses.store, timeout_s=None)
    async with client:
        calls = {
            n: Calls(client, [f"adapter-{index}" for index in range(n)], texts) for n in options.n
        }
        for each in calls.values():
            await each.load_all()
        one = Calls(client, ["adapter-0"], texts)
        await one.capacity(1.0)
        capacity = await one.capacity(CAPACITY_S)
        found: dict[int, list[list[float]]] = {n: [] for n in options.n}
        for index in range(options.rounds):
            for n, each in calls.items():
                found[n].append(await each.times(capacity / 2, options.seconds, index))
    return {"capacity": capacity, "times": found}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, nargs="+", default=(1, 1024))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=FOLDER / "pooled_heads.json")
    options = parser.parse_args(arguments)
    model_dir = prepare(Path(".bench/minilm"))
    texts, most = make_texts(model_dir, NUM_TOKENS), max(options.n)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        adapters = make_adapters(model_dir, folder, most)
        sizes = f"--max-loras {most} --max-sequences {NUM_CALLERS} --adapter-memory 1GiB"
        with Ours(model_dir, adapters, folder, ["--classifiers", *sizes.split()]) as ours:
            found = asyncio.run(measure(ours, texts, options))
    rows = []
    for n, rounds in found["times"].items():
        facts = {"adapters": n, "calls": sum(map(len, rounds))}
        shares = {
            f"p{percent} ms": median([1000 * percentile(each, percent) for each in rounds])
            for percent in (50, 95, 99)
        }
        rows.append({**facts, **shares, "all": rounds})
    workload = {"capacity": found["capacity"], "seconds": options.seconds, "tokens": NUM_TOKENS}
    print(json.dumps(workload))
    report(options.out, "classify with heads of adapters", workload, rows)


if __name__ == "__main__":
    main()
