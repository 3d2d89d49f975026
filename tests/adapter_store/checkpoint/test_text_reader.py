"""What a store remembers of folders' text files is bounded."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from adapter_store.checkpoint import text_files
from adapter_store.checkpoint.text_files import CHILDREN, ENTRY_BYTES, AdapterText, TextReader
from adapter_store.core import SourceFile


def test_folders_that_say_nothing_count_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[Path] = []

    def read_text(folder: Path, *args: object) -> AdapterText:
        read.append(folder)
        return AdapterText()

    monkeypatch.setattr(text_files, "MAX_CACHED_BYTES", 8 * ENTRY_BYTES)
    monkeypatch.setattr(text_files, "read_text", read_text)
    reader = TextReader()

    def ask(number: int) -> None:
        file = SourceFile("tokenizer_config.json", 2, f"{number:064x}")
        assert reader.read(tmp_path / str(number), [file], "t") == AdapterText()

    for number in range(20):
        ask(number)
    for number in (19, 12):
        ask(number)
    assert len(read) == 20, "the last eight are remembered"
    ask(11)
    assert len(read) == 21


def test_who_is_cancelled_waits_no_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While others' tokenizers are read."""
    reading, done = threading.Barrier(CHILDREN + 1), threading.Event()

    def read_text(*args: object) -> AdapterText:
        reading.wait(30)
        done.wait(30)
        return AdapterText()

    def check_cancelled() -> None:
        raise InterruptedError

    monkeypatch.setattr(text_files, "read_text", read_text)
    reader = TextReader()
    files = [SourceFile("tokenizer_config.json", 2, f"{number:064x}") for number in range(3)]
    threads = [
        threading.Thread(target=reader.read, args=(tmp_path, [file], "t"))
        for file in files[:CHILDREN]
    ]
    for thread in threads:
        thread.start()
    reading.wait(30)
    with pytest.raises(InterruptedError):
        reader.read(tmp_path, files[2:], "t", check_cancelled)
    done.set()
    for thread in threads:
        thread.join(30)
