"""Images: where bytes lie, that they compute what PEFT computes, and what is refused."""

import dataclasses
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from adapter_store.checkpoint.open import TORCH_DTYPES, Checkpoint, open_checkpoint
from adapter_store.checkpoint.peft.config import parse_config
from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.checkpoint.reading.safetensors import TensorRecord
from adapter_store.checkpoint.tensors import TargetWeights
from adapter_store.errors import CorruptData, IncompatibleAdapter
from adapter_store.images.compile import Image, compile_image, compile_parts
from adapter_store.images.plan.plan import plan_image
from contract.images.dtypes import DataType
from contract.images.layouts import Layout
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Target, TargetKind
from tests.support.examples import examples

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Q0 = "model.layers.0.self_attn.q_proj"


def tensors_of(image: Image, layout: Layout) -> dict[str, dict[SegmentKind, torch.Tensor]]:
    """{target name: {A: [rank, in], B: [rank, out]}}, as whoever reads an image sees it."""
    result: dict[str, dict[SegmentKind, torch.Tensor]] = {}
    for segment, shape in zip(image.plan.segments, image.plan.shapes, strict=True):
        data = image.buffer[segment.offset : segment.offset + segment.length_bytes]
        values = data.view(TORCH_DTYPES[layout.dtype]).view(shape)
        result.setdefault(layout.targets[segment.target].name, {})[segment.kind] = values
    return result


def planned_checkpoint(layout: Layout, ranks: dict[str, int]) -> Checkpoint:
    """A checkpoint that only plans: its tensors have shapes and no file."""
    targets = {}
    for target in layout.targets:
        rank = ranks.get(target.name.rpartition(".")[2])
        if rank is None:
            continue
        a = TensorRecord(f"{target.name}.a", "", DataType.FLOAT32, (rank, target.in_features), 0, 0)
        b = TensorRecord(
            f"{target.name}.b", "", DataType.FLOAT32, (target.out_features, rank), 0, 0
        )
        targets[target.name] = TargetWeights(
            target.name, target.name, target.kind, rank, 8.0, 1.0, a, b
        )
    config = parse_config(
        {
            "peft_type": "LORA",
            "base_model_name_or_path": layout.base_model,
            "target_modules": list(ranks),
        },
        CheckpointLimits(),
    )
    return Checkpoint(Path(), config, targets, "sha256:0", 0, True)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"r": 4, "lora_alpha": 12}, torch.float32),
        ({"r": 4, "lora_alpha": 12, "use_rslora": True}, torch.float32),
        ({"r": 3, "lora_alpha": 7, "fan_in_fan_out": False}, torch.bfloat16),
        (
            {
                "r": 4,
                "use_rslora": True,
                # PEFT saves patterns sorted, and the first match counts when they are read again.
                "rank_pattern": {r"layers\.1\..*": 6, "q_proj": 2},
                "alpha_pattern": {"k_proj": 1, "model.layers.0.mlp.up_proj": 20},
            },
            torch.float32,
        ),
        ({"r": 5, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}, torch.float32),
        ({"r": 2, "target_modules": "all-linear", "exclude_modules": ["k_proj"]}, torch.float32),
        (
            {"r": 2, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
            torch.float16,
        ),
        ({"r": 2, "target_modules": r".*\.0\..*(up|down)_proj"}, torch.float32),
    ],
)
@pytest.mark.filterwarnings("ignore:.*embedding layers.*:UserWarning")
def test_computes_what_peft_computes(tmp_path, make_layout, config, dtype):
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=False,
        )
    )
    config = {"target_modules": list(ALL), **config}
    model = get_peft_model(base, LoraConfig(init_lora_weights=False, **config)).to(dtype)
    model.peft_config["default"].base_model_name_or_path = "org/tiny"
    model.save_pretrained(tmp_path, save_embedding_layers=False)

    checkpoint = open_checkpoint(tmp_path)
    layout = make_layout()
    ours = tensors_of(compile_image(checkpoint, layout), layout)
    theirs = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert ours.keys() == theirs.keys()
    for name, module in theirs.items():
        a, b = ours[name][SegmentKind.A], ours[name][SegmentKind.B]
        is_embedding = name == "model.embed_tokens"
        delta = a @ b if is_embedding else b.t() @ a
        expected = module.float().get_delta_weight("default")
        torch.testing.assert_close(delta, expected, rtol=1e-5, atol=1e-5)


def test_lies_in_order_of_use_aligned_and_unpadded(make_adapter, make_layout):
    modules = ("lm_head", "down_proj", "q_proj", "embed_tokens")
    layout = make_layout(DataType.BFLOAT16)
    plan = plan_image(open_checkpoint(make_adapter(modules, rank=3)), layout)
    assert plan.names == (
        "model.embed_tokens.A",
        "model.embed_tokens.B",
        f"{Q0}.A",
        f"{Q0}.B",
        "model.layers.0.mlp.down_proj.A",
        "model.layers.0.mlp.down_proj.B",
        "model.layers.1.self_attn.q_proj.A",
        "model.layers.1.self_attn.q_proj.B",
        "model.layers.1.mlp.down_proj.A",
        "model.layers.1.mlp.down_proj.B",
        "lm_head.A",
        "lm_head.B",
    )
    assert plan.shapes[:4] == ((32, 3), (3, 16), (3, 16), (3, 16))
    assert [segment.length_bytes for segment in plan.segments[:4]] == [192, 96, 96, 96]
    assert [segment.offset for segment in plan.segments[:4]] == [0, 256, 512, 768]
    assert plan.parts == ((0, 512), (512, 1536), (1536, 2560), (2560, 3072))
    assert plan.total_bytes == 3072


def test_layer_without_weights_has_no_part(make_adapter, make_layout):
    folder = make_adapter(("q_proj",), layers_to_transform=None)
    checkpoint = open_checkpoint(folder)
    kept = {
        "model.layers.1.self_attn.q_proj": checkpoint.targets["model.layers.1.self_attn.q_proj"]
    }
    plan = plan_image(dataclasses.replace(checkpoint, targets=kept), make_layout())
    assert plan.parts == ((0, plan.total_bytes),)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(50))
@given(data=st.data())
def test_segments_never_overlap(data, make_layout):
    dtype = data.draw(st.sampled_from(list(DataType)))
    chosen = data.draw(st.sets(st.sampled_from([*ALL, "embed_tokens", "lm_head"]), min_size=1))
    ranks = {name: data.draw(st.integers(1, 40), name) for name in sorted(chosen)}
    layout = make_layout(dtype)
    plan = plan_image(planned_checkpoint(layout, ranks), layout)
    end = 0
    for segment, shape in zip(plan.segments, plan.shapes, strict=True):
        assert segment.offset % 256 == 0
        assert 0 <= segment.offset - end < 256
        assert segment.length_bytes == shape[0] * shape[1] * dtype.itemsize
        end = segment.offset + segment.length_bytes
    assert plan.total_bytes % 256 == 0
    assert 0 <= plan.total_bytes - end < 256
    assert [start for start, _ in plan.parts] == [0, *(end for _, end in plan.parts[:-1])]
    assert plan.parts[-1][1] == plan.total_bytes


def test_scale_is_folded_in_fp32_before_the_cast(make_adapter, make_layout):
    layout = make_layout(DataType.BFLOAT16)
    checkpoint = open_checkpoint(
        make_adapter(("q_proj",), rank=3, dtype=torch.bfloat16, lora_alpha=7)
    )
    tensors = tensors_of(compile_image(checkpoint, layout), layout)[Q0]
    target = checkpoint.targets[Q0]
    b = checkpoint.read_tensor(target.b)
    expected = (b.float() * (7 / 3)).to(torch.bfloat16).t()
    assert torch.equal(tensors[SegmentKind.B], expected)
    assert not torch.equal(tensors[SegmentKind.B], (b * torch.tensor(7 / 3).bfloat16()).t())
    assert torch.equal(tensors[SegmentKind.A], checkpoint.read_tensor(target.a))


def test_slices_are_cut_from_full_tensors(make_adapter, make_layout):
    checkpoint = open_checkpoint(make_adapter(("q_proj", "embed_tokens"), rank=3, lora_alpha=6))
    whole_layout = make_layout()
    whole = tensors_of(compile_image(checkpoint, whole_layout), whole_layout)
    parts = []
    for start, end in ((0, 4), (4, 16)):
        targets = tuple(
            dataclasses.replace(target, in_slice=(start, end), out_slice=(start, end))
            for target in whole_layout.targets
        )
        layout = make_layout(targets=targets)
        parts.append(tensors_of(compile_image(checkpoint, layout), layout))
    for name, tensors in whole.items():
        is_embedding = name == "model.embed_tokens"
        a = torch.cat([part[name][SegmentKind.A] for part in parts], dim=0 if is_embedding else 1)
        b = torch.cat([part[name][SegmentKind.B] for part in parts], dim=1)
        in_axis = tensors[SegmentKind.A][:16] if is_embedding else tensors[SegmentKind.A]
        assert torch.equal(a, in_axis)
        assert torch.equal(b, tensors[SegmentKind.B])


@pytest.mark.parametrize("is_blob", [False, True])
def test_large_tensors_pass_through_in_chunks(make_adapter, is_blob):
    a, b = torch.randn(3, 200_000), torch.randn(300_000, 3)
    tensors = {f"base_model.model.x.lora_{s}.weight": t for s, t in (("A", a), ("B", b))}
    folder = make_adapter(("x",), rank=3, tensors=tensors)
    checkpoint = open_checkpoint(folder)
    if is_blob:
        checkpoint = open_checkpoint(folder, digest=checkpoint.digest)
    target = Target(
        "x", 0, "x", TargetKind.LINEAR, 200_000, 300_000, 1, (5, 199_999), (90_000, 290_001)
    )
    layout = Layout("org/tiny", "0" * 64, DataType.FLOAT16, 1, (target,))
    compiled = tensors_of(compile_image(checkpoint, layout), layout)["x"]
    assert torch.equal(compiled[SegmentKind.A], a[:, 5:199_999].half())
    assert torch.equal(compiled[SegmentKind.B], (b[90_000:290_001] * (8 / 3)).half().t())


def test_same_input_same_bytes_and_an_id_known_before(make_adapter, make_layout):
    checkpoint = open_checkpoint(make_adapter(ALL, rank=3))
    layout = make_layout(DataType.FLOAT16)
    plan = plan_image(checkpoint, layout)
    images = []
    for fill in (0x00, 0xFF):
        buffer = torch.full((plan.total_bytes,), fill, dtype=torch.uint8)
        images.append(Image(plan, buffer, tuple(compile_parts(checkpoint, plan, buffer))))
    assert torch.equal(images[0].buffer, images[1].buffer)
    assert images[0].sha256 == images[1].sha256
    assert compile_image(checkpoint, layout).plan == plan
    other = dataclasses.replace(layout, dtype=DataType.BFLOAT16)
    assert plan_image(checkpoint, other).image_id != plan.image_id


def test_parts_hash_the_image(make_adapter, make_layout):
    image = compile_image(open_checkpoint(make_adapter(ALL)), make_layout())
    data = image.buffer.numpy().tobytes()
    assert [(part.index, part.start, part.end) for part in image.parts] == [
        (index, start, end) for index, (start, end) in enumerate(image.plan.parts)
    ]
    for part in image.parts:
        assert part.sha256 == hashlib.sha256(data[part.start : part.end]).digest()
    joined = b"".join(part.sha256 for part in image.parts)
    assert image.sha256 == hashlib.sha256(joined).digest()


@pytest.mark.parametrize("is_blob", [False, True])
def test_parts_are_the_same_from_several_threads(make_adapter, make_layout, is_blob):
    """In order, also behind those that are final already."""
    folder = make_adapter((*ALL, "embed_tokens", "lm_head"), rank=3)
    checkpoint, layout = open_checkpoint(folder), make_layout(DataType.BFLOAT16)
    expected = compile_image(checkpoint, layout)
    if is_blob:
        checkpoint = open_checkpoint(folder, digest=checkpoint.digest)
    for num_final in range(len(expected.parts) + 1):
        buffer = torch.full_like(expected.buffer, 0xFF)
        end = expected.plan.parts[num_final - 1][1] if num_final else 0
        with ThreadPoolExecutor(4) as threads:
            parts = compile_parts(
                *(checkpoint, plan_image(checkpoint, layout), buffer),
                num_final=num_final,
                threads=threads,
            )
            assert tuple(parts) == expected.parts[num_final:]
        assert torch.equal(buffer[end:], expected.buffer[end:])
        assert (buffer[:end] == 0xFF).all(), "a final part was written"


def test_nothing_is_written_after_the_end(make_adapter, make_layout):
    checkpoint, layout = open_checkpoint(make_adapter(ALL, rank=3)), make_layout()
    plan = plan_image(checkpoint, layout)
    buffer = torch.empty(plan.total_bytes, dtype=torch.uint8)
    with ThreadPoolExecutor(4) as threads:
        parts = compile_parts(checkpoint, plan, buffer, threads=threads)
        assert next(parts).index == 0
        parts.close()
        buffer.zero_()
    assert not buffer.any()


def refusal(checkpoint, layout) -> IncompatibleAdapter:
    with pytest.raises(IncompatibleAdapter) as error:
        compile_image(checkpoint, layout)
    assert error.value.subject
    return error.value


def test_unknown_image_format_is_refused(make_adapter, make_layout):
    layout = dataclasses.replace(make_layout(), image_format=99)
    assert refusal(open_checkpoint(make_adapter()), layout).reason == "FORMAT_UNKNOWN"


def test_target_that_the_model_lacks_is_refused(make_adapter, make_layout):
    layout = make_layout()
    layout = make_layout(targets=tuple(t for t in layout.targets if t.layer != 1))
    error = refusal(open_checkpoint(make_adapter(("q_proj",))), layout)
    assert error.reason == "TARGET_UNKNOWN"
    assert error.subject == "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(("side", "field"), [("A", "in_features"), ("B", "out_features")])
def test_wrong_shape_is_refused_naming_the_tensor(make_adapter, make_layout, side, field):
    targets = tuple(
        dataclasses.replace(t, **{field: 99}) if t.name == Q0 else t for t in make_layout().targets
    )
    error = refusal(open_checkpoint(make_adapter(("q_proj",))), make_layout(targets=targets))
    assert error.reason == "SHAPE_MISMATCH"
    assert error.subject == f"base_model.model.{Q0}.lora_{side}.weight"
    assert "99" in error.message


def test_wrong_kind_is_refused(make_adapter, make_layout):
    tensors = {
        "base_model.model.model.embed_tokens.lora_A.weight": torch.ones(4, 32),
        "base_model.model.model.embed_tokens.lora_B.weight": torch.ones(16, 4),
    }
    checkpoint = open_checkpoint(make_adapter(("embed_tokens",), tensors=tensors))
    assert refusal(checkpoint, make_layout()).reason == "KIND_MISMATCH"


def test_listed_module_without_any_weights_is_refused(make_adapter, make_layout):
    folder = make_adapter(("q_proj",), target_modules=["q_proj", "k_proj", "of_another_model"])
    error = refusal(open_checkpoint(folder), make_layout())
    assert (error.reason, error.subject) == (
        "TARGET_MISSING",
        "model.layers.0.self_attn.k_proj",
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    config["exclude_modules"] = ["k_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert compile_image(open_checkpoint(folder), make_layout()).plan.total_bytes


@pytest.mark.parametrize(
    ("side", "value", "alpha"), [("A", 70_000.0, 8), ("B", 70_000.0, 8), ("B", 60_000.0, 16)]
)
def test_overflow_in_the_cast_is_refused_naming_the_tensor(
    make_adapter, make_layout, side, value, alpha
):
    sides = {"A": torch.ones(4, 16), "B": torch.ones(16, 4)}
    sides[side][-1, -1] = value
    tensors = {f"base_model.model.{Q0}.lora_{s}.weight": t for s, t in sides.items()}
    folder = make_adapter(("q_proj",), tensors=tensors, lora_alpha=alpha)
    checkpoint = open_checkpoint(folder)
    error = refusal(checkpoint, make_layout(DataType.FLOAT16))
    assert (error.reason, error.subject) == (
        "CAST_OVERFLOW",
        f"base_model.model.{Q0}.lora_{side}.weight",
    )
    assert "float16" in error.message
    assert compile_image(checkpoint, make_layout(DataType.BFLOAT16)).plan.total_bytes


def test_blob_is_compared_with_its_digest(make_adapter, make_layout):
    folder = make_adapter()
    layout = make_layout()
    image = compile_image(open_checkpoint(folder), layout)
    blob = open_checkpoint(folder, digest=image.plan.digest)
    assert compile_image(blob, layout).sha256 == image.sha256

    weights = folder / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    buffer = torch.empty(image.plan.total_bytes, dtype=torch.uint8)
    parts = compile_parts(blob, plan_image(blob, layout), buffer)
    seen = [next(parts) for _ in image.plan.parts]
    assert len(seen) == len(image.parts)
    with pytest.raises(CorruptData, match="no longer has this digest"):
        next(parts)


def test_changed_scale_of_a_blob_is_noticed(make_adapter, make_layout):
    folder = make_adapter(lora_alpha=8)
    digest = open_checkpoint(folder).digest
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    with pytest.raises(CorruptData):
        compile_image(open_checkpoint(folder, digest=digest), make_layout())


@pytest.mark.parametrize("top", [0x7F, 0x47], ids=["NaN", "overflow"])
def test_damage_is_not_reported_as_overflow(make_adapter, make_layout, top):
    """A verdict of a layout is for good, and damage is not."""
    folder = make_adapter(("q_proj",))
    digest = open_checkpoint(folder).digest
    weights = folder / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4:] = bytes([0xFF, 0xFF, 0xFF, top])
    weights.write_bytes(data)
    with pytest.raises(CorruptData, match="no longer has this digest"):
        compile_image(open_checkpoint(folder, digest=digest), make_layout(DataType.FLOAT16))


def test_damage_is_not_reported_as_incompatible(make_adapter, make_layout):
    folder = make_adapter(("q_proj",))
    digest = open_checkpoint(folder).digest
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"layers.1", b"layers.9"))
    blob = open_checkpoint(folder, digest=digest)
    with pytest.raises(CorruptData, match="no longer has this digest"):
        plan_image(blob, make_layout())
    assert refusal(open_checkpoint(folder), make_layout()).reason == "TARGET_UNKNOWN"
