"""The keys of prefixes: two sequences that have a key in common may share the state behind it.

A full page of tokens is keyed by sha256(parent key, token ids). The first parent is seeded with the
facts that separate caches: adapter digest, tenant and salt. A page with tokens of a picture is
keyed by the picture's digest, too: all pictures have the same tokens. Pages before an adapter's
activation are the base model's; the first one behind it is seeded with the digest and the
activation, too.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as SequenceOf

from inference_svc.core import AdapterKey, Sequence


def root_key(adapter: AdapterKey, cache_seed: str) -> bytes:
    """Returns the parent key of a sequence's first page; "" is the base model."""
    return hashlib.sha256(f"{adapter}\0{cache_seed}".encode()).digest()


def activation_key(parent: bytes, adapter: AdapterKey, activation: int) -> bytes:
    """Returns the stand-in for the key of a base model's page where the page that follows is the
    first with a token at or behind the adapter's activation, a position in the sequence."""
    return hashlib.sha256(parent + f"{adapter}\0{activation}".encode()).digest()


def picture_key(parent: bytes, digest: bytes, start: int) -> bytes:
    """Returns the stand-in for a parent's key where the page that follows has tokens of a picture,
    which begins `start` tokens behind the page's first, or before it."""
    return hashlib.sha256(parent + b"picture" + digest + f"{start}".encode()).digest()


def page_key(parent: bytes, token_ids: SequenceOf[int]) -> bytes:
    """Returns the key of a full page that follows `parent` and holds `token_ids`."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def extend_page_keys(sequence: Sequence, num_pages: int, page_size: int) -> None:
    """Extends `sequence.prefix_keys` to cover its first `num_pages` full pages."""
    keys, request = sequence.prefix_keys, sequence.request
    # Pages up to here are the base model's.
    num_base = request.activation // page_size
    while len(keys) < num_pages:
        if keys:
            parent = keys[-1]
        else:
            seed = request.wanted.cache_seed + request.cache_seed
            parent = root_key("" if request.activation else request.key, seed)
        if request.activation and len(keys) == num_base:
            parent = activation_key(parent, request.key, request.activation)
        start = len(keys) * page_size
        end = start + page_size
        for picture in request.pictures:
            if picture.start < end and start < picture.end:
                parent = picture_key(parent, picture.digest, picture.start - start)
        keys.append(page_key(parent, sequence.token_ids[start:end]))


def known_keys(sequence: Sequence, page_size: int) -> list[bytes]:
    """Returns the keys of the full pages of the known tokens but the last one, which must be
    computed for its logits; of a prompt that is still to be scored, or pooled, of those behind
    which nothing is."""
    full = (len(sequence.token_ids) - 1) // page_size
    if sequence.end_pooled:
        full = min(full, sequence.next_pooled // page_size)
    if sequence.num_scored < sequence.num_prompt:
        full = min(full, (sequence.num_scored - 1) // page_size)
    extend_page_keys(sequence, full, page_size)
    return sequence.prefix_keys[:full]
