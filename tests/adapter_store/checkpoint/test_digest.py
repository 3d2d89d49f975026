"""Committed vectors: a change of any of these is a new digest version, not a fix."""

import json
import math
import shutil
import struct
from pathlib import Path

import pytest

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.peft.config import parse_config
from adapter_store.checkpoint.reading.digest import compute_digest
from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.checkpoint.reading.safetensors import TensorRecord
from adapter_store.checkpoint.tensors import TargetWeights
from contract.images.dtypes import DataType
from contract.images.targets import TargetKind

Q = "base_model.model.model.layers.0.self_attn.q_proj"
HEAD, EMBEDDING = "base_model.model.lm_head", "base_model.model.model.embed_tokens"
CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "org/tiny",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
}


def write(folder: Path, dtype: str = "F32", config: dict | None = None, **options) -> Path:
    """An adapter made of nothing but the numbers 0, 1, 2, ... and the standard library."""
    folder.mkdir()
    header, data = {}, b""
    shapes = {f"{Q}.lora_A.weight": [2, 3], f"{Q}.lora_B.weight": [4, 2]}
    shapes |= options.get("more", {})
    if options.get("swapped"):
        shapes = dict(reversed(shapes.items()))
    for name, shape in shapes.items():
        values = [float(i) for i in range(math.prod(shape))]
        raw = struct.pack(f"<{len(values)}f", *values)
        if dtype == "BF16":
            raw = b"".join(raw[i + 2 : i + 4] for i in range(0, len(raw), 4))
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    if options.get("metadata"):
        header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    return folder


VECTORS = [  # dtype, config, digest; made with sha256sum from the format's text, too
    ("F32", {}, "4804536beb580bf9362430748e4d1e3e34c40130959bbcf0d9fc4012dc80ae6a"),
    ("BF16", {}, "268f40ac114a54edd27fffe277041263ed2282c258f624e0fa27a5a6b0a5f9f1"),
    (
        "F32",
        {"lora_alpha": 8},
        "0392e9ff273766887f2bb3850aa2211b980267a1196518d3f393ac57501f2cee",
    ),
    (
        "F32",
        {"use_rslora": True},
        "3c4a66321edc950018aa1a3c3b406dd7bdc0a4a77b29f1dd9851882ff980d5d1",
    ),
    (
        "F32",
        {"alpha_pattern": {"q_proj": 0.5}},
        "b35ac7010c116bc08cf91aed7ac5dd3440e1a689f27e4c15104370aa223c3ff7",
    ),
]


@pytest.mark.parametrize(("dtype", "config", "expected"), VECTORS)
def test_vectors(tmp_path, dtype, config, expected):
    folder = write(tmp_path / "adapter", dtype, config)
    assert open_checkpoint(folder).digest == f"sha256:{expected}"


EXPERTS = "base_model.model.model.layers.0.mlp.experts"
SQUARE = {"target_parameters": ["mlp.experts.w1"], "rank_pattern": {"experts.w1": 3}}
EXTRAS = [  # config, tensors besides A and B, digest; made from the format's text, too
    (
        {"lora_bias": True},
        {f"{Q}.lora_B.bias": [4]},
        "5429e00fddd36bb250c3e528ffaa460ff44ca506a314e805341962733b29ffde",
    ),
    (
        {"use_dora": True},
        {f"{Q}.lora_magnitude_vector": [4]},
        "a2e1ec84f642b4b07c5873303b3c6c2dea3fbc4aa4366e76381be8bd31663bf1",
    ),
    (
        {"target_parameters": ["mlp.experts.w1"], "rank_pattern": {"experts.w1": 3}},
        {f"{EXPERTS}.lora_A.weight": [6, 5], f"{EXPERTS}.lora_B.weight": [4, 6]},
        "ff14c7afc69f1e7ecd0f2869433147d7d8e33cbf2c69f7ea7e8dc86d34d24375",
    ),
    (
        {**SQUARE, "peft_version": "0.18.0"},
        {f"{EXPERTS}.lora_A.weight": [6, 5], f"{EXPERTS}.lora_B.weight": [5, 6]},
        "2e5e74c56927d594ed49e987b887f9afade1d4442e8a22be5b947221b3538c59",
    ),
    (
        {**SQUARE, "peft_version": "0.19.0"},
        {f"{EXPERTS}.lora_A.weight": [6, 5], f"{EXPERTS}.lora_B.weight": [5, 6]},
        "dd3de689493ec078f76197bcf8fe83a76eff851dcb2095723214c3523bbd6466",
    ),
    (
        {**SQUARE, "peft_version": "0.21.2"},
        {f"{EXPERTS}.lora_A.weight": [6, 5], f"{EXPERTS}.lora_B.weight": [5, 6]},
        "aacf55c9b7df6ef4fdf3209e7464c561b2a80eb183916b71cff84241a5f4f55b",
    ),
    (
        {"alora_invocation_tokens": [7, 1]},
        {},
        "b4bd0e55ced5d38799221837bef7a474884f48e572d3e6bb7ae1c4f8a1c808ca",
    ),
    (
        {"modules_to_save": ["lm_head"]},
        {f"{HEAD}.weight": [3, 2]},
        "e442338d2f45786d9fd2a80a6caff527aa42000245926a72621afb7a04f8d96f",
    ),
    (
        {},
        {f"{HEAD}.weight": [3, 2]},
        "1b9621d5df8d673dbdbf6f3dbddb708466f86c4bc13f0b684f54427a68974430",
    ),
    (
        {"bias": "lora_only"},
        {f"{Q}.base_layer.bias": [4]},
        "c3820654d7760a96b3b45eb404096fad1980647bed69ac1d2a8dd36be0971fd8",
    ),
    (
        {"trainable_token_indices": [7, 1]},
        {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": [2, 3]},
        "d3f1ce73ca6820da6e6cd1963e3f50910737529d608e3be47276eadaafa25852",
    ),
]


K = Q.replace("q_proj", "k_proj")
LAYER = "layers.0.self_attn.k_proj"
WRAPPED = [  # names with parts of torch's wrappers, as releases that served none of these had them
    (f"_orig_mod.{K}", {}, "17810b30dd3304cfead17369f8e3924c2603fe42d2218d4f9317fee5395c7f43"),
    (
        f"module.{K}",
        {"alpha_pattern": {f"model.{LAYER}": 3}},
        "28aa4fc99308dec23c7e500cb181866d678ead114368998361384e659f948413",
    ),
    (
        K.replace("layers.0.", "layers.0._orig_mod."),
        {"target_modules": ["q_proj", "layers.0._orig_mod.self_attn.k_proj"]},
        "d370830a20b83502d3b3b44537dd1942697d15fb6c759d1479e896fae79852f6",
    ),
]


@pytest.mark.parametrize(("module", "config", "expected"), WRAPPED)
def test_vectors_of_wrapped_names(tmp_path, module, config, expected):
    more = {f"{module}.lora_A.weight": [2, 3], f"{module}.lora_B.weight": [4, 2]}
    config = {"target_modules": ["q_proj", "k_proj"], **config}
    checkpoint = open_checkpoint(write(tmp_path / "adapter", config=config, more=more))
    assert checkpoint.digest == f"sha256:{expected}"
    assert f"model.{LAYER}" in checkpoint.targets


@pytest.mark.parametrize(("config", "more", "expected"), EXTRAS)
def test_vectors_of_what_there_is_besides(tmp_path, config, more, expected):
    folder = write(tmp_path / "adapter", config=config, more=more)
    assert open_checkpoint(folder).digest == f"sha256:{expected}"


def test_vector_of_an_embedding():
    name = "model.embed_tokens"
    a, b = (TensorRecord(side, "", DataType.FLOAT16, (2, 2), 0, 8) for side in "AB")
    target = TargetWeights(name, name, TargetKind.EMBEDDING, 2, 8.0, 4.0, a, b)
    config = parse_config({**CONFIG, "target_modules": ["embed_tokens"]}, CheckpointLimits())
    digest = compute_digest(config, [target], {"A": bytes(32), "B": bytes(32)})
    assert digest == "sha256:8ac826c3077534cbe2821ea5b35a838953e83c1965ae7273982f7cc6584a80c8"


@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": 4.0},
        {"use_rslora": False, "bias": "none", "lora_dropout": 0.3, "inference_mode": True},
        {"task_type": "CAUSAL_LM", "peft_version": "0.18.0", "revision": "main"},
        {"r": 64, "rank_pattern": {"q_proj": 2}},
        {"lora_alpha": 32, "alpha_pattern": {r".*\.q_proj": 4}},
        {"target_modules": r".*q_proj"},
        {"target_modules": ["q_proj", "self_attn.q_proj"], "exclude_modules": ["o_proj"]},
        {"base_model_name_or_path": "renamed"},
    ],
)
def test_config_that_computes_alike_is_the_same_adapter(tmp_path, config):
    plain = open_checkpoint(write(tmp_path / "plain")).digest
    assert open_checkpoint(write(tmp_path / "other", config=config)).digest == plain


def test_file_layout_does_not_matter(tmp_path):
    plain = open_checkpoint(write(tmp_path / "plain")).digest
    assert open_checkpoint(write(tmp_path / "swapped", swapped=True)).digest == plain
    assert open_checkpoint(write(tmp_path / "metadata", metadata=True)).digest == plain


def test_what_computes_differently_is_another_adapter(tmp_path):
    digests = {
        open_checkpoint(write(tmp_path / str(index), dtype, config)).digest
        for index, (dtype, config, _) in enumerate(VECTORS)
    }
    assert len(digests) == len(VECTORS)


def test_listed_modules_without_weights_count(tmp_path):
    """They decide whether a model with such modules refuses the adapter."""
    listings = [
        {},
        {"target_modules": ["q_proj", "k_proj"]},
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]},
        {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0]},
    ]
    digests = [
        open_checkpoint(write(tmp_path / str(index), config=config)).digest
        for index, config in enumerate(listings)
    ]
    assert len(set(digests)) == len(listings)
    for number, same in enumerate((["k_proj", "q_proj"], ["q_proj", "k_proj", "k_proj"])):
        folder = write(tmp_path / f"same{number}", config={"target_modules": same})
        assert open_checkpoint(folder).digest == digests[1]


def test_one_bit_of_a_weight_matters(tmp_path):
    folder = write(tmp_path / "a")
    other = tmp_path / "b"
    shutil.copytree(folder, other)
    weights = other / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4] ^= 1
    weights.write_bytes(data)
    assert open_checkpoint(folder).digest != open_checkpoint(other).digest
