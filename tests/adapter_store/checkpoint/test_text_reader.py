"""What a store remembers of folders' text files is bounded."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
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


class Held:
    """Stands for reading: each read lasts until `done`."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.reading: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def __call__(self, folder: Path, *args: object) -> AdapterText:
        self.reading.put(folder)
        self.done.wait(30)
        return AdapterText()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held()
    monkeypatch.setattr(text_files, "read_text", made)
    yield made
    made.done.set()


def start(reader: TextReader, account: str, number: int) -> threading.Thread:
    file = SourceFile("tokenizer_config.json", 2, f"{number:064x}")
    args = (Path(account), [file], account)
    thread = threading.Thread(target=reader.read, args=args, daemon=True)
    thread.start()
    return thread


def test_who_is_cancelled_waits_no_longer(held: Held) -> None:
    """While others' tokenizers are read."""
    reader = TextReader()
    threads = [start(reader, "t", number) for number in range(CHILDREN)]
    for _ in threads:
        held.reading.get(timeout=30)

    def check_cancelled() -> None:
        raise InterruptedError

    file = SourceFile("tokenizer_config.json", 2, "f" * 64)
    with pytest.raises(InterruptedError):
        reader.read(Path("t"), [file], "t", check_cancelled)
    held.done.set()
    for thread in threads:
        thread.join(30)
    assert reader.read(Path("t"), [file], "t") == AdapterText()
    reader.children.check_integrity()
    assert reader.children.used == 0


def test_one_account_does_not_have_all_places(held: Held) -> None:
    reader = TextReader(share=0.5)
    threads = [start(reader, "many", number) for number in range(4)]
    assert held.reading.get(timeout=30) == Path("many")
    threads.append(start(reader, "one", 9))
    assert held.reading.get(timeout=30) == Path("one")
    held.done.set()
    for thread in threads:
        thread.join(30)
    assert reader.children.used == 0
