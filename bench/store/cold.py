"""Times a cold adapter phase by phase, from its source to the first and the last byte of its image.

The rank-16 adapter of bench-200m (18.6 MB of fp32) comes from a local folder and from an S3 server
(moto, in its own process). The phases are the store's own steps, one after the other: fetch, check,
compile, keep the source, store (the disk tier). They are compared with sha256 of the same bytes on
one core, which check and compile need too; their goal is a third of its rate. The image is compiled
into resident memory, which the store keeps ready unless it compiles many at once. The real server
is measured end to end: RegisterAdapter, then PullAdapter at once, to the first byte and to the
last. Results are medians.

    python -m bench.store.cold [--rounds 5] [--layers 16] [--out bench/results/store_cold.json]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import torch

from adapter_store.__main__ import SWITCH_S
from adapter_store.api.convert import from_layout
from adapter_store.blobs.local import LocalBlobs
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.images.compile import Image, compile_parts
from adapter_store.images.plan.plan import IMAGE_FORMATS, plan_image
from adapter_store.images.tiers.buffers import allocate_buffer
from adapter_store.images.tiers.file import write_image
from adapter_store.sources import Sources
from adapter_store.sources.limits import FetchLimits
from adapter_store.sources.local import LocalSource
from adapter_store.sources.s3 import S3Source
from adapter_store.sources.staging import Staging
from bench.store.adapters import BENCH_200M, make_adapter, make_layout
from bench.store.process import bench_store
from contract.adapter_files import WEIGHTS_FILE
from inference_svc.host.cpus import find_processor
from loadout.demo.process import Process

BUCKET = "adapters"
GOAL = 0.33
"""Goal for the rate of check and compile, as a share of the rate of sha256 on one core."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}


class Phases:
    """Collects milliseconds by phase."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.found[name] = (time.perf_counter() - began) * 1e3


def measure_phases(sources: Sources, uri: str, folder: Path, layers: int) -> dict[str, float]:
    """Times the store's own steps for one adapter, in this process."""
    layout = replace(from_layout(make_layout(BENCH_200M, layers)), image_format=IMAGE_FORMATS[-1])
    blobs = LocalBlobs(folder)
    phases = Phases()
    with ThreadPoolExecutor(4) as threads:
        with phases.timed("fetch"):
            staging = Staging(blobs.stage(), FetchLimits(1 << 34, 1 << 34))
            sources.fetch(uri, staging)
        source = (staging.folder / WEIGHTS_FILE).read_bytes()
        with phases.timed("sha256"):
            hashlib.sha256(source)
        with phases.timed("check"):
            checkpoint = open_checkpoint(staging.folder)
        # The store keeps such memory ready for the next image of this size.
        buffer = allocate_buffer(plan_image(checkpoint, layout).total_bytes).zero_()
        with phases.timed("compile"):
            plan = plan_image(checkpoint, layout)
            parts = compile_parts(checkpoint, plan, buffer, threads=threads)
            image = Image(plan, buffer, tuple(parts))
        with phases.timed("keep the source"):
            staging.work.wait_durable()
            blobs.put(staging.folder, checkpoint.digest)
        with phases.timed("store"):
            write_image(folder / "image.safetensors", image)
    return phases.found


def measure_served(uri: str, folder: Path, layers: int, **settings: Any) -> dict[str, float]:
    """Times the real server, which already has the layout, for one adapter."""
    with bench_store(folder, env=CREDENTIALS, **settings) as store:
        layout_id = store.register_layout(make_layout(BENCH_200M, layers))
        began = time.perf_counter()
        digest = store.register("cold", uri)
        registered = time.perf_counter()
        kinds = []
        first_byte = 0.0
        for response in store.pull(digest, layout_id):
            kinds.append(response.WhichOneof("part"))
            if kinds[-1] == "chunk" and not first_byte:
                first_byte = time.perf_counter()
        ended = time.perf_counter()
        assert kinds[-1] == "trailer"
    return {
        "registered": (registered - began) * 1e3,
        "register to first byte": (first_byte - began) * 1e3,
        "first to last byte": (ended - first_byte) * 1e3,
    }


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Yields the URL of an S3 server that has the adapter."""
    ready_file = folder / "s3.json"
    process = Process(
        "s3", [sys.executable, "-m", "loadout.demo.s3", str(ready_file)], folder, ready_file
    )
    try:
        yield process.wait_ready(120)["url"]
    finally:
        process.stop(30)


def upload(url: str, adapter: Path) -> None:
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    for path in adapter.iterdir():
        client.put_object(Bucket=BUCKET, Key=f"cold/{path.name}", Body=path.read_bytes())


def measure(rounds: int, layers: int) -> dict[str, Any]:
    os.environ.update(CREDENTIALS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source_bytes = make_adapter(folder / "cold", BENCH_200M, layers)
        with s3_server(folder) as url:
            upload(url, folder / "cold")
            sources = Sources(
                {"file": LocalSource([folder]), "s3": S3Source([BUCKET], url, "us-east-1")}
            )
            uris = {"local folder": f"file://{folder}/cold", "S3": f"s3://{BUCKET}/cold"}
            found: dict[str, dict[str, list[float]]] = {source: {} for source in uris}
            for index in range(rounds + 1):
                for source, uri in uris.items():
                    steps = folder / f"steps-{source}-{index}"
                    steps.mkdir()
                    times = measure_phases(sources, uri, steps, layers) | measure_served(
                        uri,
                        folder,
                        layers,
                        data_dir=str(folder / f"data-{source}-{index}"),
                        s3_buckets=BUCKET,
                        s3_endpoint_url=url,
                        s3_region="us-east-1",
                    )
                    for phase, milliseconds in times.items():
                        if index:  # the first warms up
                            found[source].setdefault(phase, []).append(milliseconds)
    medians = {
        source: {phase: statistics.median(values) for phase, values in phases.items()}
        for source, phases in found.items()
    }
    return {
        "source_bytes": source_bytes,
        "milliseconds": medians,
        "check_and_compile": {
            source: {
                "mb_per_second": source_bytes / took_ms / 1e3,
                "of_sha256": medians[source]["sha256"] / took_ms,
            }
            for source, phases in medians.items()
            for took_ms in (phases["check"] + phases["compile"],)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("bench/results/store_cold.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)  # as the store does
    result = measure(arguments.rounds, arguments.layers)
    for source, phases in result["milliseconds"].items():
        print(f"{source}, {result['source_bytes'] / 1e6:.1f} MB")
        for phase, milliseconds in phases.items():
            print(f"  {phase:24} {milliseconds:8.1f} ms")
        rate = result["check_and_compile"][source]
        print(f"  check + compile          {rate['mb_per_second']:8.0f} MB/s of source")
        print(f"  share of sha256 on a core {rate['of_sha256']:8.2f} (goal {GOAL})")
    machine = str(find_processor())
    report = {"workload": "store cold", "machine": machine, "layers": arguments.layers}
    arguments.out.write_text(json.dumps(report | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
