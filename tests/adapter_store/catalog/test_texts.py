"""Texts of versions: part of their content, kept once, seen by their tenants, in both databases."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from adapter_store.core import Quota
from servicekit.errors import NotFound, QuotaExceeded

TOKENIZER, TEMPLATE = "sha256:tokenizer", "sha256:template"
WITH_TEXT: dict[str, Any] = {
    "tokenizer_digest": TOKENIZER,
    "chat_template_digest": TEMPLATE,
    "texts": {TOKENIZER: b"{}", TEMPLATE: b"\x00\xff template"},
}


def test_another_text_is_another_version(names):
    assert names.register("a", "d1")[0].version == 1
    with_text = names.register("a", "d1", **WITH_TEXT)[0]
    assert (with_text.version, with_text.tokenizer_digest) == (2, TOKENIZER)
    assert names.register("a", "d1", **WITH_TEXT)[0].version == 2
    assert names.register("a", "d1", **WITH_TEXT | {"tokenizer_digest": ""})[0].version == 3
    assert names.register("a", "d1")[0].version == 1


def test_texts_are_seen_by_tenants_that_have_them(names, catalog):
    names.register("own/a", "d1", **WITH_TEXT)
    names.register("other/a", "d1")
    assert catalog.names.text(TEMPLATE, frozenset({"own"})) == WITH_TEXT["texts"][TEMPLATE]
    assert catalog.names.text(TOKENIZER) == b"{}"
    for tenants in (frozenset({"other"}), frozenset()):
        with pytest.raises(NotFound):
            catalog.names.text(TEMPLATE, tenants)


def test_texts_go_with_their_last_version(names, catalog):
    for name in ("a", "b"):
        names.register(name, "d1", **WITH_TEXT)
    for name, num_gone in (("a", 0), ("b", 2)):
        catalog.names.remove(names.ref(name).name)
        assert catalog.expiry.forget_texts() == 0, "it can be restored"
        catalog.expiry.expire_deleted(timedelta(days=-1))
        assert catalog.expiry.forget_texts() == num_gone


def test_quotas_count_each_text_once(names, catalog):
    size = 100 + sum(map(len, WITH_TEXT["texts"].values()))
    quota = Quota(max_bytes=size)
    for name in ("a", "b"):
        catalog.names.register(names.new(name, "d1", **WITH_TEXT), quota=quota)
    more = {"texts": {"sha256:more": b"x"}, "chat_template_digest": "sha256:more"}
    with pytest.raises(QuotaExceeded, match="1 more"):
        catalog.names.register(names.new("a", "d1", **WITH_TEXT | more), quota=quota)
