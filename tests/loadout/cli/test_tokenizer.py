"""What `loadout register` says of a tokenizer and a chat template beside an adapter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from loadout.cli.adapters import tokenizer as tokenizer_module
from loadout.cli.adapters.tokenizer import describe_tokenizer

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
        "note: the adapter's tokenizer and chat template are used for its requests; the base "
        f"model in {base} has the same tokens and chat template"
    )


def test_added_tokens_alone(save, base):
    folder = save("adapter", added_tokens={"<tool>": 4, "<end>": 3})
    assert describe_tokenizer(folder, base, "") == (
        "warning: the adapter's added_tokens.json is not used; compared with the base model's "
        f"in {base} servers read as ordinary text: 1 token ('<tool>')"
    )
    known = save("known", added_tokens={"<end>": 3})
    assert describe_tokenizer(known, base, "") == (
        "note: the adapter's added_tokens.json is not used; the base model in "
        f"{base} has the same tokens"
    )


def test_the_base_model_that_mlx_names(save, base):
    folder = save("adapter", WHOLE, SETTINGS, adapter_config={"model": str(base)})
    assert f"the base model in {base} has the same" in describe_tokenizer(folder, None, "")


@pytest.mark.parametrize("has_library", [True, False])
def test_without_the_base_model_nothing_is_compared(save, monkeypatch, has_library):
    if not has_library:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    folder = save("adapter", WHOLE, adapter_config={"base_model_name_or_path": "/nowhere/llama"})
    assert describe_tokenizer(folder, None, "org/llama") == (
        "note: the adapter's tokenizer is used for its requests; give --model DIR, the "
        "base model's folder, to see whether it differs"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"added_tokens": [{"id": 9 - i, "content": f"<{i}>"} for i in range(5)]},
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
        "warning: the adapter's tokenizer is used for its requests; compared with the base "
        f"model's in {base} {words}: requests for the adapter are refused"
    )


def test_added_tokens(save, base):
    tokens = [{"id": 4 + i, "content": f"<{i}>"} for i in range(5)]
    folder = save("adapter", WHOLE | {"added_tokens": [*WHOLE["added_tokens"], *tokens]})
    assert describe_tokenizer(folder, base, "") == (
        "note: the adapter's tokenizer is used for its requests; compared with the base "
        f"model's in {base} it adds 5 tokens ('<0>', '<1>', '<2>', ...)"
    )


@pytest.mark.parametrize("form", ["text", "by name"])
def test_another_chat_template(save, base, form):
    named = [{"name": "tools", "template": "{{ messages }}"}, {"name": "default", "template": "x"}]
    folder = save("adapter", None, {"chat_template": "x" if form == "text" else named})
    assert describe_tokenizer(folder, base, "") == (
        "note: the adapter's chat template is used for its requests; chats are formatted "
        "differently from the base model's"
    )


def test_tokenizers_of_other_forms(save, base):
    folder = save("adapter")
    (folder / "tokenizer.model").write_bytes(b"one")
    unused = "the adapter's tokenizer without a tokenizer.json is not used"
    assert describe_tokenizer(folder, base, "") == (
        f"note: {unused}; the tokenizer in {base} has another form and was not compared"
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert describe_tokenizer(folder, base, "") == (
        f"note: the adapter's chat template is used for its requests; {unused}; the tokenizer "
        f"in {base} has another form and was not compared; the base model in {base} has the same "
        "chat template"
    )
    (folder / "chat_template.jinja").unlink()
    (base / "tokenizer.model").write_bytes(b"two")
    assert "it has another tokenizer.model" in describe_tokenizer(folder, base, "")
    assert describe_tokenizer(folder, base, "").startswith("warning: ")
    (base / "tokenizer.model").write_bytes(b"one")
    assert describe_tokenizer(folder, base, "").endswith(" has the same tokens")


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
    assert "to see whether it differs" in describe_tokenizer(by_name, None, "")
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
    assert " has another form and was not compared" in describe_tokenizer(folder, base, "")


LONG = "9" * 5000
ODD = (
    *(None, True, -1, 10**4000, 1e300, "", "\ud800", "\0", "\x1b[2J", "x" * 5000, LONG, [], {}),
    *([[]], {"a": None}),
)


def hostile_files(value: Any) -> list[tuple[str, Any]]:
    """Every place of every file with this value in it."""
    key = value if isinstance(value, str) else "7"
    added = [value, [value], [{"id": value, "content": "x"}], [{"id": 4, "content": value}]]
    vocabs = [value, {"a": value}, {key: 1}, [value], [[value]], [[value, 0.0]]]
    decoders = [value, {"7": value}, {"7": {"content": value}}, {key: {"content": "x"}}]
    templates = [value, [value], [{"name": value}], [{"name": "default", "template": value}]]
    return [
        ("tokenizer.json", value),
        ("tokenizer.json", {"model": value}),
        *(("tokenizer.json", {"model": {"vocab": vocab}}) for vocab in vocabs),
        *(("tokenizer.json", WHOLE | {"added_tokens": each}) for each in added),
        *(("tokenizer_config.json", {"added_tokens_decoder": each}) for each in decoders),
        *(("tokenizer_config.json", {"chat_template": each}) for each in templates),
        *(("chat_template.json", {"chat_template": each}) for each in templates),
        ("added_tokens.json", {key: value}),
        ("adapter_config.json", {"base_model_name_or_path": value}),
    ]


@pytest.mark.parametrize("side", ["adapter", "base"])
def test_nothing_in_a_folder_raises(save, base, side):
    """Nor does it end in a long line, or one that a terminal cannot show."""
    folders = {"adapter": save("adapter", WHOLE, SETTINGS), "base": base}
    for value in ODD:
        for name, content in hostile_files(value):
            path = folders[side] / name
            before = path.read_bytes() if path.exists() else None
            path.write_text(json.dumps(content))
            for model in (base, None):
                line = describe_tokenizer(folders["adapter"], model, "")
                assert line.isprintable()
                assert 0 < len(line) < 1000
            path.unlink() if before is None else path.write_bytes(before)


@pytest.mark.parametrize("key", ["\u0663", "\xb2", "-3", ""])
def test_numbers_of_added_tokens(save, base, key):
    """A store refuses the files, and says why."""
    decoder = {"added_tokens_decoder": {key: {"content": "<tool>"}}}
    said = describe_tokenizer(save("adapter", WHOLE, decoder), base, "")
    assert " has another form and was not compared" in said


def test_long_and_unprintable_names(save, base, tmp_path):
    tokens = [{"id": 4, "content": "x" * 512}, {"id": 5, "content": "\x1b[2J"}]
    added = {"added_tokens": [*WHOLE["added_tokens"], *tokens]}
    odd = base.rename(tmp_path / "\x1b[2J\udc80")
    folder = save("adapter", WHOLE | added, adapter_config={"base_model_name_or_path": str(odd)})
    said = describe_tokenizer(folder, None, "")
    assert f"it adds 2 tokens ('{'x' * 40}'..., '\\x1b[2J')" in said
    assert said.isprintable()


def test_files_that_are_too_large(save, base, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MAX_FILE_BYTES", 1000)
    folder = save("adapter", None, None)
    (folder / "chat_template.jinja").write_text("x" * 1001)
    assert describe_tokenizer(folder, base, "") == ""
    (folder / "chat_template.jinja").write_text("x" * 1000)
    assert "differently from the base model's" in describe_tokenizer(folder, base, "")
