"""Answers about images: ours over gRPC, beside transformers and PEFT in their own process.

    python -m bench.images.compare [--shape smolvlm-256m] [--tiles 1] [--dtype float32]
        [--rounds 5] [--out FILE]

Both compute a random model of SmolVLM's shape, on as many threads, and decode each file themselves;
in fp32 their tokens are equal. No image is sent twice, so that none is found again. Systems run in
turns; results are medians, and how many times as fast ours are:

* the first token of one request with an image,
* tokens per second of 8 requests, each with an image, for 4 adapters: PEFT computes them in one
  mixed batch, and in a batch for each adapter, of which the faster one counts,
* ours alone: the 99th percentile between tokens of requests of text, while others' images are
  computed and while none are.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any, Self

from bench.images.model import (
    ADAPTERS,
    QUESTION,
    RANK,
    SHAPES,
    Shape,
    make_adapters,
    make_image,
    make_model,
)
from bench.kernels.roofline import THREADS
from bench.results import FOLDER, median, percentile, report
from bench.systems.worker import Worker
from loadout import Client
from loadout.demo.system import System, SystemSettings
from servicekit import interpreter_gc

BASE = "images"
NUM_REQUESTS, NUM_OUT, NUM_CHECKED = 8, 32, 8
NUM_TEXTS, TEXT_OUT = 4, 96
"""Requests of text beside images, and the tokens of each."""
NUM_AHEAD = 4
"""Images that are made before texts are measured, so that making them takes no time of a step."""


class Ours:
    """Both services, as `loadout up` starts them, within the context."""

    def __init__(
        self, model_dir: Path, adapters: dict[str, Path], folder: Path, dtype: str
    ) -> None:
        flags = {
            "--num-threads": THREADS,
            "--max-model-len": 2048,
            "--max-rank": RANK,
            "--kv-memory": 1 << 30,
            "--dtype": dtype,
            "--device": "cpu",
            "--log-level": "warning",
        }
        settings = SystemSettings(
            model_dir,
            BASE,
            source_roots=(folder.resolve(),),
            store_flags=("--log-level", "warning"),
            inference_flags=tuple(str(word) for flag in flags.items() for word in flag),
        )
        self._adapters = adapters
        self._exits = ExitStack()
        self._system = System(settings, folder / "system")

    def __enter__(self) -> Self:
        addresses = self._exits.enter_context(self._system).addresses
        made = Client(inference=addresses.inference, store=addresses.store, timeout_s=None)
        self._client = self._exits.enter_context(made)
        for name, path in self._adapters.items():
            # The server may not have announced its model yet.
            found = self._client.register(name, f"file://{path.resolve()}", base_model=BASE)
            revision = found.revision
            options: Any = {"min_revision": revision, "max_tokens": 1}
            self._client.complete("a", adapter=name, **options)
        self._callers = self._exits.enter_context(ThreadPoolExecutor(NUM_REQUESTS))
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.close()

    def run(self, files: Sequence[bytes], adapters: Sequence[str], num_out: int) -> dict[str, Any]:
        """Returns the seconds and the tokens of requests that are sent at once."""
        began_s = time.perf_counter()
        calls = [
            self._callers.submit(self._answer, file, adapter, num_out)
            for file, adapter in zip(files, adapters, strict=True)
        ]
        tokens = [each.result() for each in calls]
        return {"seconds": time.perf_counter() - began_s, "tokens": tokens}

    def _answer(self, file: bytes, adapter: str, num_out: int) -> list[int]:
        message: Any = {"role": "user", "content": QUESTION, "images": [{"data": file}]}
        done = self._client.complete([message], adapter=adapter, **_greedy(num_out))
        return list(done.token_ids)

    def gaps(self, files: Iterator[bytes] | None) -> list[float]:
        """Returns the seconds between tokens of requests of text, while a request for one token
        with an image follows the other, if there are `files`."""
        is_done = threading.Event()
        texts = [self._callers.submit(self._gaps_of_text, index) for index in range(NUM_TEXTS)]

        def send_images() -> None:
            for file in files or ():
                if is_done.is_set():
                    return
                self._answer(file, "", 1)

        images = self._callers.submit(send_images)
        try:
            found = [gap for each in texts for gap in each.result()]
        finally:
            is_done.set()
        images.result()
        return found

    def _gaps_of_text(self, index: int) -> list[float]:
        times = []
        with self._client.generate(f"{index} {QUESTION}", **_greedy(TEXT_OUT)) as stream:
            for chunk in stream:
                times += [time.perf_counter()] * bool(chunk.token_ids)
        return [after - before for before, after in pairwise(times)]


class Peer:
    """transformers and PEFT within the context."""

    def __init__(
        self, shape: Shape, model_dir: Path, adapters: dict[str, Path], log: Path, dtype: str
    ) -> None:
        command = [sys.executable, "-m", "bench.images.peer"]
        variables = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
        self._worker = Worker("PEFT", command, log, variables)
        folders = {name: str(path) for name, path in adapters.items()}
        self._worker.ask(
            "load",
            model_dir=str(model_dir),
            adapters=folders,
            tokens=shape.tile_tokens,
            dtype=dtype,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.__exit__(None, None, None)

    def run(self, files: Sequence[bytes], adapters: Sequence[str], num_out: int) -> dict[str, Any]:
        """Returns the seconds and the tokens of one batch, once the process is idle again."""
        sent = [base64.b64encode(each).decode() for each in files]
        found: dict[str, Any] = self._worker.ask(
            "run", files=sent, adapters=list(adapters), count=num_out
        )
        self._worker.wait_for_rest()
        return found


def _greedy(num_out: int) -> Any:
    return {"temperature": 0.0, "max_tokens": num_out, "ignore_eos": True}


def check(ours: Ours, peer: Peer, file: bytes, dtype: str) -> None:
    """Raises AssertionError unless both have the same tokens in fp32, for each adapter. Also warms
    up."""
    for adapter in ("", *ADAPTERS):
        found, expected = (each.run([file], [adapter], NUM_CHECKED) for each in (ours, peer))
        is_equal = found["tokens"] == expected["tokens"] or dtype != "float32"
        assert is_equal, f"other tokens with {adapter or 'no adapter'}"


def first_tokens(ours: Ours, peer: Peer, files: Iterator[bytes], rounds: int) -> dict[str, Any]:
    """Returns the row of the first token, in milliseconds."""
    found: dict[str, list[float]] = {"ours": [], "PEFT": []}
    for index in range(rounds):
        file, adapter = [next(files)], [ADAPTERS[index % len(ADAPTERS)]]
        found["ours"].append(ours.run(file, adapter, 1)["seconds"])
        found["PEFT"].append(peer.run(file, adapter, 1)["seconds"])
    own, other = (1e3 * median(each) for each in found.values())
    return _row("first token, ms", own, other, other / own, found)


def rates(ours: Ours, peer: Peer, files: Iterator[bytes], rounds: int) -> dict[str, Any]:
    """Returns the row of 8 requests for 4 adapters, in tokens per second."""
    found: dict[str, list[float]] = {"ours": [], "mixed": [], "apart": []}
    adapters = list(ADAPTERS) * (NUM_REQUESTS // len(ADAPTERS))
    for _ in range(rounds):
        sent = [next(files) for _ in adapters]
        found["ours"].append(ours.run(sent, adapters, NUM_OUT)["seconds"])
        found["mixed"].append(peer.run(sent, adapters, NUM_OUT)["seconds"])
        parts = [
            [file for file, name in zip(sent, adapters, strict=True) if name == each]
            for each in ADAPTERS
        ]
        done = [
            peer.run(part, [name] * len(part), NUM_OUT)["seconds"]
            for part, name in zip(parts, ADAPTERS, strict=True)
        ]
        found["apart"].append(sum(done))
    num_tokens = NUM_REQUESTS * NUM_OUT
    own = num_tokens / median(found["ours"])
    other = num_tokens / min(median(found["mixed"]), median(found["apart"]))
    return _row("8 requests, tokens/s", own, other, own / other, found)


def beside(ours: Ours, files: Iterator[bytes], rounds: int) -> dict[str, Any]:
    """Returns the row of text beside images, in milliseconds: with images, and without."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    ours.gaps(None)
    for _ in range(rounds):
        ahead = [next(files) for _ in range(NUM_AHEAD)]
        found["without"].append(percentile(ours.gaps(None), 99))
        found["with"].append(percentile(ours.gaps(chain(ahead, files)), 99))
    own, other = (1e3 * median(found[name]) for name in ("with", "without"))
    return _row("p99 between tokens beside images, and alone, ms", own, other, own / other, found)


def _row(name: str, own: float, other: float, times: float, found: Any) -> dict[str, Any]:
    return {"measured": name, "ours": own, "beside": other, "times": times, "all": found}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="smolvlm-256m")
    parser.add_argument("--tiles", type=int, default=1, help="tiles each side of an image")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FOLDER / "images.json")
    options = parser.parse_args(arguments)
    shape = SHAPES[options.shape]
    files = (make_image(shape, options.tiles, seed) for seed in count())
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        folder = Path(scratch)
        make_model(shape, options.tiles, folder / "model")
        adapters = make_adapters(folder / "model", folder / "adapters")
        read = folder / "model", adapters
        peer = running.enter_context(Peer(shape, *read, folder / "peer.log", options.dtype))
        ours = running.enter_context(Ours(*read, folder, options.dtype))
        check(ours, peer, next(files), options.dtype)
        # A collection among torch's and transformers' objects stops all streams for 0.1 s, which a
        # percentile of a few hundred gaps shows as the server's.
        interpreter_gc.resume()
        rows = []
        for measure in (
            lambda: first_tokens(ours, peer, files, options.rounds),
            lambda: rates(ours, peer, files, options.rounds),
            lambda: beside(ours, files, options.rounds),
        ):
            rows.append(measure())
            print(rows[-1], flush=True)
    workload = {
        "shape": options.shape,
        "tiles": options.tiles,
        "dtype": options.dtype,
        "threads": THREADS,
        "rounds": options.rounds,
    }
    report(options.out, "images", workload, rows)


if __name__ == "__main__":
    main()
