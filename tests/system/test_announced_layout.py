"""The layout that a server announces, as the store understands it, and images of it, as the server
understands these."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from adapter_store.api.pull_messages import to_pull_response
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.errors import IncompatibleAdapter
from adapter_store.images.compile import compile_image
from adapter_store.images.plan.layout import from_text, to_text
from adapter_store.images.plan.plan import ImagePlan
from contract.images.header import ImageHeader, Segment
from contract.images.layouts import Layout
from contract.images.segment_kinds import KIND_WORDS, SegmentKind
from contract.images.targets import HASHED_ROWS, TargetKind
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.targets import build_layout
from inference_svc.errors import AdapterUnusable, CorruptImage
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint import base_hashes
from inference_svc.store.convert import from_registration, to_pull_message
from inference_svc.store.types import Announcement
from tests.support.models.zoo import ALL, FUSED, MODELS, VOCAB, AdapterSpec, Zoo, make_zoo
from tests.support.pairs import long_but
from tests.support.store.messages import as_stored

SOME = pytest.mark.parametrize("zoo", long_but(("llama", "phi3", "gpt-oss"), MODELS), indirect=True)
"""For claims that no family's modules make different: a plain model, fused modules, experts."""
LAST_NORMS = ("model.norm", "model.embedding_norm")
NOT_CHANGED = (
    *("embed_tokens_per_layer", "router.scale", "per_expert_scale"),
    *("sinks", "gate_up_proj_bias", "down_proj_bias"),
    *("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.conv1d", "conv.conv"),
)


@pytest.fixture(scope="module", params=MODELS)
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    spec = AdapterSpec("all", 4, ALL)
    return make_zoo(request.param, tmp_path_factory.mktemp("zoo"), [spec])


@pytest.fixture(scope="module")
def layout(zoo: Zoo) -> ModelLayout:
    description = load_description(zoo.model_dir)
    with base_hashes.hashing_base(zoo.model_dir, description, 1) as wait:
        return build_layout(description, "base", torch.float32).with_base(wait())


def test_it_names_every_weight_that_adapters_may_change(zoo: Zoo, layout: ModelLayout) -> None:
    stored = as_stored(layout)
    text = to_text(stored)
    assert dataclasses.replace(from_text(text), base_model="base") == stored
    module_of = dict(zoo.reference.get_base_model().named_parameters(remove_duplicate=False))
    names = {name.replace("base_layer.", "").removesuffix(".weight") for name in module_of}
    for name, of_name in _by_name(stored).items():
        names = (names - {name}) | of_name if name in names else names
    # No adapter may change Gemma 4's table and what scales its routers, what GPT-OSS has besides
    # its projections, and numbers of a gated delta net, and convolutions.
    names = {name for name in names if not name.endswith(NOT_CHANGED)}
    assert {target.name for target in stored.targets} == {n for n in names if "lora_" not in n}
    for target in stored.targets:
        is_table = target.name in ("model.embed_tokens", "lm_head")
        is_hashed = target.kind is TargetKind.VECTOR or is_table
        assert bool(target.base_hashes) is is_hashed
        assert target.space == ("sampled" if target.name in (*LAST_NORMS, "lm_head") else "text")
    is_tied = zoo.reference.config.tie_word_embeddings
    head = next(target for target in stored.targets if target.name == "lm_head")
    assert head.tied_to == ("model.embed_tokens" if is_tied else "")
    assert len(head.base_hashes) == -(-VOCAB // HASHED_ROWS)


def _by_name(layout: Layout) -> dict[str, set[str]]:
    """The targets that a module computes, by its name."""
    found: dict[str, set[str]] = {}
    for target in layout.targets:
        for other in target.other_names:
            found.setdefault(other.name, set()).add(target.name)
    return found


def header_of(plan: ImagePlan) -> ImageHeader:
    """As it arrives."""
    header = to_pull_message(to_pull_response(plan.header()))
    assert isinstance(header, ImageHeader)
    return header


@pytest.mark.parametrize("image_format", [1, 2])
def test_segments_are_of_the_columns_of_their_targets(
    zoo: Zoo, layout: ModelLayout, image_format: int
) -> None:
    """The table is as wide as what LoRA may change, whatever else the layout has."""
    announced = layout if image_format == 2 else layout.of_format_1
    if image_format == 1 and FUSED.get(zoo.kind, {}).get("gate_proj") == "gate_up_proj":
        with pytest.raises(IncompatibleAdapter, match=r"base has no .*_proj"):
            compile_image(open_checkpoint(zoo.adapter_dirs["all"]), as_stored(announced, 1))
        return
    plan = compile_image(
        open_checkpoint(zoo.adapter_dirs["all"]), as_stored(announced, image_format)
    ).plan
    header = layout.read_header(header_of(plan))
    assert [layout.targets[segment.target].name for segment in header.segments] == [
        name[:-2] for name in plan.names
    ]


@SOME
def test_a_store_of_format_1_is_told_of_aliases_as_it_knows_them(layout: ModelLayout) -> None:
    """What it does not know of is an announcement."""
    announcement = Announcement(("second", "third"), 16)
    of_both = from_registration(layout, announcement)
    assert (list(of_both.layout.aliases), list(of_both.announcement.aliases)) == (
        [],
        ["second", "third"],
    )
    of_first = from_registration(layout, announcement, to_earlier=True)
    assert list(of_first.layout.aliases) == ["second", "third"]
    assert list(of_first.layout.image_formats) == [1]


@SOME
def test_segments_of_no_column_are_refused(zoo: Zoo, layout: ModelLayout) -> None:
    stored = as_stored(layout)
    plan = compile_image(open_checkpoint(zoo.adapter_dirs["all"]), stored).plan
    header = header_of(plan)
    norm = next(i for i, target in enumerate(stored.targets) if target.name in LAST_NORMS)

    def hurt(**fields: object) -> ImageHeader:
        last = header.segments[-1]._replace(**fields)  # type: ignore[arg-type]
        return dataclasses.replace(header, segments=(*header.segments[:-1], last))

    for target in (norm, len(stored.targets)):
        with pytest.raises(CorruptImage):
            layout.read_header(hurt(target=target))


def test_whole_linear_layers_are_refused_by_name(zoo: Zoo, layout: ModelLayout) -> None:
    """And a norm's weight is not."""
    stored = as_stored(layout)
    header = header_of(compile_image(open_checkpoint(zoo.adapter_dirs["all"]), stored).plan)

    def full(name: str, shape: tuple[int, ...]) -> ImageHeader:
        target = next(i for i, target in enumerate(stored.targets) if target.name == name)
        size = math.prod(shape) * layout.dtype.itemsize
        only = Segment(target, SegmentKind.FULL, 0, 0, size, layout.data_type, shape, 1.0)
        return dataclasses.replace(header, segments=(only,), total_bytes=size)

    linear = next(each for each in stored.targets if "self_attn.o" in each.name)
    name = linear.name.rpartition(".")[2]
    with pytest.raises(AdapterUnusable, match=f"{KIND_WORDS[SegmentKind.FULL]}, .* apply: {name}$"):
        layout.read_header(full(linear.name, (linear.out_features, linear.in_features)))
    norm = next(each for each in stored.targets if each.name in LAST_NORMS)
    layout.read_header(full(norm.name, (norm.out_features,)))


@SOME
def test_a_server_without_a_folder_announces_no_hashes(zoo: Zoo) -> None:
    description = load_description(Path(zoo.model_dir))
    stored = as_stored(build_layout(description, "base", torch.float32))
    assert not any(target.base_hashes for target in stored.targets)
    assert {target.kind for target in stored.targets} > {TargetKind.VECTOR}
