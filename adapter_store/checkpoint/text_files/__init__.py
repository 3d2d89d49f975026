"""The tokenizer, the chat template and the names of labels that lie beside an adapter.

A tokenizer's file may have tens of megabytes, and parsing it holds Python's lock: a sandboxed
process does it. It keeps the tokenizer's extract (contract/tokenizer_extract.py) and the template's
text.

task  reads the files, in that process
"""

from __future__ import annotations

import hashlib
import queue
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from adapter_store.checkpoint.open import Checkpoint
from adapter_store.checkpoint.reading.files import check_text_file, open_file, read_capped
from adapter_store.checkpoint.reading.json import parse_object
from adapter_store.core import SourceFile
from adapter_store.errors import InvalidAdapter
from contract.adapter_files import (
    MAX_CLASS_LABEL_BYTES,
    MAX_CLASS_LABELS,
    MODEL_CONFIG,
    TEMPLATE_FILE,
    TEXT_FILES,
    TOKENIZER_FILE,
    is_text_file,
)
from contract.tokenizer_extract import MAX_EXTRACT_BYTES
from servicekit.sandbox.process import Limits, SandboxFailure, Task, ask_once
from servicekit.shares import Reservation, Shares

CONFIG_FILE = "tokenizer_config.json"
MEMORY_BYTES = 1 << 30
CPU_SECONDS = 30
TASK = Task(
    Path(__file__).with_name("task.py"),
    Limits(MEMORY_BYTES, wall_seconds=60.0, cpu_seconds=CPU_SECONDS, includes_loading=True),
)
MAX_ANSWER_BYTES = MAX_EXTRACT_BYTES + 1 + TEXT_FILES[CONFIG_FILE]
UNNAMED = "its own labels are LABEL_0, LABEL_1 and so on"
MAX_END_CHARS = 1 << 12
"""How much after its last loop is read of a chat template, to warn of it."""
_TAG = re.compile(r"\{%.*?%\}|\{#.*?#\}", re.DOTALL)
CHILDREN = 2
"""How many are read at a time: this bounds their memory together."""
WAIT_SECONDS = 0.2
"""How often one who waits for these looks whether it is still wanted."""
MAX_CACHED_BYTES, ENTRY_BYTES = 32 << 20, 1 << 10
"""The number of read folders that are remembered, and the memory of each besides its texts."""


@dataclass(frozen=True, slots=True)
class AdapterText:
    """The text files' contents of an adapter, empty where there are none: the extract of its
    tokenizer, as contract.tokenizer_extract writes it, its chat template in UTF-8, and the names of
    labels in its model's configuration; `label_warning` says why there are none of these."""

    tokenizer: bytes = b""
    chat_template: bytes = b""
    class_labels: tuple[str, ...] = ()
    label_warning: str = ""

    def beside(self, checkpoint: Checkpoint) -> AdapterText:
        """Returns it without names of another number of labels, which are of the model that the
        adapter was trained on, and without a warning about names if it has nothing to name."""
        return replace(
            self,
            class_labels=(self.class_labels if checkpoint.has_rows(len(self.class_labels)) else ()),
            label_warning=self.label_warning if checkpoint.may_classify else "",
        )

    @property
    def tokenizer_digest(self) -> str:
        return _digest_of(self.tokenizer)

    @property
    def chat_template_digest(self) -> str:
        return _digest_of(self.chat_template)

    @property
    def contents(self) -> dict[str, bytes]:
        """The existing texts, by digest."""
        found = {self.tokenizer_digest: self.tokenizer}
        found[self.chat_template_digest] = self.chat_template
        return {digest: content for digest, content in found.items() if digest}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the adapter's trainer."""
        found = (self.label_warning,) if self.label_warning else ()
        if not _lacks_generation_prompt(self.chat_template.decode()):
            return found
        return (
            *found,
            "its chat template does not use add_generation_prompt, and ends with the last message: "
            "models may continue this message in place of answering. Save the template that the "
            "adapter was trained with",
        )

    @property
    def num_bytes(self) -> int:
        num_labels = ENTRY_BYTES // 8 * len(self.class_labels)
        return len(self.tokenizer) + len(self.chat_template) + num_labels


def _lacks_generation_prompt(template: str) -> bool:
    """Returns whether a chat template begins no answer: neither where it is asked to, nor always,
    after its loop over the messages, nor with the end of a user's message, as Mistral's."""
    if "add_generation_prompt" in template or "[/INST]" in template:
        return False
    _, loop, rest = template.rpartition("endfor")
    end = rest.partition("%}")[2]
    return bool(loop) and len(end) <= MAX_END_CHARS and not _TAG.sub("", end).strip()


def _digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}" if content else ""


class TextReader:
    """Reads text files, and remembers the results by the files' bytes: most are copies of a base
    model's, which every run of a trainer saves again. Each account has memories of its own: none
    can tell by the time which files others have registered. Thread-safe."""

    def __init__(self, share: float = 1.0) -> None:
        """With a `share` below 1 no account has all places."""
        self.children = Shares("text_readers", CHILDREN, share)
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, tuple[str, ...]], AdapterText] = OrderedDict()
        self._known_bytes = 0

    def read(
        self,
        folder: Path,
        files: Sequence[SourceFile],
        account: str,
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> AdapterText:
        """Returns the contents of the text files among `files`, all of a folder. Raises as
        `read_text`."""
        present = sorted((file for file in files if is_text_file(file.name)), key=lambda f: f.name)
        if not present:
            return AdapterText()
        key = account, tuple(f"{file.name} {file.sha256}" for file in present)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        with self._place(account, check_cancelled):
            found = read_text(folder, [file.name for file in present], check_cancelled)
        self._remember(key, found)
        return found

    @contextmanager
    def _place(self, account: str, check_cancelled: Callable[[], None]) -> Iterator[None]:
        """Waits for one of the places, in turns with other accounts."""
        found: queue.SimpleQueue[Reservation] = queue.SimpleQueue()
        request = self.children.request(account, found.put)
        place = None
        try:
            while place is None:
                try:
                    place = found.get(timeout=WAIT_SECONDS)
                except queue.Empty:
                    check_cancelled()
            yield
        finally:
            if place is not None or not self.children.cancel(request):
                (place or found.get()).release()

    def _remember(self, key: tuple[str, tuple[str, ...]], found: AdapterText) -> None:
        with self._lock:
            if key in self._known:
                return
            self._known[key] = found
            self._known_bytes += found.num_bytes + ENTRY_BYTES
            while self._known_bytes > MAX_CACHED_BYTES:
                _, dropped = self._known.popitem(last=False)
                self._known_bytes -= dropped.num_bytes + ENTRY_BYTES


def read_text(
    folder: Path,
    names: Sequence[str],
    check_cancelled: Callable[[], None] = lambda: None,
) -> AdapterText:
    """Returns the contents of these text files of a folder. `check_cancelled` is called
    periodically and may raise.

    Raises InvalidAdapter: FILE_TOO_LARGE, FILE_NOT_REGULAR, as parse_object and make_extract,
    TEMPLATE_INVALID, TOKENIZER_TOO_LARGE (it takes too much time or memory to read).
    """
    extract = template = b""
    parsed = [name for name in names if name not in (TEMPLATE_FILE, MODEL_CONFIG)]
    if parsed:
        extract, template = _parse(folder, parsed, check_cancelled)
    where = CONFIG_FILE
    if TEMPLATE_FILE in names:
        template, where = (
            read_capped(folder, TEMPLATE_FILE, TEXT_FILES[TEMPLATE_FILE]),
            TEMPLATE_FILE,
        )
    _check_template(template, where)
    labels: tuple[str, ...] = ()
    warning = ""
    if MODEL_CONFIG in names:
        content = read_capped(folder, MODEL_CONFIG, TEXT_FILES[MODEL_CONFIG])
        labels, warning = _labels_of(content)
    return AdapterText(extract, template, labels, warning)


def _labels_of(content: bytes) -> tuple[tuple[str, ...], str]:
    """Returns the names of a classifier's labels in a model's configuration, and a warning in their
    place if they cannot be kept: such a file may be of a model that does not classify, and
    transformers saves infinite numbers in some. Names that it makes of numbers are none."""
    try:
        named = parse_object(content, MODEL_CONFIG, allows_constants=True).get("id2label")
    except InvalidAdapter as unread:
        return (), f"{unread.message}: {UNNAMED}"
    if named is None:
        return (), ""
    found = named if isinstance(named, dict) else {}
    listed = [found.get(str(index)) for index in range(min(len(found), MAX_CLASS_LABELS + 1))]
    names = [each for each in listed if isinstance(each, str) and each.isprintable()]
    why = ""
    if not names or len(names) < len(listed):
        why = "does not name the labels 0, 1, 2, ... in printable characters"
    elif len(names) > MAX_CLASS_LABELS:
        why = f"has more than {MAX_CLASS_LABELS} labels"
    elif sum(len(each.encode()) for each in names) > MAX_CLASS_LABEL_BYTES:
        why = f"has names of more than {MAX_CLASS_LABEL_BYTES} bytes together"
    if why:
        return (), f"{MODEL_CONFIG}: id2label {why}: {UNNAMED}"
    if names == [f"LABEL_{index}" for index in range(len(names))]:
        return (), ""
    return tuple(names), ""


def _check_template(template: bytes, name: str) -> None:
    try:
        template.decode()
    except UnicodeDecodeError:
        raise InvalidAdapter(
            f"{name}: the chat template is not UTF-8", subject=name, reason="TEMPLATE_INVALID"
        ) from None
    if len(template) > TEXT_FILES[TEMPLATE_FILE]:
        raise InvalidAdapter(
            f"{name}: a chat template of {len(template)} bytes is over the limit of "
            f"{TEXT_FILES[TEMPLATE_FILE]}",
            subject=name,
            reason="TEMPLATE_INVALID",
        )


def _parse(
    folder: Path, names: Sequence[str], check_cancelled: Callable[[], None]
) -> tuple[bytes, bytes]:
    """Returns the extract of the tokenizer, and the chat template of its configuration."""
    for name in names:
        with open_file(folder, name) as file:
            check_text_file(name, file.size_bytes)
    request = {"folder": str(folder.absolute()), "names": list(names)}
    try:
        answer = ask_once(TASK, request, MAX_ANSWER_BYTES, check_cancelled)
        if answer.kind != b"T":
            reason, subject, message = answer.text.split("\n", 2)
            raise InvalidAdapter(message, subject=subject, reason=reason)
        extract, _, template = answer.content.partition(b"\n")
        if len(extract) > MAX_EXTRACT_BYTES:
            raise SandboxFailure("its answer is too long")
    except SandboxFailure as failure:
        raise InvalidAdapter(
            f"{TOKENIZER_FILE}: reading it takes more than {MEMORY_BYTES >> 20} MiB of memory "
            f"or {CPU_SECONDS} seconds ({failure})",
            subject=TOKENIZER_FILE,
            reason="TOKENIZER_TOO_LARGE",
        ) from failure
    return extract, template
