"""Tiny tokenizers of the kinds that models bring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

CORPUS = [
    "the quick brown fox jumps over the lazy dog . It didn't bark , did it ?",
    "  two  spaces\tand\nnewlines\n\n ",
    "naïve café, Größe, Ελληνικά, кириллица",
    "日本語のテキスト、中文文本、한국어",
    "emoji 😀🎉👩‍👩‍👧 mixed 1234567890",
]
SPECIALS = ["<s>", "</s>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def unigram() -> Backend:
    """Metaspace with byte fallback: what is not in the vocabulary becomes <0xNN> tokens."""
    known = " abcdefghijklmnopqrstuvwxyz日本のé"
    pieces = [(piece, -5.0) for piece in ["▁the", "▁qu", "ing", "▁日本", "ow", "▁▁"]]
    pieces += [("▁" if char == " " else char, -8.0) for char in known]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocab = [("<unk>", -100.0), *((special, -100.0) for special in SPECIALS), *pieces]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIALS)
    return backend


def metaspace() -> Backend:
    """The decoder of T5 and of sentencepiece models without byte fallback."""
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIALS, "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def chars() -> Backend:
    vocab = {special: i for i, special in enumerate([*SPECIALS, "<unk>"])}
    for char in sorted(set("".join(CORPUS)) | set("abcdefghijklmnopqrstuvwxyz ABC.,")):
        vocab.setdefault(char, len(vocab))
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(
        [AddedToken(special, special=True, normalized=False) for special in SPECIALS]
    )
    return backend


KINDS = {"byte_level": byte_level, "unigram": unigram, "metaspace": metaspace, "chars": chars}


def save_tokenizer(
    backend: Backend, folder: Path, chat_template: str | list[dict[str, str]] = ""
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": True,
    }
    if chat_template:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


EOS = 1
"""The id of "</s>" in every tokenizer here."""
