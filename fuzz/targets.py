"""The fuzzed functions. Each takes any bytes; an exception from it is a fault.

A refusal is no fault if it has a kind that the reader documents, names a culprit and is valid
UTF-8. Accepted inputs must have the properties that the reader promises.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from adapter_store.catalog.tables.filters import (
    decode_page_token,
    decode_version_token,
    parse_filter,
)
from adapter_store.checkpoint.formats.mlx import parse_mlx_config, parse_mlx_key
from adapter_store.checkpoint.formats.select import check_file_names
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.peft.config import parse_config
from adapter_store.checkpoint.peft.tensor_keys import parse_key
from adapter_store.checkpoint.reading.files import parse_index
from adapter_store.checkpoint.reading.json import parse_object
from adapter_store.checkpoint.reading.safetensors import LENGTH_BYTES, read_header
from adapter_store.errors import InvalidAdapter, LimitExceeded
from adapter_store.registration.tenant_policy import parse_policy
from adapter_store.sources import Sources, hub, local, s3
from contract.adapter_files import CONFIG_FILE, MLX_WEIGHTS_FILE, WEIGHTS_FILE
from fuzz.folders import LIMITS, fuzz_folder, fuzz_upload
from fuzz.format_2 import SEPARATOR, fuzz_contents, fuzz_layout, fuzz_pull
from fuzz.gguf import fuzz_gguf
from fuzz.http import fuzz_http
from fuzz.images import fuzz_image, fuzz_picture
from fuzz.packed import fuzz_packed
from fuzz.refusals import refused
from fuzz.requests import fuzz_inference_request, fuzz_store_request
from fuzz.texts import fuzz_extract, fuzz_tokenizer
from servicekit.errors import FailedPrecondition, InvalidArgument
from servicekit.refs import AdapterName, parse_name, parse_ref, parse_sha256

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.11.mlp.experts.1.up_proj", "lm_head")


def fuzz_header(data: bytes) -> None:
    """Reads the header of a .safetensors file; `data` is the whole file."""

    def read_at(offset: int, length: int) -> bytes:
        assert offset >= 0
        assert offset + length <= len(data), "the reader leaves the file"
        assert length <= max(LIMITS.max_header_bytes, LENGTH_BYTES), "the reader exceeds its limit"
        return data[offset : offset + length]

    with refused(InvalidAdapter):
        entries = read_header(
            read_at,
            len(data),
            WEIGHTS_FILE,
            max_header_bytes=LIMITS.max_header_bytes,
            max_tensors=LIMITS.max_tensors,
        )
        position = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        for entry in entries:
            assert entry.offset == position
            position += entry.length_bytes
        assert position == len(data)


def fuzz_header_text(data: bytes) -> None:
    """Reads a header with the right length in front, which a fuzzer seldom guesses."""
    text, _, tensors = data.partition(SEPARATOR)
    fuzz_header(len(text).to_bytes(LENGTH_BYTES, "little") + text + tensors)


def fuzz_config(data: bytes) -> None:
    """Reads adapter_config.json and matches its patterns with the names of modules."""
    with refused(InvalidAdapter):
        config = parse_config(parse_object(data, CONFIG_FILE), LIMITS)
        for module in MODULES:
            assert 1 <= config.settings_for(module).rank <= LIMITS.max_rank
            config.selects(module, is_embedding=False)
            config.extras.entries_of(module)
            config.extras.parameters_of(module)
        config.modules.unweighted(MODULES)
        json.dumps(config.modules.fields).encode()


def fuzz_mlx_config(data: bytes) -> None:
    """Reads MLX-LM's adapter_config.json."""
    with refused(InvalidAdapter):
        config = parse_mlx_config(parse_object(data, CONFIG_FILE), LIMITS)
        for module in MODULES:
            rank, alpha, scale = config.settings_for(module)
            assert 1 <= rank <= LIMITS.max_rank
            assert alpha is None
            assert math.isfinite(scale)
            config.selects(module, is_embedding=False)
        assert config.last_layers >= 0
        json.dumps(config.modules.fields).encode()


def fuzz_index(data: bytes) -> None:
    """Reads the index of a sharded adapter; the names of shards stay within its folder."""
    with refused(InvalidAdapter):
        for file in parse_index(data, LIMITS).values():
            assert Path(file).name == file


def fuzz_checkpoint(data: bytes) -> None:
    """Reads a whole adapter: the config, a separator and the weights."""
    _fuzz_checkpoint(data, WEIGHTS_FILE)


def fuzz_mlx_checkpoint(data: bytes) -> None:
    """Reads a whole adapter of MLX-LM: the config, a separator and the weights."""
    _fuzz_checkpoint(data, MLX_WEIGHTS_FILE)


def _fuzz_checkpoint(data: bytes, weights_file: str) -> None:
    config, _, weights = data.partition(SEPARATOR)
    folder = Path(tempfile.mkdtemp(prefix="loadout-fuzz-"))
    try:
        (folder / CONFIG_FILE).write_bytes(config)
        (folder / weights_file).write_bytes(weights)
        with refused(InvalidAdapter, LimitExceeded):
            checkpoint = open_checkpoint(folder, LIMITS)
            assert checkpoint.digest == open_checkpoint(folder, LIMITS).digest
            assert checkpoint.rank <= LIMITS.max_rank
    finally:
        shutil.rmtree(folder)


def fuzz_names(data: bytes) -> None:
    """Reads references, URIs, names of tensors and files, filters and page tokens."""
    # Strings of callers come from protobuf, which refuses half characters.
    text = data.decode("utf-8", "replace")
    readers: list[Callable[[str], object]] = [
        parse_name,
        parse_ref,
        lambda value: parse_sha256(value, "digest"),
        parse_filter,
        lambda value: decode_page_token(value, ""),
        lambda value: decode_version_token(value, AdapterName("team", "name")),
        _read_uri,
    ]
    for read in readers:
        with refused(InvalidArgument):
            for part in _texts(read(text)):
                assert "\0" not in part, "no database takes NUL"
                part.encode()
    for parse in (parse_key, parse_mlx_key):
        with refused(InvalidAdapter):
            key = parse(text or "x")
            assert ".." not in key.target
            assert "/" not in key.target
    with refused(InvalidAdapter):
        check_file_names([CONFIG_FILE, *text.split("\n")])


def _texts(value: object) -> Iterator[str]:
    """Yields every text in a reader's result."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, dict):
        for item in value.items():
            yield from (part for side in item for part in _texts(side))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _texts(getattr(value, field.name))


def _read_uri(text: str) -> object:
    """Reads a URI as a registration does: with the common checks, then with its scheme's checks."""
    schemes = {"file": local.path_of, "s3": s3.place_of, "hf": hub.place_of}
    Sources(dict.fromkeys(schemes, local.LocalSource([]))).find(text)
    return schemes[text.partition("://")[0]](text)


def fuzz_policy(data: bytes) -> None:
    """Reads the policy file. Operators write it, and still a refusal must name the fault."""
    with refused(FailedPrecondition):
        parse_policy(data.decode("utf-8", "replace"))


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "header": fuzz_header,
    "header_text": fuzz_header_text,
    "config": fuzz_config,
    "mlx_config": fuzz_mlx_config,
    "index": fuzz_index,
    "checkpoint": fuzz_checkpoint,
    "mlx_checkpoint": fuzz_mlx_checkpoint,
    "names": fuzz_names,
    "policy": fuzz_policy,
    "store_request": fuzz_store_request,
    "inference_request": fuzz_inference_request,
    "pull": fuzz_pull,
    "contents": fuzz_contents,
    "layout": fuzz_layout,
    "image": fuzz_image,
    "folder": fuzz_folder,
    "upload": fuzz_upload,
    "tokenizer": fuzz_tokenizer,
    "extract": fuzz_extract,
    "http": fuzz_http,
    "gguf": fuzz_gguf,
    "packed": fuzz_packed,
    "picture": fuzz_picture,
}

# Percent of a campaign's executions, by the amount of code that a target reaches and by the cost
# of an execution.
SHARES: Mapping[str, int] = {
    "header": 4,
    "header_text": 4,
    "config": 4,
    "mlx_config": 4,
    "index": 4,
    "checkpoint": 1,
    "mlx_checkpoint": 1,
    "names": 6,
    "policy": 1,
    "store_request": 6,
    "inference_request": 7,
    "pull": 6,
    "contents": 6,
    "layout": 4,
    "image": 6,
    "folder": 2,
    "upload": 4,
    "tokenizer": 6,
    "extract": 4,
    "http": 5,
    "gguf": 6,
    "packed": 5,
    "picture": 4,
}
