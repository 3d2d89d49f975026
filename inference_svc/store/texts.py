"""The tokenizers and chat templates that adapters bring along: fetched by digest, ready to use.

An adapter's text is made once, however many requests wait for it, and kept while it is used: within
MAX_ENTRIES and MAX_BYTES, the least recently used goes first, of the tenant whose adapters brought
most. So are refusals, which follow from the content; that the store does not answer is forgotten at
once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from inference_svc.errors import AdapterUnusable
from inference_svc.store.directory import Binding
from inference_svc.store.types import TextSource
from inference_svc.text.adapter_tokenizer import BaseTokenizer
from inference_svc.text.template_process import TemplateProcesses
from inference_svc.text.text_model import TextModel
from servicekit.telemetry.metrics import Sample
from servicekit.tokenizer_extract import InvalidTokenizer, TokenizerExtract

MAX_ENTRIES = 4096
MAX_BYTES = 256 << 20
ENTRY_BYTES = 16 << 10
"""What the text of an adapter takes that adds no token."""
BYTES_PER_BYTE = 12
"""What each byte of an extract or a template takes, as objects and in the library's tables."""
RESULTS = ("made", "refused", "failed")

Key = tuple[str, str]
"""The digests of the tokenizer and of the chat template."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A text, or why it is refused."""

    text: TextModel | AdapterUnusable
    num_bytes: int
    tenant: str
    """Whose adapter brought it first."""


class AdapterTexts:
    """Lives on one event loop."""

    def __init__(self, base: BaseTokenizer, source: TextSource) -> None:
        self._base = base
        self._source = source
        self._processes = TemplateProcesses()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._bytes: Counter[str] = Counter()
        """By tenant, of those that have entries."""
        self._making: dict[Key, asyncio.Task[_Entry]] = {}
        self._results: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))

    def close(self) -> None:
        """Ends the processes that render templates."""
        self._processes.close()

    async def get(self, adapter: Binding, threads: Executor) -> TextModel:
        """Returns what an adapter's requests are tokenised with; the model's own for one that
        brings nothing else. What is new is made by one of the `threads`.

        Raises AdapterUnusable for a tokenizer that changes more than it may, AdapterNotFound,
        CorruptImage, StoreUnavailable."""
        tokenizer = adapter.tokenizer_digest
        key = "" if tokenizer == self._base.digest else tokenizer, adapter.chat_template_digest
        if key == ("", ""):
            return self._base.text
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        else:
            making = self._making.get(key) or self._start(key, adapter.tenant, threads)
            # A caller that is cancelled must not cancel the others'.
            entry = await asyncio.shield(making)
        if isinstance(entry.text, AdapterUnusable):
            error = entry.text
            message = f"adapter {adapter.label}: {error.message}"
            raise type(error)(message, subject=error.subject)
        return entry.text

    def samples(self) -> Iterator[Sample]:
        """Returns the metrics, in any thread."""
        yield Sample("text_cache_entries", len(self._entries))
        yield Sample("text_cache_used_bytes", self._bytes.total())
        for result in RESULTS:
            yield Sample("text_loads", self._results[result], (result,))

    def _start(self, key: Key, tenant: str, threads: Executor) -> asyncio.Task[_Entry]:
        def done(task: asyncio.Task[_Entry]) -> None:
            del self._making[key]
            failed = task.cancelled() or task.exception() is not None
            self._results["failed"] += failed

        task = self._making[key] = asyncio.create_task(self._load(key, tenant, threads))
        task.add_done_callback(done)
        return task

    async def _load(self, key: Key, tenant: str, threads: Executor) -> _Entry:
        tokenizer, template = [await self._source.get_text(each) if each else b"" for each in key]
        loop = asyncio.get_running_loop()
        entry = await loop.run_in_executor(threads, self._make, tenant, tokenizer, template)
        self._results["refused" if isinstance(entry.text, AdapterUnusable) else "made"] += 1
        self._entries[key] = entry
        self._bytes[tenant] += entry.num_bytes
        while len(self._entries) > MAX_ENTRIES or self._bytes.total() > MAX_BYTES:
            self._drop_one()
        return entry

    def _drop_one(self) -> None:
        [(most, _)] = self._bytes.most_common(1)
        key = next(key for key, entry in self._entries.items() if entry.tenant == most)
        self._bytes[most] -= self._entries.pop(key).num_bytes
        if not self._bytes[most]:
            del self._bytes[most]

    def _make(self, tenant: str, tokenizer: bytes, template: bytes) -> _Entry:
        try:
            extract = TokenizerExtract.from_bytes(tokenizer) if tokenizer else None
            text = self._base.with_adapter(extract, template.decode(), self._processes)
        except AdapterUnusable as error:
            return _Entry(error, ENTRY_BYTES, tenant)
        except (InvalidTokenizer, UnicodeDecodeError) as error:
            refusal = AdapterUnusable(str(error), subject="tokenizer.json")
            return _Entry(refusal, ENTRY_BYTES, tenant)
        num_bytes = ENTRY_BYTES + BYTES_PER_BYTE * (len(tokenizer) + len(template))
        return _Entry(text, num_bytes, tenant)
