"""What `loadout register` says of a tokenizer and a chat template beside an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from loadout.cli.tokenizer import describe_tokenizer

VOCAB = {"a": 0, "b": 1, "ab": 2}
WHOLE: dict[str, Any] = {
    "version": "1.0",
    "padding": None,
    "added_tokens": [{"id": 3, "content": "<end>", "special": True}],
    "normalizer": {"type": "NFC"},
    "model": {"type": "BPE", "vocab": VOCAB, "merges": ["a b"]},
}
SETTINGS = {"chat_template": "{{ messages }}", "padding_side": "left"}


@pytest.fixture
def save(tmp_path):
    """save(name, tokenizer, settings, **files): a folder with these files."""

    def save(name: str, whole: Any = None, settings: Any = None, **files: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        contents = {"tokenizer.json": whole, "tokenizer_config.json": settings}
        contents |= {f"{key}.json": value for key, value in files.items()}
        for file, content in contents.items():
            if content is not None:
                (folder / file).write_text(json.dumps(content))
        return folder

    return save


@pytest.fixture
def base(save) -> Path:
    return save("base", WHOLE, SETTINGS)


def test_nothing_beside_the_adapter(save, base):
    assert describe_tokenizer(save("adapter", adapter_config={}), base, "") == ""


def test_what_trainers_change_makes_no_difference(save, base):
    """Other releases write it in other words; trainers set padding, and move the template."""
    model = {**WHOLE["model"], "merges": [["a", "b"]]}
    folder = save(
        "adapter",
        {**WHOLE, "model": model, "normalizer": None, "padding": {"strategy": "longest"}},
        {},
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}\n")
    assert describe_tokenizer(folder, base, "") == (
        "note: tokenizer and chat template beside the adapter are not used; the base model in "
        f"{base} has the same"
    )


def test_without_the_base_model_nothing_is_compared(save):
    folder = save("adapter", WHOLE, adapter_config={"base_model_name_or_path": "/nowhere/llama"})
    assert describe_tokenizer(folder, None, "org/llama") == (
        "note: tokenizer beside the adapter is not used; --model DIR, the base model's folder, "
        "says whether it differs"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"added_tokens": [*WHOLE["added_tokens"], {"id": 4, "content": "<tool>"}]},
            "it has 1 token more ('<tool>'), which servers take for other text",
        ),
        (
            {"added_tokens": [{"id": 9 - i, "content": f"<{i}>"} for i in range(5)]},
            "it has 5 tokens more ('<4>', '<3>', '<2>', ...), which servers take for other text; "
            "it lacks 1 token",
        ),
        (
            {"model": {**WHOLE["model"], "vocab": {"a": 1, "b": 0, "ab": 2}}},
            "it has other ids for 2 tokens",
        ),
    ],
)
def test_another_tokenizer(save, base, changes, words):
    folder = save("adapter", WHOLE | changes)
    assert describe_tokenizer(folder, base, "") == (
        "warning: tokenizer beside the adapter is not used, and the tokenizer differs from the "
        f"base model's in {base}: {words}"
    )


@pytest.mark.parametrize("form", ["text", "by name"])
def test_another_chat_template(save, base, form):
    named = [{"name": "tools", "template": "{{ messages }}"}, {"name": "default", "template": "x"}]
    folder = save("adapter", None, {"chat_template": "x" if form == "text" else named})
    assert describe_tokenizer(folder, base, "") == (
        "warning: chat template beside the adapter is not used, and the chat template differs from "
        f"the base model's in {base}: chats are formatted with the base model's"
    )
    plain = save("plain", WHOLE)
    assert "not at all, as the base model has none" in describe_tokenizer(folder, plain, "")


def test_tokenizers_of_other_forms(save, base):
    folder = save("adapter")
    (folder / "tokenizer.model").write_bytes(b"one")
    assert describe_tokenizer(folder, base, "") == (
        f"note: tokenizer beside the adapter is not used; the tokenizer in {base} is of another "
        "form, and not compared"
    )
    (folder / "chat_template.jinja").write_text("x")
    assert "chats are formatted with the base model's" in describe_tokenizer(folder, base, "")
    (folder / "chat_template.jinja").unlink()
    (base / "tokenizer.model").write_bytes(b"two")
    assert "it has another tokenizer.model" in describe_tokenizer(folder, base, "")
    (base / "tokenizer.model").write_bytes(b"one")
    assert "has the same" in describe_tokenizer(folder, base, "")


def test_unigram_and_older_forms(save):
    """A list of tokens with scores; a vocabulary, merges and added tokens in files of their own."""
    pairs = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0], ["ab", 0]]}}
    unigram = save("unigram", pairs)
    older = save("older", vocab=VOCAB, added_tokens={"<tool>": 3})
    assert "it lacks 1 token" in describe_tokenizer(unigram, older, "")
    decoder = {"added_tokens_decoder": {"3": {"content": "<tool>"}}}
    assert "has the same" in describe_tokenizer(older, save("newer", pairs, decoder), "")


def test_the_base_model_is_found_on_this_machine(save, base, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    by_path = save("a", WHOLE, adapter_config={"base_model_name_or_path": str(base)})
    assert f"in {base} has the same" in describe_tokenizer(by_path, None, "")
    by_name = save("b", WHOLE, adapter_config={"base_model_name_or_path": "org/llama"})
    assert "says whether it differs" in describe_tokenizer(by_name, None, "")
    repository = tmp_path / "hub" / "models--org--llama"
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.parent.mkdir(parents=True)
    base.rename(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)
    assert f"in {snapshot} has the same" in describe_tokenizer(by_name, None, "")
    assert f"in {snapshot} has the same" in describe_tokenizer(by_path, None, "org/llama")


HOSTILE: dict[str, bytes] = {
    "no JSON": b"\xff{",
    "too deep": b"[" * 100_000,
    "a list": b"[]",
    "another shape": json.dumps(
        {"model": {"vocab": [[["x"]], 3], "merges": 7}, "added_tokens": [{"content": []}, 1]}
    ).encode(),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_malformed_files(save, base, case):
    folder = save("adapter")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.json"):
        (folder / name).write_bytes(HOSTILE[case])
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    assert " is of another form, and not compared" in describe_tokenizer(folder, base, "")
