"""What a store remembers of folders' text files is bounded."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapter_store.checkpoint import text_files
from adapter_store.checkpoint.text_files import (
    CHILDREN,
    ENTRY_BYTES,
    AdapterText,
    TextReader,
    read_text,
)
from adapter_store.core import SourceFile
from adapter_store.errors import InvalidAdapter
from contract.adapter_files import MODEL_CONFIG


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


def read_labels(folder: Path, id2label: object) -> AdapterText:
    (folder / MODEL_CONFIG).write_text(json.dumps({"model_type": "llama", "id2label": id2label}))
    return read_text(folder, [MODEL_CONFIG])


@pytest.mark.parametrize(
    ("id2label", "labels"),
    [
        ({"1": "happy", "0": "sad"}, ("sad", "happy")),
        ({"0": "LABEL_0", "1": "LABEL_1"}, ()),
        (None, ()),
        ({str(index): "x" * 16 for index in range(1024)}, ("x" * 16,) * 1024),
    ],
    ids=["names", "of-transformers", "none", "as-many-as-may-be"],
)
def test_labels_have_the_names_of_the_models_config(
    tmp_path: Path, id2label: object, labels: tuple[str, ...]
) -> None:
    text = read_labels(tmp_path, id2label)
    assert (text.class_labels, text.warnings) == (labels, ())


@pytest.mark.parametrize(
    ("id2label", "why"),
    [
        ([], "does not name the labels"),
        ({}, "does not name the labels"),
        ({"0": "a", "2": "b"}, "does not name the labels"),
        ({"0": 1}, "does not name the labels"),
        ({"0": "a\nb"}, "in printable characters"),
        ({"0": "\ud800"}, "in printable characters"),
        ({str(index): "x" for index in range(1025)}, "more than 1024 labels"),
        ({"0": "é" * 8193}, "more than 16384 bytes"),
    ],
)
def test_names_that_cannot_be_kept_are_a_warning(
    tmp_path: Path, id2label: object, why: str
) -> None:
    text = read_labels(tmp_path, id2label)
    [warning] = text.warnings
    assert text.class_labels == ()
    assert warning.startswith("config.json: id2label ")
    assert why in warning


def test_a_models_config_may_have_infinite_numbers(tmp_path: Path) -> None:
    """transformers saves `time_step_limit` of Mamba so."""
    content = b'{"time_step_limit": [0.0, Infinity], "id2label": {"0": "sad", "1": "happy"}}'
    (tmp_path / MODEL_CONFIG).write_bytes(content)
    text = read_text(tmp_path, [MODEL_CONFIG])
    assert (text.class_labels, text.warnings) == (("sad", "happy"), ())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff", "not UTF-8"),
        (b"[" * 100_000, "JSON nested too deeply"),
        (b'{"a": 1, "a": 2, "id2label": {"0": "x"}}', "duplicate key 'a'"),
    ],
    ids=["cut-off", "no-object", "no-text", "deep", "twice"],
)
def test_a_models_config_that_cannot_be_read_is_a_warning(
    tmp_path: Path, content: bytes, why: str
) -> None:
    (tmp_path / MODEL_CONFIG).write_bytes(content)
    text = read_text(tmp_path, [MODEL_CONFIG])
    [warning] = text.warnings
    assert text.class_labels == ()
    assert warning.startswith(f"config.json: {why}")
    assert warning.endswith("its own labels are LABEL_0, LABEL_1 and so on")


def test_a_models_config_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / MODEL_CONFIG).write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(InvalidAdapter) as caught:
        read_text(tmp_path, [MODEL_CONFIG])
    assert (caught.value.reason, caught.value.subject) == ("FILE_TOO_LARGE", MODEL_CONFIG)
    assert "1048577 bytes is over the limit of 1048576: leave it out" in str(caught.value)
