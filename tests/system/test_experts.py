"""Adapters of experts, in every form that trainers save them in: one image and the same tokens."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.api.convert import to_pull_response
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.images import pull
from adapter_store.images.compile import Image, compile_image
from inference_svc.adapters.image_source import ImageHeader, Segment
from inference_svc.adapters.layout import EXPERTS, ModelLayout
from inference_svc.adapters.targets import build_layout
from inference_svc.core import Part, combination_digest
from inference_svc.errors import CorruptImage
from inference_svc.model.architectures import load_description
from inference_svc.store.convert import to_pull_message
from tests.system.test_announced_layout import as_stored
from tests.system.test_parity import prompts
from tests.system.trained import CONFIG, WEIGHTS
from tests.system.zoo import PARAMETERS, AdapterSpec, Zoo, make_zoo

RANK = 4
KINDS = ("qwen3-moe", "mixtral")
TINKERS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
Tensors = dict[str, torch.Tensor]
Parts = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""A [experts, rank, in] and B [experts, out, rank] by the projection."""


@pytest.fixture(scope="module", params=KINDS)
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A model with one adapter, as PEFT saves parameters, and what others would save of it."""
    kind, folder = request.param, tmp_path_factory.mktemp("experts")
    spec = AdapterSpec("fused", RANK, [], {"target_parameters": list(PARAMETERS[kind][:2])})
    zoo = make_zoo(kind, folder, [spec])
    whole = zoo.adapter_dirs["fused"]
    num_experts = load_description(zoo.model_dir).mixtures[0].num_experts
    for name, write in (("apart", apart), ("stacks", stacks)):
        zoo.adapter_dirs[name] = write(whole, folder / name, kind, num_experts)
    return zoo


def parts_of(tensors: Tensors, experts: str, num_experts: int) -> Parts:
    """Takes what PEFT saves of a layer's parameters apart."""

    def sides(path: str) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (tensors[f"{path}.lora_{side}.weight"] for side in "AB")
        of_a = a.view(num_experts, -1, a.shape[1])
        return of_a, b.view(len(b), -1, num_experts).permute(2, 0, 1)

    both, down = sides(f"{experts}.base_layer"), sides(experts)
    gate, up = both[1].chunk(2, dim=1)
    return {"gate_proj": (both[0], gate), "up_proj": (both[0], up), "down_proj": down}


def rewritten(
    whole: Path, folder: Path, num_experts: int, write: Callable[[Tensors, str, Parts], None]
) -> Path:
    """Writes the same adapter, each layer by `write`."""
    folder.mkdir()
    tensors, made = load_file(whole / WEIGHTS), Tensors()
    for experts in sorted({name.partition(".experts.")[0] + ".experts" for name in tensors}):
        write(made, experts, parts_of(tensors, experts, num_experts))
    save_file({name: each.clone().contiguous() for name, each in made.items()}, folder / WEIGHTS)
    shutil.copy(whole / CONFIG, folder)
    return folder


def configured(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"target_parameters": None} | fields))
    return folder


def apart(whole: Path, folder: Path, kind: str, num_experts: int) -> Path:
    """As PEFT saved experts that were modules, by transformers' names of before its release 5."""
    names = TINKERS if kind == "mixtral" else {name: name for name in TINKERS}

    def write(made: Tensors, experts: str, parts: Parts) -> None:
        module = experts.replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else experts
        for name, (a, b) in parts.items():
            for expert in range(num_experts):
                path = f"{module}.{expert}.{names[name]}"
                made[f"{path}.lora_A.weight"], made[f"{path}.lora_B.weight"] = a[expert], b[expert]

    return configured(
        rewritten(whole, folder, num_experts, write), target_modules=sorted(names.values())
    )


def stacks(whole: Path, folder: Path, kind: str, num_experts: int) -> Path:
    """As Tinker exports them."""

    def write(made: Tensors, experts: str, parts: Parts) -> None:
        for name, (a, b) in parts.items():
            path = f"{experts}.{TINKERS[name]}"
            made[f"{path}.lora_A.weight"], made[f"{path}.lora_B.weight"] = a, b

    return configured(rewritten(whole, folder, num_experts, write), target_modules="all-linear")


@pytest.fixture
def layout(zoo: Zoo) -> ModelLayout:
    return build_layout(load_description(zoo.model_dir), "base", torch.float32)


def compiled(zoo: Zoo, name: str, layout: ModelLayout) -> Image:
    return compile_image(open_checkpoint(zoo.adapter_dirs[name]), as_stored(layout))


def contents(image: Image) -> dict[str, bytes]:
    data = image.buffer.numpy().tobytes()
    return {
        name: data[each.offset : each.offset + each.length_bytes]
        for name, each in zip(image.plan.names, image.plan.segments, strict=True)
    }


def test_each_form_gives_the_same_image(zoo: Zoo, layout: ModelLayout) -> None:
    """But for an A of gate and up, which parameters share."""
    images = {name: compiled(zoo, name, layout) for name in zoo.adapter_dirs}
    assert images.keys() == {"fused", "apart", "stacks"}
    first = contents(images["fused"])
    for name in ("apart", "stacks"):
        assert contents(images[name]) == first
        assert images[name].plan.total_bytes > images["fused"].plan.total_bytes
    digests = {open_checkpoint(folder).digest for folder in zoo.adapter_dirs.values()}
    assert len(digests) == 3


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_each_form_gives_the_oracles_tokens(zoo: Zoo, start: Callable, native: bool) -> None:
    running = start(zoo, max_model_len=512, native_kernels=native)
    asked = prompts(4, seed=2)
    for name in zoo.adapter_dirs:
        for index, prompt in enumerate(asked):
            running.submit(f"{name} {index}", prompt, name)
    for index, prompt in enumerate(asked):
        expected = zoo.greedy("fused", prompt, 64)
        for name in zoo.adapter_dirs:
            assert running.result(f"{name} {index}")[0] == expected, name
    running.check_idle()


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_a_sum_of_halves_is_the_whole(zoo: Zoo, start: Callable, native: bool) -> None:
    """One adapter in two forms, each half of it, beside the whole and the base model."""
    running = start(zoo, max_model_len=512, native_kernels=native)
    halves = tuple(Part(running.digests[name], 0.5) for name in ("fused", "stacks"))
    prompt = prompts(2, seed=3)[1]
    for name, adapter in (("sum", combination_digest(halves)), ("one", "apart"), ("base", "")):
        running.submit(name, prompt, adapter)
    assert running.result("sum")[0] == zoo.greedy("fused", prompt, 64)
    assert running.result("one")[0] == zoo.greedy("fused", prompt, 64)
    assert running.result("base")[0] == zoo.greedy("", prompt, 64)
    running.check_idle()


def header_of(image: Image) -> ImageHeader:
    plan = image.plan
    fields = (plan.image_id, plan.digest, plan.layout_id, plan.image_format, plan.total_bytes)
    header = to_pull_message(to_pull_response(pull.ImageHeader(*fields, plan.segments)))
    assert isinstance(header, ImageHeader)
    return header


def hurt(index: np.ndarray, expert: int, column: int, value: int) -> None:
    index[expert, column] = value


FAULTS: dict[str, Callable[[np.ndarray, Segment], None]] = {
    "a granule before the first": lambda index, _: hurt(index, 1, 0, 0),
    "a granule behind the last": lambda index, of: hurt(index, 1, 0, of.length_bytes // 256),
    "a negative granule": lambda index, _: hurt(index, 2, 0, -1),
    "a rank above the segment's": lambda index, of: hurt(index, 0, 1, of.rank + 1),
    "a negative rank": lambda index, _: hurt(index, 0, 1, -1),
    "a rank that the other side has not": lambda index, _: hurt(index, 0, 1, 1),
    "a scale of A": lambda index, _: hurt(index, 1, 2, 0x40000000),
    "a scale that is no number": lambda index, _: hurt(index, 1, 2, 0x7FC00000),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_index_that_leads_elsewhere_is_refused(
    zoo: Zoo, layout: ModelLayout, fault: str
) -> None:
    """Kernels follow it: it is checked when the image has arrived, before anything is computed."""
    image = compiled(zoo, "fused", layout)
    header, data = layout.read_header(header_of(image)), bytearray(image.buffer.numpy().tobytes())

    def read(offset: int, num_bytes: int) -> bytes:
        return bytes(data[offset : offset + num_bytes])

    layout.check_contents(header, read)
    segment = next(each for each in header.segments if each.kind == "a")
    assert layout.targets[segment.target].kind == EXPERTS
    num_experts = layout.targets[segment.target].num_experts
    index = np.frombuffer(data, np.int32, num_experts * 4, segment.offset).reshape(-1, 4)
    FAULTS[fault](index, segment)
    with pytest.raises(CorruptImage, match=r"experts? .*at byte"):
        layout.check_contents(header, read)


def test_a_segment_too_short_for_its_index_is_refused(zoo: Zoo, layout: ModelLayout) -> None:
    header = header_of(compiled(zoo, "fused", layout))
    first = dataclasses.replace(header.segments[0], length_bytes=16)
    with pytest.raises(CorruptImage):
        layout.read_header(dataclasses.replace(header, segments=(first, *header.segments[1:])))


def test_an_expert_slice_has_its_part_of_the_whole(zoo: Zoo, layout: ModelLayout) -> None:
    """Two servers that hold half of the experts each have all matrices once."""
    stored, checkpoint = as_stored(layout), open_checkpoint(zoo.adapter_dirs["apart"])
    num_experts = next(each.num_experts for each in layout.targets if each.kind == EXPERTS)
    whole = matrices(compile_image(checkpoint, stored), range(num_experts))
    half = num_experts // 2
    found: dict[tuple[str, int], bytes] = {}
    for held in (range(half), range(half, num_experts)):
        targets = tuple(
            dataclasses.replace(each, expert_slice=(held.start, held.stop))
            if each.kind.value == EXPERTS
            else each
            for each in stored.targets
        )
        part = matrices(
            compile_image(checkpoint, dataclasses.replace(stored, targets=targets)), held
        )
        assert not found.keys() & part.keys()
        found |= part
    assert found == whole


def matrices(image: Image, held: range) -> dict[tuple[str, int], bytes]:
    """Returns the bytes of each expert's matrices, by their segment's name and the expert."""
    found = {}
    for name, data in contents(image).items():
        index = np.frombuffer(data, np.int32, 4 * len(held)).reshape(-1, 4)
        starts = index[:, 0].astype(np.int64) * 256
        ends = sorted({*starts.tolist(), len(data)})
        for expert, start in zip(held, starts.tolist(), strict=True):
            end = ends[ends.index(start) + 1]
            found[name, expert] = data[start:end].rstrip(b"\0")
    return found
