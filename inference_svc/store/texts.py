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

from contract.tokenizer_extract import InvalidTokenizer, TokenizerExtract
from inference_svc.errors import AdapterUnusable
from inference_svc.store.adapter_resolver import Binding
from inference_svc.store.types import TextSource
from inference_svc.text.adapter_tokenizer import BaseTokenizer
from inference_svc.text.template_process import TemplateProcesses
from inference_svc.text.text_model import TextModel
from servicekit.telemetry.metrics import Sample
from servicekit.work_budget import WorkBudget

MAX_ENTRIES = 4096
MAX_BYTES = 256 << 20
ENTRY_BYTES = 16 << 10
"""The memory of the text of an adapter that adds no token."""
BYTES_PER_BYTE = 12
"""The memory of each byte of an extract or a template as objects."""
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

    def __init__(self, base: BaseTokenizer, source: TextSource, work: WorkBudget) -> None:
        """The time for making a text is charged to `work`."""
        self._base = base
        self._source = source
        self._work = work
        self._processes = TemplateProcesses()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._bytes: Counter[str] = Counter()
        """By tenant, for tenants that have entries."""
        self._making: dict[Key, asyncio.Task[_Entry]] = {}
        self._results: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))

    def close(self) -> None:
        """Ends the processes that render templates."""
        self._processes.close()

    async def get(self, adapter: Binding, account: str, threads: Executor) -> TextModel:
        """Returns the text model of an adapter's requests, the base model's for an adapter without
        its own. A new one is made by one of the account's `threads`, once its work allows that.

        Raises AdapterUnusable for a tokenizer that changes more than it may, AdapterNotFound,
        CorruptImage, StoreUnavailable, ShareExceeded where the account's earlier texts took too
        much work."""
        tokenizer = adapter.tokenizer_digest
        key = "" if tokenizer == self._base.digest else tokenizer, adapter.chat_template_digest
        if key == ("", ""):
            return self._base.text
        if key not in self._entries and key not in self._making:
            # One at a time, because the time is charged only at the end.
            async with self._work.turn(account):
                entry = await self._made(key, adapter.tenant, account, threads)
        else:
            entry = await self._made(key, adapter.tenant, account, threads)
        if isinstance(entry.text, AdapterUnusable):
            error = entry.text
            message = f"adapter {adapter.label}: {error.message}"
            raise type(error)(message, subject=error.subject)
        return entry.text

    async def _made(self, key: Key, tenant: str, account: str, threads: Executor) -> _Entry:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return entry
        making = self._making.get(key)
        if making is None:
            making = self._start(key, tenant, self._work.measured(account, threads))
        try:
            # A caller that is cancelled must not cancel the others'.
            return await asyncio.shield(making)
        finally:
            # Nor end its account's turn before its work is charged.
            await asyncio.wait({making})

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
        num_bytes += text.automaton_bytes
        return _Entry(text, num_bytes, tenant)
