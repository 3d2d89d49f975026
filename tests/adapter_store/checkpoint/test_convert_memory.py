"""Memory of converting an adapter of a large model, measured in a process of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adapter_store.checkpoint.conversion.initial_weights import largest_directions
from tests.support import forks

pytestmark = pytest.mark.processes

SCRIPT = """
import sys
from pathlib import Path
from adapter_store.checkpoint.conversion.convert import convert

def peak(start=False):
    if start:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10

given, small, large, out = sys.argv[1], *map(Path, sys.argv[2:])
convert(small / "trained", out / "small", **{given: small / given})  # loads all code
start = peak(start=True)
convert(large / "trained", out / "large", **{given: large / given})
print(peak() - start)
"""


def write_adapter(folder: Path, init: object, rank: int, pairs: list) -> None:
    folder.mkdir()
    tensors = {
        f"base_model.model.model.layers.{layer}.q_proj.lora_{side}.weight": tensor.clone()
        for layer, pair in enumerate(pairs)
        for side, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "init_lora_weights": init}
    config["target_modules"] = ["q_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))


def begin_from_base(folder: Path, features: tuple[int, int], rank: int, count: int) -> None:
    """The adapter of a model, whose weights are [out, in], before it is trained."""
    weight = torch.randn(features)
    directions = largest_directions(weight.T, rank).float()
    pair = directions.T, weight @ directions
    (folder / "model").mkdir(parents=True)
    names = [f"model.layers.{layer}.q_proj.weight" for layer in range(count)]
    save_file({name: weight.clone() for name in names}, folder / "model" / "model.safetensors")
    write_adapter(folder / "trained", "pissa", rank, [pair] * count)


def begin_from_adapter(folder: Path, features: tuple[int, int], rank: int, count: int) -> None:
    folder.mkdir()
    pair = torch.randn(rank, features[1]), torch.randn(features[0], rank)
    for name, init, factor in (("initial", True, 1.0), ("trained", "corda", 1.1)):
        pairs = [[tensor * factor for tensor in pair] for _ in range(count)]
        write_adapter(folder / name, init, rank, pairs)


@pytest.mark.parametrize(
    ("begin", "given", "features", "rank", "counts"),
    [
        (begin_from_base, "model", (8192, 256), 8, (4, 24)),
        (begin_from_adapter, "initial", (65536, 65536), 4, (5, 40)),
    ],
    ids=["base of 200 MB", "adapters of 80 MB"],
)
def test_one_module_is_held_at_a_time(begin, given, features, rank, counts, tmp_path: Path) -> None:
    """The peak is that of one module, however many there are."""
    begin(tmp_path / "tiny", (32, 16), 2, 1)
    peaks, sizes = [], []
    for count in counts:
        folder = tmp_path / str(count)
        begin(folder, features, rank, count)
        sizes.append(sum(file.stat().st_size for file in folder.rglob("*.safetensors")))
        folders = [str(each) for each in (tmp_path / "tiny", folder, tmp_path / f"out {count}")]
        (tmp_path / "script.py").write_text(SCRIPT)
        done = forks.run(str(tmp_path / "script.py"), given, *folders)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
        shutil.rmtree(folder)
    assert sizes[1] - sizes[0] > 140e6
    assert peaks[1] - peaks[0] < 0.35 * (sizes[1] - sizes[0])
