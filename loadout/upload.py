"""An adapter folder as the messages of UploadAdapter: one meta, then the files in chunks.

A folder that is no adapter is refused with the adapters that lie below it, as in a trainer's run
folder, which are looked for in few entries and never through links.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from loadout._rpc.calls import build, signature_message, ttl_seconds
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.errors import InvalidArgument
from loadout.types import Signature

CHUNK_BYTES = 512 * 1024

CONFIG = "adapter_config.json"
MODEL_CONFIG = "config.json"
WEIGHT_PATTERNS = ("adapter_model*.safetensors*", "adapters.safetensors", "adapter_model*.bin*")
"""What PEFT writes, single or sharded with an index, and MLX-LM; the first pattern that matches
wins."""

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""The files of a tokenizer and a chat template, of which the store reads what it needs."""

# What the store says of all other files: what may hold weights is known to change nothing, or
# refused, since left out of the upload it would be dropped in silence. A test compares these with
# the store's (adapter_store/checkpoint/formats/side_files.py), which has the reasons.
WEIGHT_SUFFIXES = (
    *("safetensors", "bin", "pt", "pth", "ckpt", "pkl", "pickle", "npz", "npy"),
    *("gguf", "ggml", "h5", "msgpack", "onnx", "safetensors.index.json", "bin.index.json"),
)
HARMLESS = (
    r"training_args\.bin",
    r"optimizer(_\d+)?\.(pt|bin)",
    r"scheduler(_\d+)?\.(pt|bin)",
    r"(grad_)?scaler\.(pt|bin)",
    r"(sampler|dl_state_dict)(_\d+)?\.bin",
    r"rng_state(_\d+)?\.pth",
    r"(random_states|custom_checkpoint)_\d+\.pkl",
    r"pytorch_model_fsdp(_\d+)?\.bin",
    r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)_states\.pt",
    r"mp_rank_\d+_model_states\.pt",
    r"(recipe|training|trainer)_state\.pt",
    r"tokenizer\.(pkl|bin)",
    r"adapter_model.*\.(bin|pt|pth|pkl|ckpt)",
    r"adapter_model.*\.bin\.index\.json",
)
REFUSED = (
    r"new_embeddings\.safetensors",
    r"(value_head|v_head)\..*",
    r"non_lora_trainables\.bin",
    r"modelopt_state.*",
    r"(hf_)?(quant|quantize|quantization)_config\.json",
    r"(\d+_)?adapters\.npz",
)
MLX_HARMLESS = (r"\d+_adapters\.safetensors",)
TORCHTUNE_HARMLESS = (
    r"(model|pytorch_model|ft-model|hf_model_\d+_\d+)([-_]\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?",
)
MLX_WEIGHTS, TORCHTUNE_FILE = "adapters.safetensors", "adapter_model.pt"

MAX_SCANNED = 10_000
"""How many entries of folders are read to find adapters below one that is none."""
SCANNED_LEVELS = 2
MAX_LISTED = 8
_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,18})")
_NUMBER = re.compile(r"([0-9]+)")

Progress = Callable[[int, int], None]
"""Called with (sent bytes, total bytes) after each chunk."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The files that make up the adapter in a folder, with those of its tokenizer and its chat
    template, and their sizes in bytes."""

    path: Path
    sizes: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.sizes)


def is_uri(source: str | os.PathLike[str]) -> bool:
    return isinstance(source, str) and "://" in source


def open_folder(source: str | os.PathLike[str], name: str = "NAME") -> AdapterFolder:
    """Raises InvalidArgument, naming the path, unless it is a folder as PEFT or MLX-LM saves one,
    with nothing else in it that would have to be applied. Where adapters lie below it, the message
    has the command to register one of them as `name`."""
    path = Path(source)
    if not path.is_dir():
        raise _invalid(path, "is not a directory (a URI has a scheme, such as s3://bucket/prefix)")
    if not (path / CONFIG).is_file():
        raise _invalid(path / CONFIG, f"does not exist{_suggest(path, name)}")
    weights = next(filter(None, (sorted(path.glob(pattern)) for pattern in WEIGHT_PATTERNS)), [])
    if not weights:
        raise _invalid(path, "has no adapter_model.safetensors, and no adapters.safetensors")
    files = [path / CONFIG, *weights]
    _check_others(path, {file.name for file in files})
    files += [path / name for name in TEXT_FILES if (path / name).is_file()]
    return AdapterFolder(path, tuple((file.name, file.stat().st_size) for file in files))


def _check_others(path: Path, chosen: Collection[str]) -> None:
    """Raises InvalidArgument for a file that is not sent and would have to be applied."""
    others = {entry.name for entry in path.iterdir()}.difference(chosen)
    harmless = list(HARMLESS)
    if MLX_WEIGHTS in chosen:
        harmless += MLX_HARMLESS
    elif TORCHTUNE_FILE in others:
        harmless += TORCHTUNE_HARMLESS
    suffixes = "|".join(map(re.escape, WEIGHT_SUFFIXES))
    refused = re.compile("|".join([*REFUSED, rf"(?is:.*\.({suffixes}))"]))
    passes = re.compile("|".join(harmless))
    for name in sorted(others):
        if refused.fullmatch(name) and not passes.fullmatch(name):
            raise _invalid(
                path / name,
                "would not be applied: it is no part of the adapter that is sent. If the adapter "
                "is whole without it, register a folder that does not have it",
            )


def find_adapters(folder: Path) -> list[Path]:
    """Returns folders below that have an adapter's config, the newest checkpoint first. Reads at
    most MAX_SCANNED entries, and follows no links to folders."""
    found: list[Path] = []
    level, num_left = [folder], MAX_SCANNED
    for _ in range(SCANNED_LEVELS):
        others: list[Path] = []
        for each in level:
            entries = _scan(each, num_left)
            num_left -= len(entries)
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and entry.name.isprintable():
                    path = Path(entry.path)
                    (found if os.path.isfile(path / CONFIG) else others).append(path)
        level = others
    return sorted(found, key=lambda each: _newest_first(each.relative_to(folder)))


def _find_checkpoint(path: Path) -> tuple[Path, int] | None:
    """Returns the run that a path below the folder belongs to, and the step of its deepest
    checkpoint."""
    for number in reversed(range(len(path.parts))):
        if match := _CHECKPOINT.fullmatch(path.parts[number]):
            return Path(*path.parts[:number]), int(match[1])
    return None


def _newest_first(path: Path) -> tuple[int, list[str | int]]:
    """Returns a key: the highest step first, then by name, in which higher numbers are first."""
    checkpoint = _find_checkpoint(path)
    pieces = enumerate(_NUMBER.split(str(path)))
    name = [-int(piece) if index % 2 else piece for index, piece in pieces]
    return (1 if checkpoint is None else -checkpoint[1]), name


def _scan(folder: Path, max_entries: int) -> list[os.DirEntry[str]]:
    """Returns entries of a folder; none of one that cannot be read: they are for a message."""
    if max_entries == 0:
        return []
    try:
        with os.scandir(folder) as entries:
            return list(islice(entries, max_entries))
    except OSError:
        return []


def _suggest(folder: Path, name: str) -> str:
    """Returns what to do with a folder that has no adapter's config."""
    found = find_adapters(folder)
    if not found:
        if os.path.isfile(folder / MODEL_CONFIG):
            return ": this is a whole model; register the adapter that PEFT saves"
        return ": is this a PEFT adapter?"
    paths = [each.relative_to(folder) for each in found]
    listed = ", ".join(map(str, paths[:MAX_LISTED]))
    if len(found) > MAX_LISTED:
        listed += f" and {len(found) - MAX_LISTED} others"
    runs = {checkpoint[0] for checkpoint in map(_find_checkpoint, paths) if checkpoint}
    which = "the latest" if len(runs) == 1 else "one"
    command = shlex.join(["loadout", "register", name, str(found[0])])
    return f", but below it are {listed}; to register {which}: {command}"


def _invalid(path: Path, why: str) -> InvalidArgument:
    return InvalidArgument(f"{path} {why}", code="INVALID_ARGUMENT", subject=str(path))


class Sent(Protocol):
    """What an upload sends. gRPC reports a request stream that raised as a lost one; `failure` has
    the cause."""

    repeatable: bool
    failure: Exception | None

    def messages(self) -> Iterator[store_pb.UploadAdapterRequest]:
        """Returns the messages from the beginning."""


class Upload:
    """One upload, which may be sent again: every `messages()` starts from the beginning.

    gRPC reports a request stream that raised as a lost stream; `failure` has the cause.
    """

    def __init__(
        self,
        folder: AdapterFolder,
        progress: Progress | None,
        *,
        name: str,
        base_model: str,
        expected_digest: str,
        if_current_digest: str,
        pinned: bool,
        labels: Mapping[str, str],
        description: str = "",
        signature: Signature | None = None,
        keep: int = 0,
        ttl_s: float | None = None,
        ephemeral: bool = False,
    ) -> None:
        meta = build(
            store_pb.UploadMeta,
            name=name,
            base_model=base_model,
            expected_digest=expected_digest,
            if_current_digest=if_current_digest,
            pinned=pinned,
            labels=dict(labels),
            description=description,
            signature=signature_message(signature),
            keep=keep,
            ttl_seconds=ttl_seconds(ttl_s),
            ephemeral=ephemeral,
        )
        self._folder = folder
        self._progress = progress
        self._meta = store_pb.UploadAdapterRequest(meta=meta)
        self.repeatable = not if_current_digest
        self.failure: Exception | None = None

    def messages(self) -> Iterator[store_pb.UploadAdapterRequest]:
        yield self._meta
        sent = 0
        try:
            for file_name, _ in self._folder.sizes:
                for request in file_chunks(self._folder.path / file_name):
                    yield request
                    sent += len(request.chunk.data)
                    if self._progress is not None:
                        self._progress(sent, self._folder.total_bytes)
        except OSError as error:
            self.failure = error
            raise


def chunk_message(file_name: str, offset: int, data: bytes) -> store_pb.UploadAdapterRequest:
    """Returns the message of a piece of a file, filled in place: a chunk that was made apart is
    copied, in 2 ms for each MiB."""
    request = store_pb.UploadAdapterRequest()
    chunk = request.chunk
    chunk.file_name, chunk.offset, chunk.data = file_name, offset, data
    return request


def file_chunks(path: Path) -> Iterator[store_pb.UploadAdapterRequest]:
    """Yields the file in order; an empty file is one empty chunk, so that it is sent at all."""
    offset = 0
    with path.open("rb") as file:
        while (data := file.read(CHUNK_BYTES)) or offset == 0:
            yield chunk_message(path.name, offset, data)
            if not data:
                return
            offset += len(data)
