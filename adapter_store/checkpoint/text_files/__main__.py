"""Reads a tokenizer's files: the program of a limited child process.

Run as `python -I .../__main__.py ROOT FOLDER OUTPUT MEMORY_BYTES CPU_SECONDS NAME...`; ROOT is
where our packages lie. OUTPUT gets `tokenizer`, the extract, and `chat_template`, both empty if
there is none, and `result.json`: {} or {"reason": ..., "subject": ..., "message": ...}.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any


def set_limits(memory_bytes: int, cpu_seconds: int) -> None:
    for kind, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, 8 << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
    ):
        resource.setrlimit(kind, (limit, limit))


def read_files(folder: Path, names: Collection[str]) -> tuple[bytes, bytes]:
    """Returns the extract, and the chat template of the configuration. Raises InvalidTokenizer, and
    InvalidAdapter for a file that is no JSON object."""
    from adapter_store.checkpoint.reading.json import parse_object
    from contract.tokenizer_extract import MAX_EXTRACT_BYTES, InvalidTokenizer, make_extract

    def read(name: str) -> Any:
        return parse_object((folder / name).read_bytes(), name) if name in names else None

    config = read("tokenizer_config.json") or {}
    template = template_of(config)
    tokenizer = read("tokenizer.json")
    if tokenizer is None:
        return b"", template
    extract = make_extract(tokenizer, config, read("special_tokens_map.json")).to_bytes()
    if len(extract) > MAX_EXTRACT_BYTES:
        raise InvalidTokenizer(
            f"tokenizer.json: its added tokens take {len(extract)} bytes, more than "
            f"{MAX_EXTRACT_BYTES}",
            "tokenizer.json",
            "TOO_MANY_TOKENS",
        )
    return extract, template


def template_of(config: dict[str, Any]) -> bytes:
    """Returns the chat template of a configuration, of several the template that is called
    "default"; the parent checks it. Raises InvalidTokenizer TEMPLATE_INVALID if it is no text."""
    from contract.tokenizer_extract import InvalidTokenizer, default_template

    found = default_template(config)
    if found is None:
        return b""
    if not isinstance(found, str):
        name = "tokenizer_config.json"
        raise InvalidTokenizer(f"{name}: chat_template is no text", name, "TEMPLATE_INVALID")
    return found.encode("utf-8", "surrogatepass")


def main() -> None:
    root, folder, output = (Path(path) for path in sys.argv[1:4])
    sys.path.insert(0, str(root))
    from adapter_store.errors import InvalidAdapter
    from contract.tokenizer_extract import InvalidTokenizer

    set_limits(int(sys.argv[4]), int(sys.argv[5]))
    answer = {}
    try:
        extract, template = read_files(folder, sys.argv[6:])
        (output / "tokenizer").write_bytes(extract)
        (output / "chat_template").write_bytes(template)
    except (InvalidTokenizer, InvalidAdapter) as error:
        answer = {"reason": error.reason, "subject": error.subject, "message": str(error)}
    (output / "result.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
