"""Loading a model of several towers takes the memory that is said before: its text part's, once.

What counts is memory of the process's own (anonymous): a limit counts it, and nobody but the
process can free it. Pages of the model's files, which reading maps, are the system's: it drops them
when memory is short, and they are bounded here by one tensor.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support import forks
from tests.support.models.whole_models import WHOLE, whole_class, whole_config
from tests.support.native import native_library
from tests.support.pairs import by_path

TOLERANCE, TOLERANCE_OF_STATES = 0.03, 0.02
"""States are allocated as they are counted; the weights of native kernels may take a huge page more
for each 256 MiB."""
COPIES_BYTES = {"native": 40 << 20, "torch": 56 << 20}
"""Copies of rows that are quantised at once, in torch about six of a matrix in fp32, and a part of
a huge page for each 256 MiB."""
TEXT: dict[str, Any] = {
    "vocab_size": 16_000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
STATES = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 256,
    "linear_value_head_dim": 256,
}
"""A third of the memory is for states of recurrent layers."""
MORE_TEXT: dict[str, dict[str, Any]] = {
    "Gemma4": {
        "vocab_size_per_layer_input": 16_000,
        "global_head_dim": 256,
        "layer_types": ["sliding_attention"] * 6 + ["full_attention"] * 2,
        "hidden_size_per_layer_input": 64,
    },
    "Qwen3_5": STATES,
    "Qwen3_5Moe": {"moe_intermediate_size": 512, "num_experts": 12, **STATES},
}
VISION: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
}
MORE_VISION: dict[str, dict[str, Any]] = {
    "Gemma4": {"head_dim": 64, "num_key_value_heads": 12},
    "Mistral3": {"head_dim": 64},
    "Ministral3": {"head_dim": 64},
}


class Saved(NamedTuple):
    """A checkpoint; sizes in bytes, the last of the text part's largest tensor."""

    folder: Path
    text_bytes: int
    other_bytes: int
    largest_bytes: int


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Weights in bfloat16, hundreds of megabytes of each tower in several files."""
    name = request.param
    text, vision = TEXT | MORE_TEXT.get(name, {}), VISION | MORE_VISION.get(name, {})
    folder = tmp_path_factory.mktemp(name)
    with torch.device("meta"):
        config = whole_config(name, text, vision)
        model = whole_class(name)._from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    sizes = {}
    for path, parameter in model.named_parameters():
        parameter.data.fill_(0.01)
        sizes[path] = parameter.nbytes
    model.save_pretrained(folder, max_shard_size="100MB")
    del model
    parts = [size for path, size in sizes.items() if "language_model." in path or "lm_head" in path]
    yield Saved(folder, sum(parts), sum(sizes.values()) - sum(parts), max(parts))
    shutil.rmtree(folder)


MEASURE = """
import json, re, sys, threading
from pathlib import Path
import torch
from inference_svc.backends.select import select_backend
from inference_svc.core import EngineConfig
from inference_svc.engine.build import build_engine
from inference_svc.engine.memory_budget import plan_budgets
from inference_svc.model.architectures import load_description
from inference_svc.store.client import NoStore

config = EngineConfig(
    Path(sys.argv[1]), "whole", dtype="bfloat16", max_model_len=16, max_sequences=4,
    max_batch_tokens=16, max_prefill_chunk=16, kv_bytes=2 << 20, arena_bytes=1 << 20, max_loras=1,
    max_lora_rank=1, num_threads=1, native_kernels=sys.argv[2] == "native", num_stored_states=8,
    quantize=sys.argv[3],
)
decoder = load_description(config.model_dir, config.quantize).for_length(config.max_model_len)
[budget] = plan_budgets(
    config, select_backend(config, decoder).memory_needs(config, decoder), None
)
lines = ("weights", "kv_pages", "recurrent_states", "arena", "workspace")
said = {name: budget.bytes_of(name) for name in lines}
others = {line.name for line in budget.lines} - {*lines, "host_tier", "tokenizer", "process"}
assert not others, others
torch.zeros(8).bfloat16().float()  # whatever torch loads at first use

def anonymous_and_all():
    pages = Path("/proc/self/statm").read_text().split()
    resident, of_files = int(pages[1]), int(pages[2])
    return (resident - of_files) * 4096, resident * 4096

def sample():
    while not is_built.wait(0.001):  # torch lets it run while it copies
        seen.append(anonymous_and_all()[0])

def peak():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

is_built, seen = threading.Event(), []
sampler = threading.Thread(target=sample)
Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
own, resident = anonymous_and_all()
sampler.start()
built = build_engine(config, NoStore(), lambda event: None)
is_built.set()
sampler.join()
seen.append(anonymous_and_all()[0])
print(json.dumps([built.engine.runner.backend.kernels, said, max(seen) - own, peak() - resident]))
built.puller.close()
"""


@pytest.mark.processes
@pytest.mark.parametrize(("saved", "path"), by_path(WHOLE), indirect=["saved"])
def test_loading_takes_what_was_said(saved: Saved, path: str, tmp_path: Path) -> None:
    """No second copy of anything, however a backend packs it, and nothing of the other towers."""
    said, own_bytes, all_bytes = measured(saved, path, "none", tmp_path)
    said_bytes, states_bytes = sum(said.values()), said["recurrent_states"]
    tolerance = TOLERANCE_OF_STATES if states_bytes else TOLERANCE
    assert min(saved.text_bytes, saved.other_bytes) > 8 * tolerance * said_bytes
    assert said["weights"] > 0.95 * (said_bytes - states_bytes)
    assert not states_bytes or states_bytes > 0.2 * said_bytes
    assert own_bytes == pytest.approx(said_bytes, rel=tolerance)
    # A tensor of a file that is read, and, of a model with states, one that is hashed meanwhile.
    num_tensors = 2 if states_bytes else 1
    assert all_bytes <= (1 + tolerance) * said_bytes + num_tensors * saved.largest_bytes


@pytest.mark.processes
@pytest.mark.parametrize("path", ["native", "torch"])
@pytest.mark.parametrize("saved", ["Gemma3"], indirect=True)
def test_quantising_takes_what_was_said(saved: Saved, path: str, tmp_path: Path) -> None:
    """The plain weights are never there as a whole; rows of one are copied while it is
    quantised."""
    said, own_bytes, _ = measured(saved, path, "int4", tmp_path)
    said_bytes = sum(said.values())
    assert said_bytes < 0.6 * saved.text_bytes
    assert own_bytes <= said_bytes + COPIES_BYTES[path]


def measured(
    saved: Saved, path: str, quantize: str, tmp_path: Path
) -> tuple[dict[str, int], int, int]:
    """Returns what was said, and the peaks of the process's own memory and of all."""
    native_library()
    program = tmp_path / "measure.py"
    program.write_text(MEASURE)
    done = forks.run(str(program), str(saved.folder), path, quantize)
    assert done.returncode == 0, done.stderr
    kernels, said, own_bytes, all_bytes = json.loads(done.stdout)
    assert kernels.startswith(path)
    if path == "torch":
        del said["workspace"]  # no step has run
    return said, own_bytes, all_bytes
