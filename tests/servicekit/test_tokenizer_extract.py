"""An extract that was not written as ours is refused by name, whoever sent it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from servicekit.tokenizer_extract import (
    AddedToken,
    InvalidTokenizer,
    TokenizerExtract,
    canonical,
    make_extract,
)


def made() -> dict[str, Any]:
    """The fields of an extract."""
    extract = make_extract(
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "<t>"}]},
        {"eos_token": "<t>", "add_bos_token": False},
    )
    assert TokenizerExtract.from_bytes(extract.to_bytes()) == extract
    return {
        "format": 1,
        "added_tokens": [[1, "<t>", "n"]],
        "parts": dict(extract.parts),
        "roles": dict(extract.roles),
        "settings": dict(extract.settings),
    }


def test_what_a_release_does_not_know_is_left_out() -> None:
    fields = made()
    for name in ("parts", "roles", "settings"):
        fields[name]["newer"] = {}
    extract = TokenizerExtract.from_bytes(canonical(fields))
    assert extract == TokenizerExtract.from_bytes(canonical(made()))
    assert extract.added_tokens == (AddedToken(1, "<t>", normalized=True),)


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.update(format=2),
        lambda fields: fields.pop("parts"),
        lambda fields: fields["parts"].pop("decoder"),
        lambda fields: fields["parts"].update(decoder=1),
        lambda fields: fields["roles"].update(eos_token=["<t>"]),
        lambda fields: fields["settings"].update(add_bos_token="no"),
        lambda fields: fields.update(roles=["eos_token"]),
        lambda fields: fields.update(added_tokens=[["1", "<t>", "n"]]),
        lambda fields: fields.update(added_tokens=[[1 << 40, "<t>", "n"]]),
        lambda fields: fields.update(added_tokens=[[1, 2, "n"]]),
        lambda fields: fields.update(added_tokens=[[1, "<t>", None]]),
        lambda fields: fields.update(added_tokens=[[1, "<t>"]]),
    ],
)
def test_what_is_no_extract_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    fields = made()
    change(fields)
    with pytest.raises(InvalidTokenizer):
        TokenizerExtract.from_bytes(canonical(fields))


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidTokenizer):
        TokenizerExtract.from_bytes(data)
