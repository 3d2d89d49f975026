"""Hostile adapters, each with the name of what must become of it.

A case changes the folder of a good adapter (rank 4, q_proj of both layers, fp32). The good weights
have the tensors of `A` and `B` and the same for layer 1.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX, BIN = f"{WEIGHTS}.index.json", "adapter_model.bin"
SHARD = "adapter_model-00001-of-00001.safetensors"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"

Change = Callable[[Path], Any]
CASES: dict[str, tuple[str, Change]] = {}


def case(name: str, reason: str, change: Change) -> None:
    assert name not in CASES, name
    CASES[name] = (reason, change)


# The config


def config(**fields: Any) -> Change:
    """Sets fields of the config."""

    def change(folder: Path) -> None:
        values = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**values, **fields}))

    return change


def config_text(text: str | bytes) -> Change:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / CONFIG).write_bytes(data)


def nested(key: str) -> Change:
    def change(folder: Path) -> None:
        text = (folder / CONFIG).read_text()
        deep = "[" * 100_000 + "]" * 100_000
        (folder / CONFIG).write_text(f'{text[:-1]}, "{key}": {deep}}}')

    return change


case("config: missing", "FILE_MISSING", lambda folder: (folder / CONFIG).unlink())
case("config: empty", "NOT_JSON", config_text(""))
case("config: not UTF-8", "NOT_UTF8", config_text(b'{"r": "\xff"}'))
case("config: UTF-16", "NOT_UTF8", config_text('{"r": 4}'.encode("utf-16")))
case("config: not JSON", "NOT_JSON", config_text("{"))
case("config: NaN", "NOT_JSON", config_text('{"r": NaN}'))
case("config: a number of 5000 digits", "NOT_JSON", config_text('{"r": ' + "9" * 5000 + "}"))
case("config: a list", "NOT_AN_OBJECT", config_text("[]"))
case("config: a key twice", "DUPLICATE_KEY", config_text('{"r": 4, "r": 8}'))
case("config: nested deeply", "NESTED_TOO_DEEPLY", config_text("[" * 500_000))
case("config: nested deeply in a key", "NESTED_TOO_DEEPLY", nested("target_modules"))
case("config: two megabytes", "FILE_TOO_LARGE", config_text(" " * (2 << 20) + "{}"))
case("config: rank 0", "CONFIG_INVALID", config(r=0))
case("config: negative rank", "CONFIG_INVALID", config(r=-4))
case("config: rank true", "CONFIG_INVALID", config(r=True))
case("config: rank 4.0", "CONFIG_INVALID", config(r=4.0))
case("config: rank of a billion", "RANK_TOO_LARGE", config(r=10**9))
case("config: rank of a pattern", "RANK_TOO_LARGE", config(rank_pattern={"q_proj": 10**9}))
case("config: infinite alpha", "NOT_JSON", config(lora_alpha=float("inf")))
case("config: alpha 1e999", "CONFIG_INVALID", lambda folder: _alpha_overflow(folder))
case("config: alpha of 400 digits", "CONFIG_INVALID", config(lora_alpha=10**400))
case("config: another method", "CONFIG_UNSUPPORTED", config(peft_type="IA3"))
case("config: no method", "CONFIG_UNSUPPORTED", config(peft_type=None))
case("config: unknown key", "CONFIG_UNKNOWN", config(new_magic=3))
case("config: a key with a line end", "CONFIG_UNKNOWN", config(**{"a\nb": 3}))
case("config: a key of no letter", "CONFIG_UNKNOWN", config(**{"": 3}))
case("config: a key of 100,000 letters", "CONFIG_UNKNOWN", config(**{"x" * 100_000: 3}))
case("config: a value of 100,000 letters", "CONFIG_UNKNOWN", config(new_magic="x" * 100_000))
case("config: no modules", "CONFIG_INVALID", config(target_modules=[]))
case("config: modules as a number", "CONFIG_INVALID", config(target_modules=7))
case("config: broken expression", "PATTERN_INVALID", config(target_modules="(q_proj"))
case("config: endless expression", "PATTERN_TOO_LARGE", config(target_modules="(a{999}){999}"))
case("config: huge expression", "PATTERN_TOO_LARGE", config(target_modules="a" * 9000))
case("config: base model with a line end", "CONFIG_INVALID", config(base_model_name_or_path="a\nb"))
for key, value in {
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "layer_replication": [[0, 2], [1, 2]],
    "megatron_config": {"x": 1},
    "init_lora_weights": "pissa",
}.items():
    case(f"config: {key}", "CONFIG_UNSUPPORTED", config(**{key: value}))


case("config: a bias of B that is not there", "PAIR_INCOMPLETE", config(lora_bias=True))
case("config: magnitudes that are not there", "PAIR_INCOMPLETE", config(use_dora=True))
case("config: DoRA with a bias of B", "CONFIG_UNSUPPORTED", config(lora_bias=True, use_dora=True))
case("config: biases that are not there", "TENSOR_MISSING", config(bias="all"))
case("config: biases of something", "CONFIG_INVALID", config(bias="some"))
case("config: a saved module that is not there", "TENSOR_MISSING", config(modules_to_save=["norm"]))
case("config: saved modules as a word", "CONFIG_INVALID", config(modules_to_save="lm_head"))
case("config: a saved module of no name", "CONFIG_INVALID", config(modules_to_save=[""]))
case("config: rows that are not there", "TENSOR_MISSING", config(trainable_token_indices=[1]))
for name, ids in {
    "a word": "all",
    "words": ["a"],
    "numbers with points": [1.0],
    "true": [True],
    "twice": [7, 7],
    "below zero": [-1],
    "beyond int32": [1 << 31],
    "a list in a list": [[1]],
    "none of a module": {"embed_tokens": []},
    "a module without a name": {"": [1]},
    "a number of a module": {"embed_tokens": 1},
}.items():
    change = config(trainable_token_indices=ids)
    case(f"config: token ids: {name}", "CONFIG_INVALID", change)
case("config: lost parameters", "TENSOR_MISSING", config(target_parameters=["mlp.experts.w1"]))
case("config: parameters as a word", "CONFIG_INVALID", config(target_parameters="experts"))
case("config: a parameter of no name", "CONFIG_INVALID", config(target_parameters=[""]))
case(
    "config: DoRA of parameters",
    "CONFIG_UNSUPPORTED",
    config(target_parameters=["mlp.experts.w1"], use_dora=True),
)
for name, ids in {
    "a word": "go",
    "words": ["go"],
    "true": [True],
    "below zero": [-1],
    "beyond int32": [1 << 31],
    "two thousand": [1] * 2000,
    "a number": 7,
}.items():
    change = config(alora_invocation_tokens=ids)
    case(f"config: invocation tokens: {name}", "CONFIG_INVALID", change)
case(
    "config: aLoRA with saved modules",
    "CONFIG_UNSUPPORTED",
    config(alora_invocation_tokens=[5], modules_to_save=["lm_head"]),
)
case("config: DoRA as a word", "CONFIG_INVALID", config(use_dora="yes"))


def _alpha_overflow(folder: Path) -> None:
    text = (folder / CONFIG).read_text().replace('"lora_alpha": 8', '"lora_alpha": 1e999')
    assert "1e999" in text
    (folder / CONFIG).write_text(text)


# The container


def raw(header: bytes | dict[str, Any], data: bytes = b"") -> Change:
    """Weights of this header and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + data
    return lambda folder: (folder / WEIGHTS).write_bytes(content)


def info(dtype: Any = "F32", shape: Any = (2,), start: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def weights_bytes(change: Callable[[bytes], bytes]) -> Change:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


case("header: empty file", "FILE_TOO_SHORT", weights_bytes(lambda data: b""))
case("header: seven bytes", "FILE_TOO_SHORT", weights_bytes(lambda data: data[:7]))
case("header: an exabyte", "HEADER_TOO_LARGE", weights_bytes(lambda d: b"\0" * 7 + b"\x10" + d[8:]))
case("header: 2^64 - 1", "HEADER_TOO_LARGE", weights_bytes(lambda data: b"\xff" * 8 + data[8:]))
case("header: longer than the file", "HEADER_TRUNCATED", weights_bytes(lambda data: data[:50]))
case("header: of no bytes", "HEADER_START_INVALID", raw(b""))
case("header: space before", "HEADER_START_INVALID", raw(b' {"x": 1}'))
case("header: not UTF-8", "NOT_UTF8", raw(b'{"\xff": 1}'))
case("header: not JSON", "NOT_JSON", raw(b'{"x": '))
case("header: a tensor twice", "DUPLICATE_KEY", raw(b'{"x": 1, "x": 2}'))
case("header: a million brackets", "TOO_MANY_TENSORS", raw(b"{" * 1_000_000))
case("header: nested deeply", "NESTED_TOO_DEEPLY", raw(b'{"x":' + b"[" * 100_000))
case("header: a million numbers", "TOO_MANY_TENSORS", raw(b'{"x": [' + b"0," * 2_000_000 + b"0]}"))
case("header: 70,000 tensors", "TOO_MANY_TENSORS", raw({str(i): 0 for i in range(70_000)}))
case("header: metadata of numbers", "METADATA_INVALID", raw({"__metadata__": {"a": 1}}))
case("header: info without a shape", "TENSOR_INFO_INVALID", raw({"x": {"dtype": "F32"}}))
case("header: info with more", "TENSOR_INFO_INVALID", raw({"x": {**info(), "y": 1}}, bytes(8)))
case("header: name of nothing", "TENSOR_NAME_INVALID", raw({"": info()}, bytes(8)))
case("header: name with NUL", "TENSOR_NAME_INVALID", raw({"a\0b": info()}, bytes(8)))
case("header: name that turns round", "TENSOR_NAME_INVALID", raw({"a\u202eb": info()}, bytes(8)))
case("header: name of half a character", "TENSOR_NAME_INVALID", raw(b'{"\\ud800": 1}'))
case("header: name of 600", "TENSOR_NAME_INVALID", raw({"x" * 600: info()}, bytes(8)))
case("header: dtype I64", "DTYPE_UNSUPPORTED", raw({"x": info("I64", [1])}, bytes(8)))
case("header: dtype BOOL", "DTYPE_UNSUPPORTED", raw({"x": info("BOOL", [8])}, bytes(8)))
case("header: dtype F8_E8M0", "DTYPE_UNSUPPORTED", raw({"x": info("F8_E8M0", [8])}, bytes(8)))
case("header: dtype f32", "DTYPE_UNSUPPORTED", raw({"x": info("f32")}, bytes(8)))
case("header: dtype as a list", "DTYPE_UNSUPPORTED", raw({"x": info(["F32"])}, bytes(8)))
case("header: negative size", "SHAPE_INVALID", raw({"x": info(shape=[-2])}, bytes(8)))
case("header: size of 2^62", "SHAPE_INVALID", raw({"x": info(shape=[2**62, 4])}, bytes(8)))
case("header: product of 2^64", "LENGTH_MISMATCH", raw({"x": info(shape=[2**32, 2**32])}, bytes(8)))
case("header: size 2.0", "SHAPE_INVALID", raw({"x": info(shape=[2.0])}, bytes(8)))
case("header: size true", "SHAPE_INVALID", raw({"x": info(shape=[True, 2])}, bytes(8)))
case("header: a hundred dimensions", "SHAPE_INVALID", raw({"x": info(shape=[1] * 100)}, bytes(8)))
case("header: no elements", "TENSOR_EMPTY", raw({"x": info(shape=[0], end=0)}))
case("header: negative offset", "OFFSETS_INVALID", raw({"x": info(start=-8, end=0)}, bytes(8)))
case("header: offset 8.0", "OFFSETS_INVALID", raw({"x": info(end=8.0)}, bytes(8)))
case("header: reversed offsets", "OFFSETS_REVERSED", raw({"x": info(start=8, end=0)}, bytes(8)))
case(
    "header: offsets of 2^63",
    "TENSOR_OUT_OF_FILE",
    raw({"x": info(start=2**63, end=2**63 + 8)}, bytes(8)),
)
case("header: fp8 length as fp32", "LENGTH_MISMATCH", raw({"x": info("F8_E4M3")}, bytes(8)))
case(
    "header: tensors overlap",
    "TENSORS_OVERLAP",
    raw({"x": info(), "y": info(start=4, end=12)}, bytes(12)),
)
case("header: tensors share bytes", "TENSORS_OVERLAP", raw({"x": info(), "y": info()}, bytes(8)))
case("header: gap", "DATA_GAP", raw({"x": info(start=1, end=9)}, bytes(9)))
case("header: bytes behind", "TRAILING_BYTES", weights_bytes(lambda data: data + b"GIF89a"))
case("header: truncated data", "TENSOR_OUT_OF_FILE", weights_bytes(lambda data: data[:-1]))


# The tensors


def tensors(**changed: torch.Tensor | None) -> Change:
    """Replaces, adds or (None) removes tensors."""

    def change(folder: Path) -> None:
        kept = {**load_file(folder / WEIGHTS), **changed}
        kept = {name: tensor for name, tensor in kept.items() if tensor is not None}
        (folder / WEIGHTS).write_bytes(save(kept))

    return change


def filled(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.ones(shape)
    tensor[-1, -1] = value
    return tensor.to(dtype)


def fp8_nan() -> torch.Tensor:
    tensor = torch.ones(4, 16).to(torch.float8_e4m3fn)
    tensor.view(torch.uint8)[3, 15] = 0xFF
    return tensor


case("tensor: none at all", "NO_TARGETS", lambda folder: save_file({}, folder / WEIGHTS))
case("tensor: A alone", "PAIR_INCOMPLETE", tensors(**{B: None}))
case("tensor: B alone", "PAIR_INCOMPLETE", tensors(**{A: None}))
case("tensor: unknown", "TENSOR_UNKNOWN", tensors(surprise=torch.ones(1)))
case(
    "tensor: path in its name",
    "TENSOR_UNKNOWN",
    tensors(**{"base_model.model.../../x.lora_A.weight": torch.ones(4, 4)}),
)
case(
    "tensor: base weight",
    "TENSOR_UNKNOWN",
    tensors(**{"base_model.model.model.norm.weight": torch.ones(4)}),
)
case(
    "tensor: a head that is a vector",
    "SHAPE_INVALID",
    tensors(**{"base_model.model.lm_head.weight": torch.ones(4)}),
)
case(
    "tensor: saved module",
    "TENSOR_UNKNOWN",
    tensors(**{"base_model.model.lm_head.modules_to_save.weight": torch.ones(4)}),
)
case(
    "tensor: magnitude", "TENSOR_UNKNOWN", tensors(**{f"{Q0}.lora_magnitude_vector": torch.ones(4)})
)
case("tensor: bias", "TENSOR_UNKNOWN", tensors(**{f"{Q0}.lora_B.bias": torch.ones(16)}))
case(
    "tensor: two for one place",
    "TENSOR_DUPLICATE",
    tensors(**{f"{Q0}.lora_A.default.weight": torch.ones(4, 16)}),
)
case(
    "tensor: linear and embedding",
    "TENSOR_DUPLICATE",
    tensors(**{f"{Q0}.lora_embedding_A": torch.ones(4, 16)}),
)
case(
    "tensor: of two adapters",
    "ADAPTERS_MIXED",
    tensors(**{f"{Q0}.lora_A.evil.weight": torch.ones(4, 16)}),
)
case("tensor: one dimension", "SHAPE_INVALID", tensors(**{A: torch.ones(64)}))
case("tensor: three dimensions", "SHAPE_INVALID", tensors(**{A: torch.ones(1, 4, 16)}))
case("tensor: rank of A", "RANK_MISMATCH", tensors(**{A: torch.ones(5, 16)}))
case("tensor: rank of B", "RANK_MISMATCH", tensors(**{B: torch.ones(16, 5)}))
case("tensor: rank of the config", "RANK_MISMATCH", config(r=8))
case("tensor: module not adapted", "TARGET_NOT_SELECTED", config(target_modules=["v_proj"]))
case("tensor: module excluded", "TARGET_NOT_SELECTED", config(exclude_modules=["q_proj"]))
case("tensor: layer not adapted", "TARGET_NOT_SELECTED", config(layers_to_transform=[0]))
case("tensor: NaN in fp32", "NOT_FINITE", tensors(**{A: filled((4, 16), torch.nan, torch.float32)}))
case(
    "tensor: infinity in fp16",
    "NOT_FINITE",
    tensors(**{A: filled((4, 16), torch.inf, torch.float16)}),
)
case(
    "tensor: infinity in bf16",
    "NOT_FINITE",
    tensors(**{B: filled((16, 4), -torch.inf, torch.bfloat16)}),
)
case(
    "tensor: infinity in fp8",
    "NOT_FINITE",
    tensors(**{A: filled((4, 16), torch.inf, torch.float8_e5m2)}),
)
case("tensor: NaN in fp8", "NOT_FINITE", tensors(**{A: fp8_nan()}))


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def more(name: str, shape: tuple[int, ...], value: float, **fields: Any) -> Change:
    """Adds a tensor to each layer's q_proj, or one to the model, all of it this value, and sets
    these fields of the config."""
    names = [name.format(0), name.format(1)]
    added = {f"base_model.model.{each}": torch.full(shape, value) for each in names}
    return both(config(**fields), tensors(**added))


IN_Q = "model.layers.{}.self_attn.q_proj."
ROWS = "model.embed_tokens.token_adapter.trainable_tokens_delta"
MANY = list(range(300))
for value in (torch.nan, torch.inf, -torch.inf):
    for name, change in {
        "magnitudes": more(f"{IN_Q}lora_magnitude_vector", (16,), value, use_dora=True),
        "biases of B": more(f"{IN_Q}lora_B.bias", (16,), value, lora_bias=True),
        "biases of the base": more(f"{IN_Q}bias", (16,), value, bias="lora_only"),
        "norms": more("model.norm.weight", (16,), value, modules_to_save=["norm"]),
        "heads": more("lm_head.weight", (32, 16), value, modules_to_save=["lm_head"]),
        "rows": more(ROWS, (2, 16), value, trainable_token_indices=[3, 5]),
    }.items():
        case(f"tensor: {name} of {value}", "NOT_FINITE", change)
case(
    "tensor: a magnitude for every input",
    "SHAPE_INVALID",
    more(f"{IN_Q}lora_magnitude_vector", (16, 16), 1.0, use_dora=True),
)
case(
    "tensor: more rows than ids",
    "SHAPE_INVALID",
    more(ROWS, (300, 16), 1.0, trainable_token_indices=[3, 5]),
)
case(
    "tensor: fewer rows than ids",
    "SHAPE_INVALID",
    more(ROWS, (2, 16), 1.0, trainable_token_indices=MANY),
)
case(
    "tensor: rows that are a vector",
    "SHAPE_INVALID",
    more(ROWS, (16,), 1.0, trainable_token_indices=[3]),
)


# The files


def sharded(index: Callable[[dict[str, str]], Any]) -> Change:
    """One shard, and an index made of the right one."""

    def change(folder: Path) -> None:
        names = dict.fromkeys(load_file(folder / WEIGHTS), SHARD)
        (folder / WEIGHTS).rename(folder / SHARD)
        content = index(names)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / INDEX).write_text(text)

    return change


def pointing_to(place: str) -> Change:
    return sharded(lambda names: {"weight_map": {**names, A: place}})


def replaced_by_link(target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).symlink_to(target)

    return change


def replaced_by(make: Callable[[Path], None]) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        make(folder / WEIGHTS)

    return change


case("index: leads out", "INDEX_INVALID", pointing_to(f"../{SHARD}"))
case("index: absolute path", "INDEX_INVALID", pointing_to("/etc/passwd"))
case("index: device", "INDEX_INVALID", pointing_to("/dev/zero"))
case("index: name with NUL", "INDEX_INVALID", pointing_to(f"{SHARD}\0"))
case("index: the config", "INDEX_INVALID", pointing_to(CONFIG))
case("index: a number", "INDEX_INVALID", sharded(lambda names: {"weight_map": {A: 7}}))
case("index: a list", "NOT_AN_OBJECT", sharded(lambda names: []))
case("index: no map", "INDEX_INVALID", sharded(lambda names: {"metadata": {}}))
case("index: empty map", "INDEX_INVALID", sharded(lambda names: {"weight_map": {}}))
case("index: nested deeply", "NESTED_TOO_DEEPLY", sharded(lambda names: '{"a":' + "[" * 100_000))
case(
    "index: a million commas",
    "INDEX_INVALID",
    sharded(lambda names: '{"a":[' + "0," * 1_000_000 + "0]}"),
)
case("index: a tensor too few", "INDEX_MISMATCH", sharded(lambda names: {"weight_map": {A: SHARD}}))
case(
    "index: a tensor too many",
    "INDEX_MISMATCH",
    sharded(lambda names: {"weight_map": {**names, "x": SHARD}}),
)
case(
    "index: a shard that is not there",
    "FILE_MISSING",
    sharded(lambda names: {"weight_map": {**names, "x": SHARD.replace("1-of", "2-of")}}),
)
case(
    "files: shard in no index",
    "FILE_UNUSED",
    lambda folder: os.link(folder / WEIGHTS, folder / SHARD),
)
case(
    "files: single and sharded", "FILES_AMBIGUOUS", lambda folder: (folder / INDEX).write_text("{}")
)
case(
    "files: rows of added tokens",
    "FILE_UNUSED",
    lambda folder: (folder / "new_embeddings.safetensors").write_bytes(b"x"),
)
case(
    "files: MLX-LM's beside PEFT's config",
    "CONFIG_INVALID",
    lambda folder: (folder / WEIGHTS).rename(folder / "adapters.safetensors"),
)
case(
    "files: MLX-LM's and PEFT's",
    "FILES_AMBIGUOUS",
    lambda folder: os.link(folder / WEIGHTS, folder / "adapters.safetensors"),
)
case(
    "files: pickle", "FILE_NOT_SAFETENSORS", lambda folder: (folder / WEIGHTS).rename(folder / BIN)
)
case("files: link out of the roots", "SOURCE_NOT_ALLOWED", replaced_by_link("/etc/hostname"))
case("files: link to a device", "SOURCE_NOT_ALLOWED", replaced_by_link("/dev/zero"))
case("files: link to itself", "SOURCE_NOT_ALLOWED", replaced_by_link(WEIGHTS))
case("files: pipe", "INVALID_ARGUMENT", replaced_by(os.mkfifo))
case("files: folder", "INVALID_ARGUMENT", replaced_by(os.mkdir))
case(
    "files: sparse terabyte",
    "LIMIT_EXCEEDED",
    lambda folder: os.truncate(folder / WEIGHTS, 1 << 40),
)

UPLOAD_NAMES = {
    "nothing": "",
    "a parent": f"../{CONFIG}",
    "two dots": "..",
    "absolute": "/etc/passwd",
    "a folder": f"sub/{CONFIG}",
    "a backslash": f"..\\{CONFIG}",
    "NUL": f"{CONFIG}\0.txt",
    "a line end": f"{WEIGHTS}\n",
    "hidden": ".bashrc",
    "a device": "/dev/zero",
    "other letters": "аdapter_config.json",  # noqa: RUF001 (a Cyrillic letter, on purpose)
    "too long": "x" * 200,
}
"""Names of uploaded files, each refused."""
