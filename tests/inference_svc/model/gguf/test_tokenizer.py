"""Tokens of GGUF files equal those of transformers' tokenizers of the same vocabulary."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, GemmaTokenizer, LlamaTokenizer, Qwen2Tokenizer

from inference_svc.errors import UnsupportedModel
from inference_svc.model.gguf.file import Header, read_header
from inference_svc.model.gguf.tokenizer import tokenizer_files
from inference_svc.text.tokenizer import Tokenizer as Ours
from tests.support.models.smollm2 import gguf_path
from tests.support.models.tokenizer_files import CORPUS

CONTROL, USER_DEFINED, BYTE = 3, 4, 6
TEXTS = [
    *CORPUS,
    *("", " ", "a", "hello 1234 56", "don't I'LL we're", "  two", "x\n\n1\n", "tab\t\t7 ", "\r\n"),
    *("<s>hi</s> <think>no</think>", "1 <s> 2", "\u2581 \u2581\u2581a", "e\u0301 \u212b", "\0\x7f"),
]


def random_texts(count: int) -> list[str]:
    """Texts of letters, digits, spaces, accents, ideographs and emoji."""
    source = random.Random(0)
    letters = "etaoin shrdlu ETA 0123456789 \n\t.,!?'\"<>" + "éüßñçλжя日本語北京😀🎉\u0301\u2581"
    return ["".join(source.choices(letters, k=source.randrange(1, 60))) for _ in range(count)]


MANY = [*TEXTS, *random_texts(300)]
SPECIALS = {"<s>": CONTROL, "</s>": CONTROL, "<think>": USER_DEFINED, "</think>": USER_DEFINED}


def header_of(architecture: str, **values: Any) -> Header:
    known = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    metadata = {"general.architecture": architecture, f"{architecture}.context_length": 128}
    return Header(Path("model.gguf"), {**metadata, **known}, ())


def ours_of(header: Header, folder: Path) -> Ours:
    """The tokenizer as the server loads it."""
    for name, text in tokenizer_files(header).items():
        (folder / name).write_text(text, encoding="utf-8")
    return Ours(folder)


def byte_level_vocabulary(pattern: str = "") -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.ByteLevel(False, use_regex=not pattern)]
    if pattern:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [*CORPUS, *TEXTS, *random_texts(100)],
        trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False),
    )
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def byte_level_header(split: str, tokens: Sequence[str], merges: Sequence[str]) -> Header:
    return header_of(
        "llama",
        model="gpt2",
        pre=split,
        tokens=[*tokens, *SPECIALS],
        token_type=[1] * len(tokens) + list(SPECIALS.values()),
        merges=list(merges),
        bos_token_id=len(tokens),
        eos_token_id=len(tokens) + 1,
        add_bos_token=False,
    )


def specials_added(reference: Any) -> Any:
    reference.add_special_tokens({"additional_special_tokens": ["<s>", "</s>"]})
    reference.add_tokens(["<think>", "</think>"])
    return reference


def check_same(ours: Ours, reference: Any, texts: Sequence[str] = MANY) -> None:
    for text in texts:
        expected = reference.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected, text


def test_qwen2(tmp_path: Path) -> None:
    """As its own class: also composed characters are, which a file does not say."""
    tokens, merges = byte_level_vocabulary()
    vocab = {token: index for index, token in enumerate([*tokens, *SPECIALS])}
    pairs = [tuple(each.split(" ")) for each in merges]
    reference = specials_added(Qwen2Tokenizer(vocab=vocab, merges=pairs, unk_token="</s>"))
    header = byte_level_header("qwen2", tokens, merges)
    check_same(ours_of(header, tmp_path), reference)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of the tokenizer.json of Llama 3, which also ignores merges."""


@pytest.mark.parametrize("split", ["llama-bpe", "llama3", "llama-v3"])
def test_llama3(split: str, tmp_path: Path) -> None:
    tokens, merges = byte_level_vocabulary(LLAMA3)
    tokens.append("Ġunmergeable")
    vocab = {token: index for index, token in enumerate([*tokens, *SPECIALS])}
    pairs = [tuple(each.split(" ")) for each in merges]
    expected = Tokenizer(models.BPE(vocab, pairs, ignore_merges=True))
    expected.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    expected.add_special_tokens(["<s>", "</s>"])
    expected.add_tokens(["<think>", "</think>"])
    ours = ours_of(byte_level_header(split, tokens, merges), tmp_path)
    for text in [*MANY, "an unmergeable word"]:
        assert ours.encode(text) == expected.encode(text).ids, text
    assert vocab["Ġunmergeable"] in ours.encode("an unmergeable word")


def test_texts_begin_with_the_first_token_by_default(tmp_path: Path) -> None:
    """Llama 3's do where the file does not say, and SmolLM's do not."""
    tokens, merges = byte_level_vocabulary()
    for split, begins in (("llama-bpe", True), ("smollm", False)):
        header = byte_level_header(split, tokens, merges)
        metadata = dict(header.metadata)
        del metadata["tokenizer.ggml.add_bos_token"]
        folder = tmp_path / split
        folder.mkdir()
        ours = ours_of(replace(header, metadata=metadata), folder)
        assert (ours.encode("a")[0] == len(tokens)) == begins
        assert ours.encode("a", add_special_tokens=False)[0] != len(tokens)


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens with scores, as SentencePiece trains them: merges in the order of scores."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    learnt = sorted(model["vocab"], key=model["vocab"].get)
    merged = ["".join(pair) for pair in model["merges"]]
    single = [each for each in learnt if each not in merged]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, CONTROL, CONTROL] + [BYTE] * 256
    scores = [0.0] * len(tokens)
    tokens += [*merged, *single]
    scores += [-float(index) for index in range(len(merged))] + [-1e9] * len(single)
    return tokens, scores, kinds + [1] * (len(merged) + len(single))


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentencepiece(adds_space: bool, tmp_path: Path) -> None:
    tokens, scores, kinds = sentencepiece_vocabulary()
    header = header_of(
        "llama",
        model="llama",
        tokens=tokens,
        scores=scores,
        token_type=kinds,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        add_space_prefix=adds_space,
    )
    ours = ours_of(header, tmp_path)
    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(each) for each in merges]
    reference = LlamaTokenizer(vocab=vocab, merges=pairs, add_prefix_space=adds_space)
    check_same(ours, reference)
    # SentencePiece merges the pair of the highest score: of the vocabulary's order.
    ranks = [vocab[left + right] for left, right in pairs]
    assert ranks == sorted(ranks)
    assert ours.encode("the")[0] == 1
    for text in ("the quick brown fox", "naïve 日本 😀"):
        assert ours.decode(ours.encode(text)) == text


def test_gemma(tmp_path: Path) -> None:
    """Runs of spaces are stored as spaces, and scores say nothing."""
    tokens, _, kinds = sentencepiece_vocabulary()
    runs = ["  ", "   ", "\n\n\n"]
    tokens, kinds = [*tokens, *runs], [*kinds, *[USER_DEFINED] * 3]
    header = header_of(
        "gemma2",
        model="llama",
        tokens=tokens,
        scores=[-1000.0] * len(tokens),
        token_type=kinds,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )
    ours = ours_of(header, tmp_path)
    spelled = ["\u2581" * len(each) if not each.strip(" ") else each for each in tokens]
    vocab = {token: index for index, token in enumerate(spelled)}
    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    reference = GemmaTokenizer(
        vocab=vocab,
        merges=[tuple(each) for each in merges],
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        mask_token="</s>",
    )
    reference.add_tokens(["\n\n\n"])
    check_same(ours, reference)
    assert ours.encode("  ") == [1, vocab["\u2581\u2581"]]


def test_a_word_with_the_role_of_padding_stays_a_word(tmp_path: Path) -> None:
    tokens, merges = byte_level_vocabulary()
    header = byte_level_header("qwen2", tokens, merges)
    metadata = {**header.metadata, "tokenizer.ggml.padding_token_id": tokens.index("!")}
    ours = ours_of(replace(header, metadata=metadata), tmp_path)
    assert ours.decode(ours.encode("oh!")) == "oh!"
    assert "pad_token" not in ours.specials


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "model": ({"model": "bert"}, r"ggml.model = 'bert': supported are gpt2, llama; serve it with"),
    "pre": ({"pre": "chameleon"}, r"ggml.pre = 'chameleon': supported are gpt-2, smollm"),
    "no-pre": ({"pre": None}, r"ggml.pre = None"),
    "tokens": ({"tokens": [1, 2]}, r"ggml.tokens = \[1, 2\]: must be a list of str"),
    "no-tokens": ({"tokens": []}, r"ggml.tokens = \[\]: there is no token"),
    "twice": ({"tokens": ["a", "a"], "token_type": []}, r"ggml.tokens .* 1 for 2 tokens"),
    "types": ({"token_type": [1]}, r"ggml.token_type = \[1\]: 1 for"),
    "merges": ({"merges": ["ab"]}, r"ggml.merges .* no pair of tokens: 'ab'"),
    "empty-merge": ({"merges": [""]}, r"ggml.merges .* no pair of tokens: ''"),
    "unknown-merge": ({"merges": ["xx yy"]}, r"its tokenizer is broken .*xx"),
    "role": ({"eos_token_id": 10_000}, r"ggml.eos_token_id = 10000: no token has it"),
    "flag": ({"add_bos_token": 1}, r"ggml.add_bos_token = 1: must be true or false"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_vocabulary_is_refused(name: str) -> None:
    changes, message = REFUSED[name]
    header = byte_level_header("qwen2", *byte_level_vocabulary())
    metadata = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(UnsupportedModel, match=message):
        tokenizer_files(replace(header, metadata={**header.metadata, **metadata}))


@pytest.mark.parametrize("scores", [[], [0.0], [float("nan")] * 3])
def test_broken_scores_are_refused(scores: list[float]) -> None:
    header = header_of("llama", model="llama", tokens=["a", "b", "ab"], scores=scores)
    with pytest.raises(UnsupportedModel, match=r"ggml.scores .* must be a number for each token"):
        tokenizer_files(header)


def test_a_file_without_a_tokenizer_has_no_files() -> None:
    assert tokenizer_files(header_of("llama")) == {}
    assert tokenizer_files(header_of("llama", model="none")) == {}


@pytest.mark.long
@pytest.mark.processes
def test_the_real_file(tmp_path: Path) -> None:
    """SmolLM2's, in which digits are apart before all else: transformers' reader of GGUF does not
    know that, so it gets the rule."""
    path = gguf_path()
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    plain = [each for each in MANY if not any(letter.isdigit() for letter in each)]
    ours = ours_of(read_header(path), tmp_path)
    check_same(ours, reference, plain)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
    )
    check_same(ours, reference)
    said = [{"role": "user", "content": "Hi"}]
    expected = reference.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert ours.hf.apply_chat_template(said, tokenize=False, add_generation_prompt=True) == expected
    assert ours.specials == reference.special_tokens_map
