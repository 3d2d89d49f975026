"""Folders of tokenizers of the kinds that models bring, small, and with tokens added to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog . It didn't bark , did it ?",
    "  two  spaces\tand\nnewlines\n\n user: assistant: be kind",
    "naïve café, Größe, Ελληνικά, кириллица 日本語のテキスト 😀🎉",
]
SPECIALS = ["<s>", "</s>", "<unk>"]


def byte_level() -> Tokenizer:
    """As Qwen's and Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, _bpe_trainer(pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2's and Gemma's: BPE with byte tokens, spaces prepended to each text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    names = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(["▁the ▁qu ick ▁brown ▁fox ▁user ▁it"], trainer)
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = fields["added_tokens"][: len(SPECIALS)]
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """As T5's: the first word of a text, and it alone, begins with a space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=SPECIALS, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "unigram": unigram,
    "word_piece": word_piece,
}


def save(tokenizer: Tokenizer, folder: Path, chat_template: str = "", **config: Any) -> Path:
    """Saves the files as transformers 4 does; `config` are further fields, None to leave one
    out."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template or None,
        **config,
    }
    given = {key: value for key, value in fields.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return folder


def with_tokens(tokenizer: Tokenizer, tokens: Sequence[str | AddedToken]) -> Tokenizer:
    """Returns a copy that knows further tokens, special ones if they are texts."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    for token in tokens:
        if isinstance(token, str):
            copy.add_special_tokens([token])
        else:
            copy.add_tokens([token])
    return copy


def edit(
    folder: Path, change: Callable[[dict[str, Any]], Any], name: str = "tokenizer.json"
) -> None:
    """Changes the fields of one of a folder's files."""
    fields = json.loads((folder / name).read_text())
    change(fields)
    (folder / name).write_text(json.dumps(fields))


def _bpe_trainer(alphabet: Sequence[str]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIALS,
        initial_alphabet=list(alphabet),
        show_progress=False,
    )
