"""One adapter as each trainer saves it: every reader yields the same image. `trainers/make.py` made
the folders, by the trainers' own libraries where they install."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.checkpoint.formats.readers import READERS, TRAINERS
from adapter_store.checkpoint.formats.select import Format, find_format
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.errors import IncompatibleAdapter, InvalidAdapter
from adapter_store.images.compile import compile_image
from adapter_store.sources.choice import choose_files
from contract.adapter_files import MLX_WEIGHTS_FILE, is_text_file
from contract.images.dtypes import DataType
from contract.images.layouts import Layout
from contract.images.targets import OtherName, Target, TargetKind
from loadout import upload
from loadout.errors import InvalidArgument
from tests.support.store.checkpoints import CONFIG, WEIGHTS, refusal

FOLDERS = Path(__file__).parent / "trainers"
SAME = ("peft", "trl", "torchtune", "megatron", "mlx")
PREFIX = "base_model.model."
HIDDEN, VOCAB, RANK = 16, 64, 2
OUT = {"q_proj": 16, "v_proj": 8}
Q0 = "model.layers.0.self_attn.q_proj"
WEIRD = "new_embeddings.safetensors"


def layout(dtype: DataType = DataType.FLOAT32, cut: bool = False) -> Layout:
    """The targets of the model that was trained; `cut`: the second part of each side."""
    targets = [
        Target(
            *(f"model.layers.{layer}.self_attn.{name}", layer, f"qkv{layer}", TargetKind.LINEAR),
            *(HIDDEN, out),
            in_slice=(4, 12) if cut else None,
            out_slice=(out // 2, out) if cut else None,
        )
        for layer in (0, 1)
        for name, out in OUT.items()
    ]
    targets.append(Target("lm_head", None, "head", TargetKind.LINEAR, HIDDEN, VOCAB))
    return Layout("org/tiny", "0" * 64, dtype, 1, tuple(targets))


def image_of(folder: Path, *options: object) -> bytes:
    return bytes(compile_image(open_checkpoint(folder), layout(*options)).buffer.numpy())


@pytest.fixture
def mlx(tmp_path: Path) -> Path:
    """A copy of MLX-LM's folder, to be changed."""
    return Path(shutil.copytree(FOLDERS / "mlx", tmp_path / "mlx"))


@pytest.fixture
def peft(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDERS / "peft", tmp_path / "peft"))


def edit(folder: Path, **fields: object) -> Path:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def edit_lora(folder: Path, **fields: object) -> Path:
    """Changes MLX-LM's lora_parameters; None removes one."""
    parameters = json.loads((folder / CONFIG).read_text())["lora_parameters"] | fields
    kept = {key: value for key, value in parameters.items() if value is not None}
    return edit(folder, lora_parameters=kept)


def rename(folder: Path, name: Callable[[str], str], file: str = WEIGHTS) -> Path:
    tensors = {name(key): value for key, value in load_file(folder / file).items()}
    save_file(tensors, folder / file)
    return folder


@pytest.mark.parametrize("options", [(), (DataType.BFLOAT16,), (DataType.FLOAT16, True)])
@pytest.mark.parametrize("trainer", SAME)
def test_every_reader_yields_the_same_image(trainer: str, options: tuple[object, ...]) -> None:
    folder = FOLDERS / trainer
    assert open_checkpoint(folder).base_model in ("org/tiny", "")  # torchtune may name none
    assert image_of(folder, *options) == image_of(FOLDERS / "peft", *options)


def test_an_image_of_transposed_weights_computes_what_they_are(mlx: Path) -> None:
    """Not only the same as another reader's: B @ A, from the file, in MLX-LM's own terms."""
    plan = compile_image(open_checkpoint(mlx), layout())
    saved = load_file(mlx / MLX_WEIGHTS_FILE)
    tensors = [
        plan.buffer[s.offset : s.offset + s.length_bytes].view(torch.float32).view(shape)
        for s, shape in zip(plan.plan.segments, plan.plan.shapes, strict=True)
    ]
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    for index, name in enumerate(key for key in plan.plan.names if key.endswith(".A")):
        module = name.removesuffix(".A")
        a, b = tensors[2 * index : 2 * index + 2]
        theirs = 2.0 * (x @ saved[f"{module}.lora_a"]) @ saved[f"{module}.lora_b"]
        torch.testing.assert_close(x @ a.T @ b, theirs)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("of_q", [{"outputs": (0, 8)}, {"block_sizes": (4, 2, 2), "block_part": 0}])
def test_a_fused_module_of_transposed_weights(
    tmp_path: Path, cut: bool, of_q: dict[str, object]
) -> None:
    """One module computes three targets, in one block after another or in several."""
    of_others = [
        {"outputs": (8 + 4 * part, 12 + 4 * part)} if "outputs" in of_q
        else {"block_sizes": (4, 2, 2), "block_part": 1 + part}
        for part in (0, 1)
    ]  # fmt: skip
    targets = tuple(
        Target(
            *(f"model.layers.0.self_attn.{name}", 0, "qkv", TargetKind.LINEAR, HIDDEN, out),
            out_slice=(out // 2, out) if cut else None,
            other_names=(OtherName("model.layers.0.self_attn.qkv_proj", **other),),
        )
        for name, out, other in zip("qkv", (8, 4, 4), (of_q, *of_others), strict=True)
    )
    fused = Layout("org/tiny", "0" * 64, DataType.FLOAT32, 2, targets)
    a, b = torch.randn(RANK, HIDDEN), torch.randn(16, RANK)
    module = "model.layers.0.self_attn.qkv_proj"
    images = []
    for name, sides, fields in (
        (WEIGHTS, {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, PEFT_FIELDS),
        (MLX_WEIGHTS_FILE, {f"{module}.lora_a": a.T, f"{module}.lora_b": b.T}, MLX_FIELDS),
    ):
        folder = tmp_path / name
        folder.mkdir()
        save_file({key: value.contiguous() for key, value in sides.items()}, folder / name)
        (folder / CONFIG).write_text(json.dumps(fields))
        images.append(bytes(compile_image(open_checkpoint(folder), fused).buffer.numpy()))
    assert images[0] == images[1]
    assert any(images[0])


PEFT_FIELDS = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": ["qkv_proj"]}
MLX_FIELDS = {
    "lora_parameters": {"rank": RANK, "scale": 3, "keys": ["self_attn.qkv_proj"]},
    "num_layers": 1,
}


def test_digests_are_those_of_the_content(mlx: Path) -> None:
    """Committed: the same files by PEFT's readers are one adapter, MLX-LM's are another."""
    digests = {name: open_checkpoint(FOLDERS / name).digest for name in SAME}
    assert set(digests.values()) == {PEFT_DIGEST, MLX_DIGEST}
    assert [name for name in SAME if digests[name] == MLX_DIGEST] == ["mlx"]
    assert open_checkpoint(FOLDERS / "tinker").digest == TINKER_DIGEST
    edit(mlx, learning_rate=3.0, seed=4, model="renamed", num_layers=-1)
    assert open_checkpoint(edit_lora(mlx, dropout=0.5, alpha=16.0)).digest == MLX_DIGEST
    assert open_checkpoint(edit_lora(mlx, scale=8.0)).digest == MLX_SCALE_8_DIGEST


# Made with hashlib from the format's text, without this code.
PEFT_DIGEST = "sha256:3e0f769da79f903ec9450aa99a674ab3560150771056607fc7873d208c9d5a87"
MLX_DIGEST = "sha256:f4f7f8a5b17ff81f0307c809bda5c4c7c033819c6fb46774aafe50213b5bc22c"
MLX_SCALE_8_DIGEST = "sha256:ec0e9e3b565da2f5a5a7a6d4ddf31b9d0fd4f767095900cb41823fe22fb61bc5"
TINKER_DIGEST = "sha256:5d77501f37dd540d20ceeb60a103ac3e644bed4b91b4959fcc366d6abfa4d04d"


def test_the_same_bytes_in_another_role_are_another_adapter(tmp_path: Path) -> None:
    """Square A and B: shapes cannot tell the roles apart."""
    tensors = {side: torch.arange(4.0).view(2, 2) for side in "ab"}
    folders = [tmp_path / "mlx", tmp_path / "peft"]
    for folder in folders:
        folder.mkdir()
    parameters = {"rank": 2, "scale": 8, "keys": ["q_proj"]}
    (folders[0] / CONFIG).write_text(json.dumps({"lora_parameters": parameters, "num_layers": 1}))
    save_file(
        {f"layers.0.q_proj.lora_{s}": t for s, t in tensors.items()},
        folders[0] / "adapters.safetensors",
    )
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folders[1] / CONFIG).write_text(json.dumps(fields))
    named = {f"{PREFIX}layers.0.q_proj.lora_{s.upper()}.weight": t for s, t in tensors.items()}
    save_file(named, folders[1] / WEIGHTS)
    assert len({open_checkpoint(folder).digest for folder in folders}) == 2


def test_tinkers_head(tmp_path: Path) -> None:
    """As PEFT saves the same, with the head by its own name and in the config."""
    twin = Path(shutil.copytree(FOLDERS / "tinker", tmp_path / "twin"))
    rename(twin, lambda key: key.replace("model.unembed_tokens", "lm_head"))
    assert refusal(twin).reason == "TARGET_NOT_SELECTED"  # PEFT's all-linear has no head
    edit(twin, target_modules=["q_proj", "v_proj", "lm_head"])
    assert image_of(FOLDERS / "tinker") == image_of(twin)
    assert open_checkpoint(FOLDERS / "tinker").module_names == ("lm_head", "q_proj", "v_proj")
    tensors = load_file(twin / WEIGHTS)
    for key in [key for key in tensors if "lm_head" in key]:
        tensors[key.replace("lm_head", "model.unembed_tokens")] = tensors[key].clone()
    save_file(tensors, twin / WEIGHTS)
    edit(twin, target_modules=["q_proj", "v_proj", "lm_head", "unembed_tokens"])
    assert refusal(twin).reason == "TENSOR_DUPLICATE"


@pytest.mark.parametrize(
    "change",
    [
        ("", ""),
        ("model.", "base_model.model.model."),
        ("model.", "base_model.model.base_model.model.model."),
        ("model.", "language_model.model."),
        ("model.", "model.language_model."),
        ("model.", "base_model.model.language_model."),
        ("model.", "base_model.model.model.language_model."),
        (".weight", ".default.weight"),
    ],
)
def test_names_with_and_without_prefixes_are_one_adapter(
    peft: Path, change: tuple[str, str]
) -> None:
    rename(peft, lambda key: key.removeprefix(PREFIX).replace(*change, 1))
    assert open_checkpoint(peft).digest == PEFT_DIGEST


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_an_expression_as_unsloth_writes_it(peft: Path, prefix: str) -> None:
    """For models with and without a vision tower at once."""
    names = "(?:self_attn|mlp).*?(?:q_proj|k_proj|v_proj|up_proj)"
    of_text = r"\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj))"
    expression = rf"(?:.*?(?:language|text).*?{names}.*?)|(?:{of_text})"
    rename(peft, lambda key: key.replace("model.layers", f"{prefix}layers"))
    edit(peft, target_modules=expression, auto_mapping={"unsloth_fixed": True})
    assert open_checkpoint(peft).digest == PEFT_DIGEST


def test_one_weight_by_two_names_is_refused(peft: Path) -> None:
    tensors = load_file(peft / WEIGHTS)
    key = f"{PREFIX}{Q0}.lora_A.weight"
    for other in (key.removeprefix(PREFIX), key.replace("model.layers", "language_model.layers")):
        save_file({**tensors, other: tensors[key].clone()}, peft / WEIGHTS)
        assert refusal(peft).reason == "TENSOR_DUPLICATE"


def test_the_readers_and_the_table_of_trainers_have_the_same_formats() -> None:
    assert READERS.keys() == {trainer.format for trainer in TRAINERS} == set(Format)
    assert find_format(FOLDERS / "mlx") is Format.MLX
    assert len({trainer.name for trainer in TRAINERS}) == len(TRAINERS)


# What may lie beside an adapter, and what may not

UNUSED = (
    *(WEIRD, "extra.SafeTensors", "model.safetensors", "pytorch_model.bin", "weights.pt"),
    *("model.safetensors.index.json", "adapter.safetensors", "modelopt_state.pth", "a\nb.bin"),
    *("hf_quant_config.json", "value_head.safetensors", "non_lora_trainables.bin", "m.gguf"),
    *("0000100_adapters.safetensors", "adapters.npz", "embeddings.npy", "optimizer.pt.pth"),
)
PASSING = (
    *("README.md", "added_tokens.json", "chat_template.jinja", "config.json", "merges.txt"),
    *("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state_3.pth"),
    *("training_args.bin", "tokenizer.model", "trainer_state.json", "random_states_0.pkl"),
    *("tokens_state.json", "debug.log", "trainer_log.jsonl", "training_loss.png", "latest"),
    *("all_results.json", "llamaboard_config.yaml", "special_tokens_map.json", "vocab.json"),
    *("pytorch_model_fsdp.bin", "adapter_model.bin", "events.out.tfevents.1", "loss.png"),
)


@pytest.mark.parametrize("name", UNUSED)
def test_what_would_be_dropped_is_refused_by_name_everywhere(peft: Path, name: str) -> None:
    (peft / name).write_bytes(b"x")
    error = refusal(peft)
    shown = name if name.isprintable() else ascii(name)
    assert (error.reason, error.subject) == ("FILE_UNUSED", shown)
    with pytest.raises(InvalidAdapter) as of_source:
        choose_files([path.name for path in peft.iterdir()], "s3://bucket/a")
    assert (of_source.value.reason, of_source.value.subject) == ("FILE_UNUSED", shown)
    with pytest.raises(InvalidArgument, match="would not be applied"):
        upload.open_folder(peft)


def test_what_changes_nothing_passes_everywhere(peft: Path) -> None:
    before = image_of(peft)
    for name in PASSING:
        (peft / name).write_bytes(b"x")
    (peft / "global_step5").mkdir()
    assert image_of(peft) == before
    names = [path.name for path in peft.iterdir()]
    chosen = choose_files([*names, f"checkpoint-5/{WEIRD}"], "hf://a/b")
    sent = upload.open_folder(peft).files
    for found in (chosen, sent):
        assert [name for name in found if not is_text_file(name)] == [CONFIG, WEIGHTS]


@pytest.mark.parametrize("trainer", [*SAME, "tinker"])
def test_clients_and_sources_take_each_trainers_folder(trainer: str) -> None:
    sent = upload.open_folder(FOLDERS / trainer).files
    chosen = choose_files([path.name for path in (FOLDERS / trainer).iterdir()], "file:///a")
    own = [CONFIG, MLX_WEIGHTS_FILE if trainer == "mlx" else WEIGHTS]
    texts = [path.name for path in (FOLDERS / trainer).iterdir() if is_text_file(path.name)]
    assert sorted(sent) == sorted(chosen) == sorted([*own, *texts])


def test_two_formats_in_one_folder_are_refused(peft: Path) -> None:
    shutil.copy(FOLDERS / "mlx" / MLX_WEIGHTS_FILE, peft)
    with pytest.raises(InvalidAdapter) as of_source:
        choose_files([path.name for path in peft.iterdir()], "s3://bucket/a")
    assert of_source.value.reason == "FILES_AMBIGUOUS"
    with pytest.raises(InvalidArgument, match="would not be applied"):
        upload.open_folder(peft)
    assert refusal(peft).subject == "peft_type"  # the config is read first: PEFT's
    shutil.copy(FOLDERS / "mlx" / CONFIG, peft)
    assert (refusal(peft).reason, refusal(peft).subject) == ("FILES_AMBIGUOUS", MLX_WEIGHTS_FILE)
    (peft / MLX_WEIGHTS_FILE).unlink()
    assert "MLX-LM's config" in refusal(peft).message


# MLX-LM's files as strangers may write them

HOSTILE_CONFIGS = {  # what is changed: (fields, of lora_parameters, subject, reason)
    "dora": ({"fine_tune_type": "dora"}, {}, "fine_tune_type", "CONFIG_UNSUPPORTED"),
    "dora of older versions": ({"use_dora": True}, {}, "use_dora", "CONFIG_UNSUPPORTED"),
    "full": ({"fine_tune_type": "full"}, {}, "fine_tune_type", "CONFIG_UNSUPPORTED"),
    "another kind": ({"fine_tune_type": ["lora"]}, {}, "fine_tune_type", "CONFIG_UNSUPPORTED"),
    "no parameters": ({"lora_parameters": None}, None, "lora_parameters", "CONFIG_INVALID"),
    "nested wrongly": ({"lora_parameters": [{}]}, None, "lora_parameters", "CONFIG_INVALID"),
    "no rank": ({}, {"rank": None}, "rank", "CONFIG_INVALID"),
    "rank 0": ({}, {"rank": 0}, "rank", "CONFIG_INVALID"),
    "rank true": ({}, {"rank": True}, "rank", "CONFIG_INVALID"),
    "rank too large": ({}, {"rank": 10**9}, "rank", "RANK_TOO_LARGE"),
    "another rank": ({}, {"rank": 3}, f"{Q0}.lora_a", "RANK_MISMATCH"),
    "no scale": ({}, {"scale": None, "alpha": 4}, "scale", "CONFIG_INVALID"),
    "a scale of text": ({}, {"scale": "2"}, "scale", "CONFIG_INVALID"),
    "a scale of many digits": ({}, {"scale": 10**400}, "scale", "CONFIG_INVALID"),
    "an unknown parameter": ({}, {"use_rslora": True}, "use_rslora", "CONFIG_UNKNOWN"),
    "an unknown key": ({"rope_scale": 2}, {}, "rope_scale", "CONFIG_UNKNOWN"),
    "keys of text": ({}, {"keys": "self_attn.q_proj"}, "keys", "CONFIG_INVALID"),
    "no keys": ({}, {"keys": []}, "keys", "CONFIG_INVALID"),
    "keys of numbers": ({}, {"keys": [1]}, "keys", "CONFIG_INVALID"),
    "a map of keys": ({}, {"keys": {}}, "keys", "CONFIG_INVALID"),
    "other keys": ({}, {"keys": ["mlp.up_proj"]}, f"{Q0}.lora_a", "TARGET_NOT_SELECTED"),
    "keys by their last part": ({}, {"keys": [*OUT]}, f"{Q0}.lora_a", "TARGET_NOT_SELECTED"),
    "fewer layers": ({"num_layers": 1}, {}, f"{Q0}.lora_a", "TARGET_NOT_SELECTED"),
    "no layers": ({"num_layers": None}, {}, "num_layers", "CONFIG_INVALID"),
    "layers of text": ({"num_layers": "2"}, {}, "num_layers", "CONFIG_INVALID"),
    "two numbers of layers": ({"lora_layers": 4}, {}, "lora_layers", "CONFIG_INVALID"),
    "a model that is none": ({"model": {}}, {}, "model", "CONFIG_INVALID"),
    "PEFT's config": ({"peft_type": "LORA"}, {}, "peft_type", "CONFIG_INVALID"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE_CONFIGS)
def test_hostile_configs_of_mlx(mlx: Path, case: str) -> None:
    fields, parameters, subject, reason = HOSTILE_CONFIGS[case]
    edit(mlx if parameters is None else edit_lora(mlx, **parameters), **fields)
    error = refusal(mlx)
    assert (error.subject, error.reason) == (subject, reason)


def test_an_infinite_scale_is_refused(mlx: Path) -> None:
    text = (mlx / CONFIG).read_text()
    for scale, reason in (
        ("1e999", "CONFIG_INVALID"),
        ("Infinity", "NOT_JSON"),
        ("NaN", "NOT_JSON"),
    ):
        (mlx / CONFIG).write_text(text.replace('"scale": 2.0', f'"scale": {scale}'))
        assert refusal(mlx).reason == reason


def test_a_scale_that_no_value_fits_is_refused_by_layout(mlx: Path) -> None:
    checkpoint = open_checkpoint(edit_lora(mlx, scale=1e30))
    with pytest.raises(IncompatibleAdapter) as error:
        compile_image(checkpoint, layout(DataType.FLOAT16))
    assert error.value.reason == "CAST_OVERFLOW"
    assert error.value.subject.endswith("_proj.lora_b")


def test_many_keys_are_read_and_too_many_refused(mlx: Path) -> None:
    keys = [f"m{number}" for number in range(50_000)]
    edit_lora(mlx, keys=["self_attn.q_proj", "self_attn.v_proj", *keys])
    assert image_of(mlx) == image_of(FOLDERS / "mlx")
    edit_lora(mlx, keys=[f"module{number}" for number in range(1_000_000)])
    assert refusal(mlx).reason == "FILE_TOO_LARGE"


@pytest.mark.slow
def test_a_million_tensors_are_refused(mlx: Path) -> None:
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(f'"t{number}.lora_a":{empty}' for number in range(1_000_000)) + "}"
    data = text.encode()
    (mlx / MLX_WEIGHTS_FILE).write_bytes(len(data).to_bytes(8, "little") + data)
    assert refusal(mlx).reason == "HEADER_TOO_LARGE"
    limits = CheckpointLimits(max_header_bytes=1 << 30)
    assert refusal(mlx, limits).reason == "TOO_MANY_TENSORS"


HOSTILE_TENSORS = {  # (name of one more tensor, its shape, reason)
    "DoRA's": (f"{Q0}.m", (16,), "TENSOR_UNKNOWN"),
    "PEFT's": (f"{PREFIX}{Q0}.lora_A.weight", (2, 16), "TENSOR_UNKNOWN"),
    "a base weight": (f"{Q0}.weight", (16, 16), "TENSOR_UNKNOWN"),
    "a path": ("../../etc/passwd.lora_a", (16, 2), "TENSOR_UNKNOWN"),
    "no module": (".lora_a", (16, 2), "TENSOR_UNKNOWN"),
    "the embedding's": ("model.embed_tokens.lora_a", (VOCAB, 2), "TENSOR_UNKNOWN"),
    "experts' A alone": ("model.layers.0.switch_mlp.up_proj.lora_a", (4, 2, 16), "PAIR_INCOMPLETE"),
    "of no experts": ("model.layers.0.mlp.up_proj.lora_a", (4, 2, 16), "SHAPE_INVALID"),
    "by another name": (f"model.language_{Q0}.lora_a", (16, 2), "TENSOR_DUPLICATE"),
    "a half": ("model.layers.1.self_attn.k_proj.lora_a", (16, 2), "PAIR_INCOMPLETE"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE_TENSORS)
def test_hostile_tensors_of_mlx(mlx: Path, case: str) -> None:
    name, shape, reason = HOSTILE_TENSORS[case]
    tensors = load_file(mlx / MLX_WEIGHTS_FILE)
    save_file({**tensors, name: torch.ones(shape)}, mlx / MLX_WEIGHTS_FILE)
    error = refusal(mlx)
    # Of two for one target, the one that lies behind in the file
    second = f"{Q0}.lora_a" if reason == "TENSOR_DUPLICATE" else name
    assert (error.reason, error.subject) == (reason, second)


def test_weights_that_are_not_transposed_are_refused(mlx: Path) -> None:
    tensors = load_file(mlx / MLX_WEIGHTS_FILE)
    save_file({key: value.T.contiguous() for key, value in tensors.items()}, mlx / MLX_WEIGHTS_FILE)
    assert refusal(mlx).reason == "RANK_MISMATCH"


def test_whole_paths_and_all_linear_modules_of_mlx(mlx: Path) -> None:
    expected = image_of(mlx)
    paths = [target.module for target in open_checkpoint(mlx).targets.values()]
    for keys in (paths, None):
        assert image_of(edit_lora(mlx, keys=keys)) == expected
    tensors = load_file(mlx / MLX_WEIGHTS_FILE)
    head = {"lm_head.lora_a": torch.ones(HIDDEN, 2), "lm_head.lora_b": torch.ones(2, VOCAB)}
    save_file(tensors | head, mlx / MLX_WEIGHTS_FILE)
    assert refusal(mlx).reason == "TARGET_NOT_SELECTED"
    keys = ["self_attn.q_proj", "self_attn.v_proj", "lm_head"]
    assert len(image_of(edit_lora(mlx, keys=keys))) > len(expected)


def test_a_listed_module_without_weights_is_refused_by_layout(mlx: Path) -> None:
    keys = ["self_attn.q_proj", "self_attn.v_proj", "lm_head"]
    with pytest.raises(IncompatibleAdapter) as error:
        image_of(edit_lora(mlx, keys=keys))
    assert error.value.reason == "TARGET_MISSING"
