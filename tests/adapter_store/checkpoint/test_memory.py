"""Memory of taking in and compiling a large adapter, measured in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support import forks

pytestmark = pytest.mark.processes

RANK, FEATURES, TARGETS = 256, 16384, 6
LARGEST_BYTES = RANK * FEATURES * 4
SOURCE_BYTES = 2 * TARGETS * LARGEST_BYTES
IMAGE_BYTES = SOURCE_BYTES // 2  # compiled to bf16

SCRIPT = f"""
import json, sys
from pathlib import Path
from adapter_store.checkpoint.open import open_checkpoint
from contract.images.dtypes import DataType
from contract.images.layouts import Layout
from contract.images.targets import Target, TargetKind
from adapter_store.images.compile import compile_image
from adapter_store.sources.limits import FetchLimits
from adapter_store.sources.staging import Staging
from adapter_store.sources.local import LocalSource

def peak(start=False):
    if start:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10

def register(source, staged):
    staged.mkdir()
    staging = Staging(staged, FetchLimits(1 << 40, 1 << 40))
    LocalSource([source]).fetch(source.as_uri(), staging)
    return open_checkpoint(staged)

targets = tuple(
    Target(f"model.layers.{{i}}.q_proj", i, f"q{{i}}", TargetKind.LINEAR, {FEATURES}, {FEATURES})
    for i in range({TARGETS})
)
layout = Layout("org/tiny", "0" * 64, DataType.BFLOAT16, 1, targets)
small, large, work = map(Path, sys.argv[1:])
compile_image(register(small, work / "s"), Layout(**{{
    **{{f: getattr(layout, f) for f in layout.__slots__}}, "targets": (
        Target("model.layers.0.q_proj", 0, "q", TargetKind.LINEAR, 16, 16),)}}))  # loads all code
start = peak(start=True)
checkpoint = register(large, work / "l")
checked = peak()
image = compile_image(checkpoint, layout)
print(json.dumps([start, checked, peak(), image.plan.total_bytes]))
"""


def write(folder: Path, rank: int, features: int, targets: int) -> Path:
    folder.mkdir()
    tensors = {}
    for layer in range(targets):
        name = f"base_model.model.model.layers.{layer}.q_proj.lora_"
        tensors[f"{name}A.weight"] = torch.ones(rank, features)
        tensors[f"{name}B.weight"] = torch.ones(features, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "org/tiny",
        "r": rank,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_memory_stays_within_its_bound(tmp_path):
    """An adapter of 200 MB, fetched, checked and compiled."""
    small = write(tmp_path / "small", 4, 16, 1)
    large = write(tmp_path / "large", RANK, FEATURES, TARGETS)
    assert (large / "adapter_model.safetensors").stat().st_size >= SOURCE_BYTES > 200e6
    (tmp_path / "work").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    folders = map(str, (small, large, tmp_path / "work"))
    done = forks.run(str(tmp_path / "script.py"), *folders)
    assert done.returncode == 0, done.stderr
    start, checked, compiled, image_bytes = json.loads(done.stdout)
    assert image_bytes == IMAGE_BYTES
    assert checked - start < 2 * LARGEST_BYTES
    assert compiled - start < 2 * LARGEST_BYTES + IMAGE_BYTES
