"""W1: 16 requests at once, 64 tokens in, 32 out, greedy; output tokens per second.

Ours, transformers (base) and PEFT (adapters) in one process, interleaved, two threads, bf16; our
prefix cache is off and nobody stops at an end token. Medians over the rounds and their ratios.

    python -m bench.w1 [--rounds 5] [--out bench/results/w1.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from rich.console import Console
from rich.table import Table

from bench.models import NAME, make_adapter, make_model, prompts
from inference_svc.core import Command, LayoutAccepted
from inference_svc.engine.config import EngineConfig
from inference_svc.engine.handle import EngineThread
from tests.together.engines import CompilingStore, Running

NUM_REQUESTS, NUM_IN, NUM_OUT = 16, 64, 32
ADAPTER_COUNTS = (0, 1, 4, 16)
THREADS = 2


def start_ours(model_dir: Path, adapter_dirs: list[Path]) -> Running:
    """Our engine with every adapter resident."""
    store = CompilingStore()
    digests = {str(i): store.register(folder) for i, folder in enumerate(adapter_dirs)}
    config = EngineConfig(
        model_dir,
        NAME,
        dtype="bfloat16",
        max_sequences=NUM_REQUESTS,
        max_batch_tokens=NUM_REQUESTS * NUM_IN,
        prefix_cache=False,
        num_threads=THREADS,
    )
    engine = EngineThread(config, store)
    running = Running(engine, store, digests)
    engine.start(running.hear)
    engine.send(LayoutAccepted(store.register_layout(engine.layout)))
    for name in digests:
        assert running.call(Command.LOAD, name).error is None
    return running


def run_ours(running: Running, num_adapters: int) -> None:
    running.outputs.clear()
    for index, prompt in enumerate(prompts(NUM_REQUESTS, NUM_IN)):
        adapter = str(index % num_adapters) if num_adapters else ""
        running.submit(f"{index}", prompt, adapter, max_tokens=NUM_OUT)
    for index in range(NUM_REQUESTS):
        tokens, last = running.result(f"{index}")
        assert last.error is None
        assert len(tokens) == NUM_OUT


def run_peer(model: PeftModel, num_adapters: int) -> None:
    """One adapter takes PEFT's fast way, without a name per row."""
    options: dict[str, Any] = {
        "max_new_tokens": NUM_OUT,
        "min_new_tokens": NUM_OUT,
        "do_sample": False,
        "pad_token_id": 0,
    }
    batch = torch.tensor(prompts(NUM_REQUESTS, NUM_IN))
    options["attention_mask"] = torch.ones_like(batch)
    with torch.inference_mode():
        if num_adapters == 0:
            with model.disable_adapter():
                out = model.generate(input_ids=batch, **options)
        elif num_adapters == 1:
            model.set_adapter("0")
            out = model.generate(input_ids=batch, **options)
        else:
            names = [str(i % num_adapters) for i in range(NUM_REQUESTS)]
            out = model.generate(input_ids=batch, adapter_names=names, **options)
    assert out.shape == (NUM_REQUESTS, NUM_IN + NUM_OUT)


def load_peer(model_dir: Path, adapter_dirs: list[Path]) -> PeftModel:
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, adapter_dirs[0], adapter_name="0")
    for index, folder in enumerate(adapter_dirs[1:], start=1):
        model.load_adapter(folder, adapter_name=str(index))
    return model.to(torch.bfloat16).eval()


def tokens_per_second(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return NUM_REQUESTS * NUM_OUT / (time.perf_counter() - began)


def measure(rounds: int) -> dict[str, Any]:
    """Rates per adapter count and side: one warm-up, then `rounds` interleaved rounds."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_model(root / "model")
        adapter_dirs = [root / f"adapter-{i}" for i in range(max(ADAPTER_COUNTS))]
        for index, adapter_dir in enumerate(adapter_dirs):
            make_adapter(root / "model", adapter_dir, seed=index)
        peer = load_peer(root / "model", adapter_dirs)
        ours = start_ours(root / "model", adapter_dirs)
        rates: dict[str, Any] = {str(n): {"ours": [], "peer": []} for n in ADAPTER_COUNTS}
        for round_index in range(rounds + 1):
            for count in ADAPTER_COUNTS:
                ours_rate = tokens_per_second(lambda n=count: run_ours(ours, n))  # type: ignore[misc]
                peer_rate = tokens_per_second(lambda n=count: run_peer(peer, n))  # type: ignore[misc]
                if round_index:
                    rates[str(count)]["ours"].append(ours_rate)
                    rates[str(count)]["peer"].append(peer_rate)
        ours.engine.stop()
    return rates


def show(rates: dict[str, Any]) -> None:
    table = Table("adapters", "ours tok/s", "transformers / PEFT tok/s", "ratio", title="W1")
    for count, sides in rates.items():
        ours, peer = (statistics.median(sides[side]) for side in ("ours", "peer"))
        table.add_row(count, f"{ours:.0f}", f"{peer:.0f}", f"{ours / peer:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench/results/w1.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    rates = measure(arguments.rounds)
    show(rates)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    result = {"workload": "W1", "machine": machine, "versions": versions}
    arguments.out.write_text(json.dumps(result | {"rates": rates}, indent=1) + "\n")


if __name__ == "__main__":
    main()
