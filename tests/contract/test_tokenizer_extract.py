"""An extract that was not written as ours is refused by name, whoever sent it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from contract.tokenizer_extract import (
    AddedToken,
    InvalidTokenizer,
    TokenizerExtract,
    canonical,
    make_extract,
    read_tokens,
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


def test_tokens_of_a_file_and_its_configuration() -> None:
    tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "<t>"}]}
    config = {"added_tokens_decoder": {"2": {"content": "<tool>"}}}
    assert read_tokens(tokenizer, config) == {"a": 0, "<t>": 1, "<tool>": 2}


def test_a_score_that_no_float_can_be_is_refused() -> None:
    for read in (read_tokens, make_extract):
        with pytest.raises(InvalidTokenizer, match="not a token and its score"):
            read({"model": {"vocab": [["a", 10**400]]}}, {})
