"""Writes the blocking client from the asyncio one: `python -m tools.unasync`.

It replaces names and keywords token by token, and text in docstrings and strings word by word. The
differences between threads and tasks are in `loadout._rpc.threads` and `loadout._rpc.tasks`.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent

FILES = {
    "loadout/aio.py": "loadout/client.py",
    "loadout/_client/async_store.py": "loadout/_client/store.py",
    "loadout/_client/async_inference.py": "loadout/_client/inference.py",
    "loadout/_client/async_images.py": "loadout/_client/images.py",
    "loadout/_client/async_embedding.py": "loadout/_client/embedding.py",
    "loadout/_rpc/async_caller.py": "loadout/_rpc/caller.py",
    "loadout/_rpc/async_stream.py": "loadout/_rpc/stream.py",
    "loadout/_push/async_push.py": "loadout/_push/push.py",
}

NAMES = {
    "AsyncClient": "Client",
    "AsyncEmbeddingCalls": "EmbeddingCalls",
    "AsyncImageCalls": "ImageCalls",
    "AsyncInferenceCalls": "InferenceCalls",
    "AsyncStoreCalls": "StoreCalls",
    "AsyncCaller": "Caller",
    "async_caller": "caller",
    "AsyncStream": "Stream",
    "AsyncIterator": "Iterator",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "async_embedding": "embedding",
    "async_images": "images",
    "async_inference": "inference",
    "async_push": "push",
    "async_store": "store",
    "async_stream": "stream",
    "tasks": "threads",
}

SENTENCES = {
    "The Python client for asyncio:": "The Python client:",
    "Client of one or both services for one event loop.": (
        "Blocking client of one or both services; safe to share between threads."
    ),
    "An async iterator;": "An iterator;",
    "How the client for asyncio makes calls:": "How the client makes calls:",
    "Everything is for one event loop.": "Safe to share between threads.",
}
"""Sentences that are different for the blocking client."""

_TEXT = re.compile(rf"\b({'|'.join(NAMES)})\b|\b(?:async|await) ")


def blocking(source: str) -> str:
    """Returns the blocking form of a module."""
    lines = source.splitlines(keepends=True)
    edits = [
        (token.start, token.end, replaced)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if (replaced := _replaced(token)) != token.string
    ]
    for (row, column), (end_row, end_column), text in reversed(edits):
        after = lines[end_row - 1][end_column:]
        after = after if text else after.removeprefix(" ")
        lines[row - 1 : end_row] = [lines[row - 1][:column] + text + after]
    return "".join(lines)


def _replaced(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.STRING:
        text = token.string
        for sentence, other in SENTENCES.items():
            text = text.replace(sentence, other)
        return _TEXT.sub(lambda match: NAMES.get(match[1], ""), text)
    if token.type == tokenize.NAME:
        return "" if token.string in {"async", "await"} else NAMES.get(token.string, token.string)
    return token.string


def render(path: str) -> str:
    """Returns the formatted content of the file that is generated from `path`."""
    text = blocking((ROOT / path).read_text())
    notice = f"# Generated from {path} by `make client`: change that file.\n"
    for arguments in (("check", "--quiet", "--fix", "--select", "I"), ("format", "--quiet")):
        command = [sys.executable, "-m", "ruff", *arguments, f"--stdin-filename={FILES[path]}", "-"]
        done = subprocess.run(
            command, cwd=ROOT, input=text, capture_output=True, text=True, check=True
        )
        text = done.stdout
    return notice + text


def main() -> None:
    for path, target in FILES.items():
        (ROOT / target).write_text(render(path))


if __name__ == "__main__":
    main()
