"""KV pages: reference counts, and the prefix cache that shares full pages.

A full page is keyed by sha256(parent key, token ids). The first parent is seeded with the facts
that separate caches: adapter digest, tenant and salt. Pages before an adapter's activation are the
base model's; the first one behind it is seeded with the digest and the activation, too. Plain
bookkeeping without tensors.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from inference_svc.core import AdapterKey


def root_key(adapter: AdapterKey, cache_seed: str) -> bytes:
    """Returns the parent key of a sequence's first page; "" is the base model."""
    return hashlib.sha256(f"{adapter}\0{cache_seed}".encode()).digest()


def activation_key(parent: bytes, adapter: AdapterKey, activation: int) -> bytes:
    """Returns the stand-in for the key of a base model's page where the page that follows is the
    first with a token at or behind the adapter's activation, a position in the sequence."""
    return hashlib.sha256(parent + f"{adapter}\0{activation}".encode()).digest()


def page_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Returns the key of a full page that follows `parent` and holds `token_ids`."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class PagePool:
    """`num_pages` pages of `page_size` tokens.

    A page without references is free, but keeps its key until it is allocated again, so that a
    later prefix can reuse it; among free pages those without a key are allocated first, then the
    least recently used.
    """

    def __init__(self, num_pages: int, page_size: int, caching: bool = True) -> None:
        assert num_pages > 0
        assert page_size > 0
        self.num_pages = num_pages
        self.page_size = page_size
        self.caching = caching
        self.num_evictions = 0
        """Keyed pages that were allocated anew."""
        self._references = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def num_known(self) -> int:
        """Pages, used or free, that a prefix can match."""
        return len(self._by_key)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages and drops their former keys."""
        assert self.can_allocate(count)
        pages = []
        for _ in range(count):
            page, _none = self._free.popitem(last=False)
            self._drop_key(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the pages of the longest known run of `keys`, without referencing them: call
        `share` next."""
        pages: list[int] = []
        if self.caching:
            for key in keys:
                page = self._by_key.get(key)
                if page is None:
                    break
                pages.append(page)
        return pages

    def num_free_among(self, pages: Iterable[int]) -> int:
        """Returns how many of these pages `share` would take from the free ones."""
        return sum(self._references[page] == 0 for page in pages)

    def num_released(self, pages: Iterable[int]) -> int:
        """Returns how many of these pages `release` would make free."""
        return sum(self._references[page] == 1 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page."""
        for page in pages:
            if self._references[page] == 0:
                del self._free[page]
            self._references[page] += 1

    def publish(self, page: int, key: bytes) -> None:
        """Keys a page that is full and computed: equal prefixes may share it from now on."""
        assert self._references[page] > 0
        if self.caching and key not in self._by_key and self._keys[page] is None:
            self._by_key[key] = page
            self._keys[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Drops a reference to each page; the ends of prefixes are the first to be reused."""
        for page in reversed(pages):
            assert self._references[page] > 0, "page freed twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None
                if self._keys[page] is None:
                    self._free.move_to_end(page, last=False)

    def forget_prefixes(self) -> None:
        """Lets no later prefix reuse a page that is full now."""
        self._keys = [None] * self.num_pages
        self._by_key.clear()

    def _drop_key(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._by_key[key]
            self._keys[page] = None
            self.num_evictions += 1

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Asserts that the references are exactly the ones of `holders` (page lists)."""
        counted = [0] * self.num_pages
        for pages in holders:
            for page in pages:
                counted[page] += 1
        assert counted == self._references, "references without a holder, or the reverse"
        assert len(self._free) == counted.count(0)
        assert not any(map(counted.__getitem__, self._free))
        assert list(map(self._keys.__getitem__, self._by_key.values())) == list(self._by_key)
        assert self.num_pages - self._keys.count(None) == len(self._by_key)
