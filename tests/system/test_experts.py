"""Adapters of experts, in every form that trainers save them in: one image and the same tokens."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from adapter_store.api.pull_messages import to_pull_response
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.images.compile import Image, compile_image
from contract.images.header import ImageHeader, Segment
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import TargetKind
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.targets import build_layout
from inference_svc.core import Part, Sum
from inference_svc.errors import CorruptImage
from inference_svc.model.architectures import load_description
from inference_svc.store.convert import to_pull_message
from tests.support.models.parity import prompts
from tests.support.models.trained import edited
from tests.support.models.zoo import PARAMETERS, AdapterSpec, Zoo, adapted, make_model
from tests.support.pairs import PATHS, by_path
from tests.support.store.messages import as_stored
from tests.system.expert_forms import (
    DOWN,
    FORMS,
    OF_MIXTRAL,
    Form,
    share_outer,
    shared_stacks,
    turned_file,
    write_form,
)

KINDS = ("qwen3-moe", "mixtral", "gpt-oss")
WAIT_S = 120.0
"""Images of all forms are compiled when requests ask for them, which takes a busy machine long."""
ON_BOTH_PATHS = pytest.mark.parametrize(("zoo", "path"), by_path(KINDS), indirect=["zoo"])
PLAIN, PATTERNS, SHARED = "plain", "patterned", "shared"
"""Adapters as PEFT saves parameters."""
OF_PATTERNS = {
    "use_rslora": True,
    "rank_pattern": {"experts.down_proj": 6},
    "alpha_pattern": {"experts.gate_up_proj": 5, "experts.down_proj": 12},
}
SQUARE = {"qwen3-moe": {"moe_intermediate_size": 64}}
"""What makes a model's down projections square; GPT-OSS's are."""
OTHERS = {
    **dict.fromkeys(FORMS, PLAIN),
    **{f"{name}, with patterns": PATTERNS for name in FORMS if not FORMS[name].is_mlx},
    "shared stacks": SHARED,
}
"""The same adapters as others would save them."""


@pytest.fixture(scope="module", params=KINDS)
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A model with adapters of its experts, as PEFT saves parameters, and as others would."""
    kind, folder = request.param, tmp_path_factory.mktemp("experts")
    options = {"target_parameters": list(PARAMETERS[kind][:2])}
    specs = [
        AdapterSpec(name, 4, [], options | more)
        for name, more in ((PLAIN, {}), (PATTERNS, OF_PATTERNS), (SHARED, {}))
    ]
    model = make_model(kind, folder / "model")
    reference = adapted(
        *(model, kind, folder / "adapters", specs), lambda made: share_outer(made, SHARED)
    )
    dirs = {spec.name: folder / "adapters" / spec.name for spec in specs}
    for name, whole in OTHERS.items():
        if kind != "mixtral" and name.startswith(OF_MIXTRAL):
            continue
        form = Form(shared_stacks, FORMS["Tinker"].fields)
        form = FORMS.get(name.partition(", with patterns")[0], form)
        dirs[name] = write_form(form, dirs[whole], folder / name, folder / "model")
    return Zoo(kind, folder / "model", reference, dirs)


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
    """But for an A of gate and up, which parameters share, and what all experts share."""
    images = {name: compiled(zoo, name, layout) for name in zoo.adapter_dirs}
    count = range(next(each.experts for each in layout.targets if each.kind is TargetKind.EXPERTS))
    for name in images.keys() & OTHERS:
        whole = OTHERS[name]
        assert matrices(images[name], count) == matrices(images[whole], count), name
        if whole != SHARED:
            assert contents(images[name]) == contents(images[whole]), name
    bytes_of = {name: image.plan.total_bytes for name, image in images.items()}
    assert bytes_of["one by one"] == bytes_of["Tinker"] == bytes_of["MLX"] > bytes_of[PLAIN]
    assert bytes_of["Megatron-Bridge"] == bytes_of["PEFT to 0.18"] == bytes_of[PLAIN]
    assert bytes_of["shared stacks"] < bytes_of[SHARED]


def test_forms_are_adapters_of_their_own(zoo: Zoo) -> None:
    """Their bytes differ, and so do their digests."""
    digests = {name: open_checkpoint(folder).digest for name, folder in zoo.adapter_dirs.items()}
    same = {"PEFT to 0.18", "PEFT to 0.18, with patterns"}  # of transposed parameters
    others = {name: digest for name, digest in digests.items() if name not in same}
    assert len(set(others.values())) == len(others)


@pytest.mark.parametrize("num_tokens", [24, pytest.param(64, marks=pytest.mark.long)])
@ON_BOTH_PATHS
def test_each_form_gives_the_oracles_tokens(
    zoo: Zoo, start: Callable, path: str, num_tokens: int
) -> None:
    running = start(zoo, max_model_len=512, native_kernels=PATHS[path], adapter_wait_s=WAIT_S)
    asked = prompts(2, seed=2)
    for name in zoo.adapter_dirs:
        for index, prompt in enumerate(asked):
            running.submit(f"{name} {index}", prompt, name, max_tokens=num_tokens)
    for index, prompt in enumerate(asked):
        found = {name: running.result(f"{name} {index}")[0] for name in zoo.adapter_dirs}
        expected = {
            name: zoo.greedy(name, prompt, num_tokens, guess=found[name])
            for name in (PLAIN, PATTERNS, SHARED)
        }
        assert found == {name: expected[OTHERS.get(name, name)] for name in zoo.adapter_dirs}
    running.check_idle()


@ON_BOTH_PATHS
def test_a_sum_of_halves_is_the_whole(zoo: Zoo, start: Callable, path: str) -> None:
    """One adapter in two forms, each half of it, beside the whole and the base model."""
    running = start(zoo, max_model_len=512, native_kernels=PATHS[path], adapter_wait_s=WAIT_S)
    halves = tuple(Part(running.digests[name], 0.5) for name in (PLAIN, "Tinker"))
    prompt = prompts(2, seed=3)[1]
    for name, adapter in (("sum", Sum(halves)), ("one", "MLX"), ("base", "")):
        running.submit(name, prompt, adapter)
    for name, adapter in (("sum", PLAIN), ("one", PLAIN), ("base", "")):
        tokens = running.result(name)[0]
        assert tokens == zoo.greedy(adapter, prompt, 64, guess=tokens), name
    running.check_idle()


@pytest.mark.parametrize(("kind", "is_transposed"), [("qwen3-moe", False), ("gpt-oss", True)])
def test_a_square_parameter_is_that_of_its_pefts_version(
    tmp_path: Path, start: Callable, kind: str, is_transposed: bool
) -> None:
    """As GPT-OSS has it: neither its shapes nor another parameter tell what A has. The layout that
    a server announces says how the model has it."""
    options = {"target_parameters": [DOWN]}
    made = make_model(kind, tmp_path / "model", **SQUARE.get(kind, {}))
    specs = [AdapterSpec("now", 4, [], options)]
    reference = adapted(made, kind, tmp_path / "adapters", specs)
    zoo = Zoo(kind, tmp_path / "model", reference, {"now": tmp_path / "adapters" / "now"})
    num_experts = load_description(zoo.model_dir).mixtures[0].num_experts
    for version, is_turned in {"0.18.1": not is_transposed, "0.19.0": True}.items():
        whole, folder = zoo.adapter_dirs["now"], tmp_path / version
        if is_turned:
            turned_file(whole, folder, num_experts)
        else:
            shutil.copytree(whole, folder)
        zoo.adapter_dirs[version] = edited(folder, peft_version=version)
    layout = build_layout(load_description(zoo.model_dir), "base", torch.float32)
    images = {name: compiled(zoo, name, layout) for name in zoo.adapter_dirs}
    assert images["0.18.1"].buffer.equal(images["now"].buffer)
    assert images["0.19.0"].buffer.equal(images["now"].buffer)
    assert len({image.plan.digest for image in images.values()}) == 3

    running, prompt = start(zoo), prompts(2, seed=2)[1]
    for name in zoo.adapter_dirs:
        running.submit(name, prompt, name)
    found = [running.result(name)[0] for name in zoo.adapter_dirs]
    assert found == [zoo.greedy("now", prompt, 64, guess=found[0])] * 3
    running.check_idle()


def header_of(image: Image) -> ImageHeader:
    header = to_pull_message(to_pull_response(image.plan.header()))
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
    image = compiled(zoo, PLAIN, layout)
    header, data = layout.read_header(header_of(image)), bytearray(image.buffer.numpy().tobytes())

    def read(offset: int, num_bytes: int) -> bytes:
        return bytes(data[offset : offset + num_bytes])

    layout.check_contents(header, read)
    segment = next(each for each in header.segments if each.kind is SegmentKind.A)
    assert layout.targets[segment.target].kind is TargetKind.EXPERTS
    num_experts = layout.targets[segment.target].experts
    index = np.frombuffer(data, np.int32, num_experts * 4, segment.offset).reshape(-1, 4)
    FAULTS[fault](index, segment)
    with pytest.raises(CorruptImage, match=r"experts? .*at byte"):
        layout.check_contents(header, read)


def test_a_segment_too_short_for_its_index_is_refused(zoo: Zoo, layout: ModelLayout) -> None:
    header = header_of(compiled(zoo, PLAIN, layout))
    first = header.segments[0]._replace(length_bytes=16)
    with pytest.raises(CorruptImage):
        layout.read_header(dataclasses.replace(header, segments=(first, *header.segments[1:])))


def test_an_expert_slice_has_its_part_of_the_whole(zoo: Zoo, layout: ModelLayout) -> None:
    """Two servers that hold half of the experts each have all matrices once."""
    stored, checkpoint = as_stored(layout), open_checkpoint(zoo.adapter_dirs["one by one"])
    num_experts = next(each.experts for each in layout.targets if each.kind is TargetKind.EXPERTS)
    whole = matrices(compile_image(checkpoint, stored), range(num_experts))
    half = num_experts // 2
    found: dict[tuple[str, int], bytes] = {}
    for held in (range(half), range(half, num_experts)):
        targets = tuple(
            dataclasses.replace(each, expert_slice=(held.start, held.stop))
            if each.kind is TargetKind.EXPERTS
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
