"""The files that make up an adapter, and the most bytes of each.

The client sends only these files, and the store fetches and reads only them. Both check the limits
before they read a byte.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection

from contract.folders import TooLarge

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"
_SHARD = re.compile(r"adapter_model-\d{5}-of-\d{5}\.safetensors")
MLX_WEIGHTS_FILE = "adapters.safetensors"
PICKLE_FILE = "adapter_model.bin"
PICKLE_FILES = (PICKLE_FILE, "adapter_model.pt", "adapter_model.pth")
WEIGHT_PATTERNS = ("adapter_model*.safetensors*", MLX_WEIGHTS_FILE, "adapter_model*.bin*")
"""Files of weights from PEFT, single or sharded with an index, and from MLX-LM. The first pattern
that matches wins."""
MODEL_CONFIG = "config.json"
"""The configuration of a whole model."""
_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,18})")
TOKENIZER_FILE, TEMPLATE_FILE = "tokenizer.json", "chat_template.jinja"
TEXT_FILES = {
    TOKENIZER_FILE: 64 << 20,
    "tokenizer_config.json": 8 << 20,
    "special_tokens_map.json": 4 << 20,
    TEMPLATE_FILE: 1 << 20,
    MODEL_CONFIG: 1 << 20,
}
"""Files of a tokenizer, a chat template and the names of a classifier's labels, and the most bytes
of each. A tokenizer with 260,000 tokens has 34 MB; a configuration that lists 6,000 added tokens
has 1.2 MB."""
MAX_CLASS_LABELS, MAX_CLASS_LABEL_BYTES = 1024, 16 << 10
"""Most names of labels of an adapter's own classifier, and most bytes of them together."""

MAX_FILES = 256
"""Most files of an adapter."""
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
"""Most bytes of the header of a .safetensors file, and of an index."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def is_plain_name(name: str) -> bool:
    """Returns whether a file name is safe: it cannot lead out of a folder or garble a message."""
    return _PLAIN_NAME.fullmatch(name) is not None


def is_adapter_file(name: str) -> bool:
    """Returns whether a plain file name belongs to an adapter. The store ignores other files."""
    return name in (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, MLX_WEIGHTS_FILE) or is_shard(name)


def choose_weights(names: Collection[str]) -> list[str]:
    """Returns the files that may be an adapter's weights, for the store to judge; none: there are
    none."""
    found = (sorted(fnmatch.filter(names, pattern)) for pattern in WEIGHT_PATTERNS)
    return next(filter(None, found), [])


def checkpoint_step(folder: str) -> int | None:
    """Returns the step of a trainer's checkpoint, by its folder's name; None for another folder."""
    match = _CHECKPOINT.fullmatch(folder)
    return None if match is None else int(match[1])


def is_shard(name: str) -> bool:
    """Returns whether a plain file name is a shard's name in PEFT."""
    return _SHARD.fullmatch(name) is not None


def is_text_file(name: str) -> bool:
    """Returns whether a plain file name belongs to a tokenizer or a chat template, or is the
    model's configuration, which names labels. Such files are not part of the blob."""
    return name in TEXT_FILES


def size_advice(name: str) -> str:
    """Returns advice about a text file that is too large."""
    if name == MODEL_CONFIG:
        return (
            "leave it out, and the adapter's own labels are LABEL_0, LABEL_1 and so on, or save "
            "one that has no more than the id2label of the adapter's own head"
        )
    return "without this file the adapter uses its model's tokenizer and chat template"


def check_size(name: str, size_bytes: int) -> None:
    """Checks the size of a file that is read as a whole.

    Args:
        name: Plain name of the file.
        size_bytes: Its size, or the bytes that have arrived of it.

    Raises:
        TooLarge: The file is over its limit.
    """
    most = "has more than {} bytes, the limit"
    if name in TEXT_FILES and size_bytes > TEXT_FILES[name]:
        raise TooLarge(name, f"{most.format(TEXT_FILES[name])}: {size_advice(name)}")
    limit = {CONFIG_FILE: MAX_CONFIG_BYTES, INDEX_FILE: MAX_HEADER_BYTES}.get(name)
    if limit is not None and size_bytes > limit:
        raise TooLarge(name, f"{most.format(limit)}: is this the right file?")
