"""Every way an adapter can be wrong, each refused by its rule and with the culprit's name."""

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store.checkpoint.open import Checkpoint, open_checkpoint
from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.errors import CorruptData, InvalidAdapter, LimitExceeded
from contract.adapter_files import is_adapter_file
from contract.images.dtypes import DataType
from contract.images.targets import TargetKind
from tests.support.examples import examples
from tests.support.store.checkpoints import CONFIG, Q0, WEIGHTS, A, B, pair, refusal


def test_opens_an_adapter(make_adapter):
    checkpoint = open_checkpoint(
        make_adapter(("q_proj", "embed_tokens", "lm_head"), rank=4, lora_alpha=6)
    )
    assert list(checkpoint.targets) == [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    ]
    assert checkpoint.module_names == ("embed_tokens", "lm_head", "q_proj")
    assert (checkpoint.base_model, checkpoint.rank) == ("org/tiny", 4)
    embedding = checkpoint.targets["model.embed_tokens"]
    assert embedding.kind is TargetKind.EMBEDDING
    assert (embedding.in_features, embedding.out_features) == (32, 16)
    assert embedding.scale == 1.5
    assert checkpoint.source_bytes == (checkpoint.folder / WEIGHTS).stat().st_size


@pytest.mark.parametrize(
    ("dtype", "dtype_name"),
    [
        (torch.float32, DataType.FLOAT32),
        (torch.float16, DataType.FLOAT16),
        (torch.bfloat16, DataType.BFLOAT16),
        (torch.float8_e4m3fn, DataType.FLOAT8_E4M3),
        (torch.float8_e5m2, DataType.FLOAT8_E5M2),
    ],
)
def test_reads_tensors_as_saved(make_adapter, dtype, dtype_name):
    tensors = pair(**{B: torch.randn(16, 4)})
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    checkpoint = open_checkpoint(make_adapter(("q_proj",), tensors=tensors))
    target = checkpoint.targets["model.layers.0.self_attn.q_proj"]
    assert torch.equal(checkpoint.read_tensor(target.a).float(), tensors[A].float())
    assert torch.equal(checkpoint.read_tensor(target.b).float(), tensors[B].float())
    assert target.a.dtype is dtype_name


def test_an_fp8_value_that_is_not_finite_is_refused(make_adapter):
    for dtype, bits in (
        (torch.float8_e4m3fn, 0x7F),
        (torch.float8_e4m3fn, 0xFF),
        (torch.float8_e5m2, 0x7C),
        (torch.float8_e5m2, 0xFE),
    ):
        tensors = {A: torch.ones(4, 16).to(dtype), B: torch.ones(16, 4).to(dtype)}
        tensors[B].view(torch.uint8)[5, 1] = bits
        assert not tensors[B].float().isfinite().all()
        error = refusal(make_adapter(("q_proj",), tensors=tensors, folder=f"{dtype}{bits}"))
        assert (error.reason, error.subject) == ("NOT_FINITE", B)


def test_keys_with_the_default_adapter_name(make_adapter):
    renamed = {f"{Q0}.lora_A.default.weight": torch.ones(4, 16), B: torch.ones(16, 4)}
    assert open_checkpoint(make_adapter(("q_proj",), tensors=renamed)).rank == 4


UNKNOWN_TENSORS = {
    "base_model.model.model.embed_tokens.base_layer.weight": "a base weight that would stay unused",
    "base_model.model.lm_head.original_module.weight": "the base's own",
    "base_model.model.model.embed_tokens.token_adapter.base_layer.weight": "save_embedding_layers",
    "base_model.model.mlp.modules_to_save.default.up_proj.weight": "named without it",
    "base_model.model.lm_head.modules_to_save.weight": "modules_to_save",
    f"{Q0}.base_layer.bias": "the config's bias is none",
    f"{Q0}.base_layer.weight.absmax": "ends with none of .lora_A.weight",
    "model.layers.0.self_attn.k_proj.weight": "modules_to_save does not name it",
    "model.embed_tokens.token_adapter.trainable_tokens_delta": "does not name model.embed_tokens",
    f"{Q0}.lora_A.two.parts.weight": "not a LoRA weight",
    f"{Q0}.lora_A.{'x' * 129}.weight": "not a LoRA weight",
    f"{Q0}.lora_C.weight": "not a LoRA weight",
    "base_model.model..lora_A.weight": "not a LoRA weight",
    "base_model.model.a..b.lora_A.weight": "not a LoRA weight",
    "base_model.model.../../etc/passwd.lora_A.weight": "not a LoRA weight",
}


@pytest.mark.parametrize("key", UNKNOWN_TENSORS)
def test_tensor_that_would_stay_unused_is_refused(make_adapter, key):
    error = refusal(make_adapter(("q_proj",), tensors=pair(**{key: torch.ones(4)})))
    assert (error.reason, error.subject) == ("TENSOR_UNKNOWN", key)
    assert UNKNOWN_TENSORS[key] in error.message


def test_missing_half_is_refused_naming_the_other(make_adapter):
    error = refusal(make_adapter(("q_proj",), tensors=pair(**{B: None})))
    assert (error.reason, error.subject) == ("PAIR_INCOMPLETE", A)
    assert "has no B" in error.message
    error = refusal(make_adapter(("q_proj",), tensors=pair(**{A: None}), folder="second"))
    assert (error.reason, error.subject) == ("PAIR_INCOMPLETE", B)


@pytest.mark.parametrize(
    "key", [f"{Q0}.lora_A.default.weight", f"{Q0}.lora_embedding_A", f"{Q0}.lora_embedding_B"]
)
def test_two_tensors_for_one_place_are_refused(make_adapter, key):
    error = refusal(make_adapter(("q_proj",), tensors=pair(**{key: torch.ones(4, 16)})))
    assert error.reason == "TENSOR_DUPLICATE"


def test_module_outside_the_config_is_refused(make_adapter):
    error = refusal(make_adapter(tensors=pair(), target_modules=["v_proj"]))
    assert (error.reason, error.subject) == ("TARGET_NOT_SELECTED", A)
    error = refusal(
        make_adapter(("q_proj",), tensors=pair(), layers_to_transform=[1], folder="second")
    )
    assert error.reason == "TARGET_NOT_SELECTED"


@pytest.mark.parametrize(
    ("tensors", "config", "culprit"),
    [
        ({}, {"r": 8}, A),
        ({B: torch.ones(16, 5)}, {}, B),
        ({A: torch.ones(5, 16)}, {}, A),
        ({}, {"rank_pattern": {"q_proj": 2}}, A),
    ],
)
def test_rank_other_than_the_configs_is_refused(make_adapter, tensors, config, culprit):
    error = refusal(make_adapter(("q_proj",), tensors=pair(**tensors), **config))
    assert (error.reason, error.subject) == ("RANK_MISMATCH", culprit)


def test_tensor_that_is_no_matrix_is_refused(make_adapter):
    error = refusal(make_adapter(("q_proj",), tensors=pair(**{A: torch.ones(4, 16, 1, 1)})))
    assert (error.reason, error.subject) == ("SHAPE_INVALID", A)


def test_adapter_without_tensors_is_refused(make_adapter):
    error = refusal(make_adapter(("q_proj",), tensors={}))
    assert (error.reason, error.subject) == ("NO_TARGETS", WEIGHTS)
    assert "changes nothing" in error.message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("position", [0, 63])
def test_value_that_is_not_finite_is_refused(make_adapter, value, dtype, position):
    b = torch.ones(64, dtype=dtype)
    b[position] = value
    tensors = {A: torch.ones(4, 16, dtype=dtype), B: b.view(16, 4)}
    error = refusal(make_adapter(("q_proj",), tensors=tensors))
    assert (error.reason, error.subject) == ("NOT_FINITE", B)


def test_largest_values_are_finite(make_adapter):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        a = torch.full((4, 16), torch.finfo(dtype).max, dtype=dtype)
        b = torch.full((16, 4), torch.finfo(dtype).min, dtype=dtype)
        folder = make_adapter(("q_proj",), tensors={A: a, B: b}, folder=str(dtype))
        assert open_checkpoint(folder).rank == 4


def test_late_value_of_a_large_tensor_is_checked(make_adapter):
    a = torch.ones(4, 300_000)
    a[3, -1] = float("nan")
    error = refusal(make_adapter(("q_proj",), tensors=pair(**{A: a})))
    assert (error.reason, error.subject) == ("NOT_FINITE", A)


def test_missing_files(make_adapter):
    folder = make_adapter()
    (folder / WEIGHTS).rename(folder / "elsewhere")
    assert (refusal(folder).reason, refusal(folder).subject) == ("FILE_MISSING", WEIGHTS)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    assert refusal(folder).reason == "FILE_NOT_SAFETENSORS"
    assert refusal(folder).subject == "adapter_model.bin"
    (folder / CONFIG).unlink()
    assert refusal(folder).subject == CONFIG


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_only_regular_files_are_read(make_adapter, name, kind):
    folder = make_adapter()
    target = folder / "original"
    (folder / name).rename(target)
    if kind == "link":
        (folder / name).symlink_to(target)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        os.mkfifo(folder / name)
    error = refusal(folder)
    assert (error.reason, error.subject) == ("FILE_NOT_REGULAR", name)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "NOT_AN_OBJECT"),
        ("{", "NOT_JSON"),
        ('{"r": 4, "r": 8}', "DUPLICATE_KEY"),
        ('{"r": NaN}', "NOT_JSON"),
        ("[" * 100_000, "NESTED_TOO_DEEPLY"),
        (" " * (1 << 20) + "{}", "FILE_TOO_LARGE"),
    ],
)
def test_config_that_is_not_one_object_is_refused(make_adapter, text, reason):
    folder = make_adapter()
    (folder / CONFIG).write_text(text)
    error = refusal(folder)
    assert (error.reason, error.subject) == (reason, CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["target_modules", "layers_to_transform", "r", "new_thing"])
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
def test_config_at_the_edge_of_what_can_be_parsed_is_refused(make_adapter, key, start, end):
    """Whatever depth the parser allows, the error message must allow as well."""
    folder = make_adapter(**{key: ...})
    config = (folder / CONFIG).read_text()
    for depth in range(800, 1010):
        nested = start * depth + "1" + end * depth
        (folder / CONFIG).write_text(f'{config[:-1]}, "{key}": {nested}}}')
        assert refusal(folder).subject in (key, CONFIG)


def test_trouble_of_this_machine_is_not_blamed_on_the_adapter(make_adapter, monkeypatch):
    folder = make_adapter()

    def no_more_files(path: Path, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", no_more_files)
    with pytest.raises(OSError, match="Too many open files"):
        open_checkpoint(folder)


def test_truncated_weights(make_adapter):
    folder = make_adapter()
    size = (folder / WEIGHTS).stat().st_size
    os.truncate(folder / WEIGHTS, size - 1)
    assert refusal(folder).reason == "TENSOR_OUT_OF_FILE"


def test_limits(make_adapter):
    folder = make_adapter()
    error = refusal(folder, CheckpointLimits(max_source_bytes=100))
    assert isinstance(error, LimitExceeded)
    assert refusal(folder, CheckpointLimits(max_tensors=3)).reason == "TOO_MANY_TENSORS"
    assert refusal(folder, CheckpointLimits(max_header_bytes=99)).reason == "HEADER_TOO_LARGE"
    assert refusal(folder, CheckpointLimits(max_rank=3)).reason == "RANK_TOO_LARGE"


def test_reopened_blob_is_not_read_but_its_structure_is_checked(make_adapter):
    folder = make_adapter()
    first = open_checkpoint(folder)
    again = open_checkpoint(folder, digest=first.digest)
    assert (first.is_verified, again.is_verified) == (True, False)
    assert again.targets == first.targets
    os.truncate(folder / WEIGHTS, 8)
    with pytest.raises(InvalidAdapter):
        open_checkpoint(folder, digest=first.digest)
    with pytest.raises(CorruptData):
        again.read_tensor(next(iter(again.targets.values())).a)


def test_files_that_belong_to_an_adapter():
    assert all(
        map(
            is_adapter_file,
            (CONFIG, WEIGHTS, f"{WEIGHTS}.index.json", "adapter_model-00001-of-00002.safetensors"),
        )
    )
    assert not any(map(is_adapter_file, ("README.md", "adapter_model.bin", f"../{CONFIG}")))


def substance(checkpoint: Checkpoint) -> object:
    """All that decides what an adapter computes, in full instead of as hashes."""
    modules = checkpoint.config.modules
    weighted = [target.module for target in checkpoint.targets.values()]
    lost = modules.fields if modules.unweighted(weighted) else None
    return (
        checkpoint.config.use_rslora,
        lost,
        [
            (t.name, t.kind, t.alpha, r.dtype, r.shape, checkpoint.read_tensor(r).view(-1).tolist())
            for t in checkpoint.targets.values()
            for r in (t.a, t.b)
        ],
    )


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(200))
@given(
    name=st.sampled_from([CONFIG, WEIGHTS]),
    changes=st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=3)), min_size=1, max_size=5),
)
def test_damage_is_refused_or_makes_another_adapter(make_adapter, tmp_path, name, changes):
    folder = tmp_path / "adapter"
    if not folder.exists():
        make_adapter(("q_proj",), rank=1)
    sound = open_checkpoint(folder)
    expected = substance(sound)
    original = (folder / name).read_bytes()
    data = bytearray(original)
    for position, replacement in changes:
        start = int(position * len(data))
        data[start : start + len(replacement)] = replacement
    (folder / name).write_bytes(data)
    try:
        damaged = open_checkpoint(folder)
        assert (damaged.digest == sound.digest) == (substance(damaged) == expected)
    except InvalidAdapter:
        pass
    finally:
        (folder / name).write_bytes(original)
