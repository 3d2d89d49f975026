"""An adapter's tokenizer is what transformers loads from its folder, or is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from contract.tokenizer_extract import TokenizerExtract, make_extract
from inference_svc.errors import AdapterUnusable, TokenizerChanged
from inference_svc.text.adapter_tokenizer import BaseTokenizer
from inference_svc.text.chat import Chat, ChatMessage
from inference_svc.text.detokenizer import Detokenizer
from inference_svc.text.template_process import TemplateProcesses
from inference_svc.text.text_model import TextModel
from inference_svc.text.tokenizer import Tokenizer
from tests.support.models import tokenizer_files as files
from tests.support.models.templates import FAMILIES, TOOLED

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
)
NEW = [
    "<|im_start|>",
    "<|im_end|>",
    AddedToken("<tool>", normalized=True),
    AddedToken("<mask>", lstrip=True, special=True, normalized=False),
    AddedToken("Fox", single_word=True, normalized=False),
    AddedToken("<right>", rstrip=True),
]
TEXTS = [
    "the quick brown fox",
    "<|im_start|>user\nthe  Fox <tool>jumps<|im_end|>\n",
    "a <mask> b<right>   c <|im_end|><|im_end|>",
    "Foxy Fox,fox <TOOL> \uff54\uff48\uff45",
    "",
    " leading",
    "<tool> 日本語😀 </s><s> the",
]


def read_extract(folder: Path) -> TokenizerExtract:
    """As the store makes it."""
    fields = [json.loads((folder / name).read_text()) for name in ("tokenizer.json", CONFIG)]
    return TokenizerExtract.from_bytes(make_extract(*fields).to_bytes())


CONFIG = "tokenizer_config.json"


PROCESSES = TemplateProcesses()


@pytest.fixture(scope="module", autouse=True)
def close() -> Iterator[None]:
    yield
    PROCESSES.close()


class Base:
    """A model's folder, and adapters' folders beside it."""

    def __init__(self, kind: str, folder: Path, template: str = "") -> None:
        self.backend = files.KINDS[kind]()
        self.folder = folder
        self.model_dir = files.save(self.backend, folder / "model", template)
        self.text = Tokenizer(self.model_dir)
        self.base = BaseTokenizer(self.text, self.model_dir)

    def adapter(self, tokens: Any = (), template: str = "", **config: Any) -> Path:
        backend = files.with_tokens(self.backend, tokens)
        return files.save(backend, self.folder / "adapter", template, **config)

    def load(self, folder: Path, template: str = "") -> TextModel:
        return self.base.with_adapter(read_extract(folder), template, PROCESSES)


@pytest.fixture(params=files.KINDS)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Base:
    return Base(request.param, tmp_path)


def assert_same(ours: TextModel, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(str(folder))
    ids = range(len(theirs))
    rng = random.Random(0)
    pieces = [*TEXTS, *theirs.added_tokens_encoder]
    texts = [*TEXTS, *("".join(rng.choices(pieces, k=4)) for _ in range(100))]
    for text in texts:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        backend = theirs.backend_tokenizer
        expected = backend.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == expected, text
    for _ in range(100):
        found = [rng.choice(ids) for _ in range(12)]
        text = theirs.decode(found, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(found) == text
        detokenizer = Detokenizer(ours)
        assert "".join(map(detokenizer.push, found)) + detokenizer.flush() == text
    for token_id in ids:
        assert ours.name_of(token_id) == theirs.convert_ids_to_tokens(token_id)
        assert (token_id in ours.visible_ids) == (
            token_id not in theirs.added_tokens_decoder
            or not theirs.added_tokens_decoder[token_id].special
        )


def test_a_copy_of_the_models_is_the_models(base: Base) -> None:
    folder = base.adapter()
    assert read_extract(folder).digest == base.base.digest
    assert_same(base.load(folder), folder)


def test_added_tokens_are_found_as_transformers_finds_them(base: Base) -> None:
    folder = base.adapter(NEW, eos_token="<|im_end|>")
    ours = base.load(folder)
    assert_same(ours, folder)
    assert ours.end_ids == (ours.encode("<|im_end|>")[-1],)
    before = base.text.encode(TEXTS[1])
    assert before == AutoTokenizer.from_pretrained(str(base.model_dir))(TEXTS[1])["input_ids"]


def test_files_that_transformers_saves_again(base: Base) -> None:
    """As a trainer does that loads the model's, adds tokens, and saves it."""
    tokenizer = AutoTokenizer.from_pretrained(str(base.model_dir))
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.add_tokens(["<call>", "</call>"])
    folder = base.folder / "saved"
    tokenizer.save_pretrained(str(folder))
    ours = base.load(folder)
    assert_same(ours, folder)
    assert ours.end_ids == ()


def test_tokens_that_only_the_configuration_names(base: Base) -> None:
    folder = base.adapter(pad_token="[PAD]", additional_special_tokens=["<|a|>", "the"])
    assert_same(base.load(folder), folder)


def test_tokens_share_the_models_vocabulary(tmp_path: Path) -> None:
    base = Base("byte_level", tmp_path)
    ours = base.load(base.adapter(NEW))
    assert ours.backend.model.__getstate__() == base.text.backend.model.__getstate__()  # type: ignore[attr-defined]
    assert ours.pieces.of(5) is base.text.pieces.of(5)
    new_id = ours.encode("<tool>")[-1]
    assert ours.pieces.of(new_id).text == "<tool>"


def test_the_models_template_gets_the_adapters_tokens(tmp_path: Path) -> None:
    base = Base("byte_level", tmp_path, TEMPLATE)
    folder = base.adapter(NEW, TEMPLATE, eos_token="<|im_end|>")
    ours = base.load(folder)
    messages = [ChatMessage("user", "hi"), ChatMessage("assistant", "the fox")]
    chat = [{"role": m.role, "content": m.content} for m in messages]
    theirs = AutoTokenizer.from_pretrained(str(folder))
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ours.encode_chat(Chat(tuple(messages)), 1000, 5.0) == expected


Change = Callable[[Path], Any]


def edited(change: Callable[[dict[str, Any]], Any], name: str = "tokenizer.json") -> Change:
    return lambda folder: files.edit(folder, change, name)


def component(name: str, made: Any) -> Change:
    state = json.loads(made.__getstate__())
    return edited(lambda found: found.update({name: state}))


def swap(found: dict[str, Any]) -> None:
    vocabulary = found["model"]["vocab"]
    vocabulary["t"], vocabulary["h"] = vocabulary["h"], vocabulary["t"]


CHANGES: dict[str, tuple[Change, str]] = {
    "two ids": (edited(swap), "vocabulary"),
    "a merge": (edited(lambda found: found["model"]["merges"].pop()), "merges"),
    "dropout": (edited(lambda found: found["model"].update(dropout=0.1)), "settings of the model"),
    "normalizer": (component("normalizer", normalizers.Lowercase()), "the normalizer"),
    "pre-tokenizer": (
        component("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "the pre-tokenizer",
    ),
    "decoder": (component("decoder", decoders.Fuse()), "the decoder"),
    "a token is gone": (
        lambda folder: [
            edited(lambda found: found["added_tokens"].pop(1))(folder),
            edited(lambda found: found.update(eos_token="<s>"), CONFIG)(folder),
        ],
        "'</s>' of the model, which it lacks",
    ),
    "a token is found otherwise": (
        edited(lambda found: found["added_tokens"][1].update(lstrip=True)),
        "how token '</s>'",
    ),
    "split specials": (
        edited(lambda found: found.update(split_special_tokens=True), CONFIG),
        "split_special_tokens",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_models_own_is_refused_by_name(tmp_path: Path, name: str) -> None:
    base = Base("byte_level", tmp_path)
    change, what = CHANGES[name]
    folder = base.adapter()
    change(folder)
    with pytest.raises(AdapterUnusable, match=what) as caught:
        base.load(folder)
    assert caught.value.reason == "TOKENIZER_CHANGED"


def test_ids_that_the_library_would_not_give_are_refused(tmp_path: Path) -> None:
    base = Base("byte_level", tmp_path)
    folder = base.adapter(["<x>"])
    files.edit(folder, lambda found: found["added_tokens"][-1].update(id=900))
    with pytest.raises(AdapterUnusable, match="'<x>' the id 900"):
        base.load(folder)


@pytest.mark.slow
def test_tokens_count_as_the_models_normalizer_makes_them(tmp_path: Path) -> None:
    """Of one character NFKC makes eighteen."""
    base = Base("unigram", tmp_path)
    long = [AddedToken(f"{number:03}" + "\ufdfa" * 250, normalized=True) for number in range(20)]
    base.load(base.adapter(long[:5]))
    with pytest.raises(TokenizerChanged, match=r"the 20 tokens .* more than 98304"):
        base.load(base.adapter(long))


PROMPT_CHANGES: dict[str, tuple[Change, str]] = {
    "post-processor": (
        component(
            "post_processor", processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
        ),
        "the post-processor",
    ),
    "end of texts": (
        edited(lambda found: found.update(add_eos_token=True), CONFIG),
        "add_eos_token",
    ),
}


@pytest.mark.parametrize("name", PROMPT_CHANGES)
def test_what_changes_the_ends_of_texts_is_refused_for_texts_only(
    tmp_path: Path, name: str
) -> None:
    base = Base("byte_level", tmp_path, TEMPLATE)
    change, what = PROMPT_CHANGES[name]
    folder = base.adapter(template=TEMPLATE)
    change(folder)
    ours = base.load(folder)
    with pytest.raises(AdapterUnusable, match=what):
        ours.encode("the")
    messages = [ChatMessage("user", "hi")]
    assert ours.encode("a fox", add_special_tokens=False) == base.text.encode(
        "a fox", add_special_tokens=False
    )
    assert ours.encode_chat(Chat(tuple(messages)), 1000, 5.0) == base.text.encode_chat(
        Chat(tuple(messages)), 1000, 5.0
    )


OTHER_FORMS: dict[str, Change] = {
    "merges as texts": edited(
        lambda found: found["model"].update(
            merges=[" ".join(pair) for pair in found["model"]["merges"]]
        )
    ),
    "no defaults": edited(
        lambda found: [found["model"].pop(key) for key in ("dropout", "byte_fallback", "fuse_unk")]
    ),
    "an earlier pre-tokenizer": edited(lambda found: found["pre_tokenizer"].pop("use_regex")),
    "padding": edited(lambda found: found.update(padding={"strategy": "BatchLongest"})),
    "another class": edited(lambda found: found.update(tokenizer_class="Other"), CONFIG),
    "no beginnings": edited(lambda found: found.update(add_bos_token=False), CONFIG),
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_other_releases_write_the_same_otherwise(tmp_path: Path, name: str) -> None:
    base = Base("byte_level", tmp_path)
    folder = base.adapter(NEW)
    OTHER_FORMS[name](folder)
    ours = base.load(folder)
    assert ours.encode(TEXTS[1]) == base.load(base.adapter(NEW)).encode(TEXTS[1])


@pytest.mark.parametrize(
    ("parser", "own", "calls"),
    [
        ("auto", "qwen3", "hermes"),
        ("mistral", "qwen3", "hermes"),
        ("mistral", "chatml", "mistral"),
        ("auto", "chatml", None),
        ("none", "qwen3", None),
        ("auto", "", "mistral"),
    ],
)
def test_answers_are_read_by_an_adapters_own_template(
    tmp_path: Path, parser: str, own: str, calls: str | None
) -> None:
    """A template that teaches no calls leaves an operator's choice."""
    templates = {**FAMILIES, **TOOLED, "": ""}
    base = Base("byte_level", tmp_path, TOOLED["mistral"])
    base.text = Tokenizer(base.model_dir, parser)
    base.base = BaseTokenizer(base.text, base.model_dir)
    found = base.load(base.adapter(), templates[own]).answers
    assert (found.calls and found.calls.name) == calls
    assert (found.thoughts is None) == (own != "qwen3")


def test_markers_that_are_special_tokens_are_shown_where_they_are_read(base: Base) -> None:
    adapter = base.load(base.adapter(NEW))
    special = "<|im_start|>"
    ids = adapter.encode(f"the{special}fox", add_special_tokens=False)
    shown = adapter.showing((special, "nothing"))
    detokenizer, hidden = Detokenizer(shown), Detokenizer(adapter)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert special in text
    plain = "".join(map(hidden.push, ids)) + hidden.flush()
    assert special not in plain
    assert text.replace(special, "").replace(" ", "") == plain.replace(" ", "")
    assert adapter.showing(("nothing",)) is adapter
