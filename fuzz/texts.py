"""Fuzzes tokenizers made by strangers: the files that a store reads, and their extracts that a
server gets."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from adapter_store.checkpoint.text_files.task import read_files
from adapter_store.errors import InvalidAdapter
from contract.tokenizer_extract import (
    MAX_ADDED_TOKENS,
    MAX_EXTRACT_BYTES,
    InvalidTokenizer,
    TokenizerExtract,
)
from fuzz.refusals import refused
from inference_svc.errors import TokenizerChanged
from inference_svc.text.adapter_tokenizer import BaseTokenizer
from inference_svc.text.template_process import TemplateProcesses
from inference_svc.text.tokenizer import Tokenizer

SEPARATOR = b"\xff\xff\xff\xff"
NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
MAX_NEW_TOKENS = 64
"""Maximum tokens that an execution adds to a backend, because each takes the library's memory."""


def fuzz_tokenizer(data: bytes) -> None:
    """Reads tokenizer.json, tokenizer_config.json and special_tokens_map.json, with separators.

    The last files may be missing. The files are refused, or have an extract that reads as it was
    written.
    """
    files: dict[str, bytes] = dict(zip(NAMES, data.split(SEPARATOR), strict=False))
    with refused(InvalidTokenizer, InvalidAdapter):
        extract, template = read_files(files, files.__getitem__)
        assert len(extract) <= MAX_EXTRACT_BYTES
        assert len(template) <= len(data)
        if extract:
            assert TokenizerExtract.from_bytes(extract).to_bytes() == extract


def fuzz_extract(data: bytes) -> None:
    """Reads an extract from a store: it is refused, or extends the model's own tokenizer.

    The added tokens are found in texts and decoded to texts.
    """
    with refused(InvalidTokenizer, TokenizerChanged):
        extract = TokenizerExtract.from_bytes(data)
        again = TokenizerExtract.from_bytes(extract.to_bytes())
        assert again.digest == TokenizerExtract.from_bytes(again.to_bytes()).digest
        if len(extract.added_tokens) > MAX_NEW_TOKENS:
            return
        base = _base()
        text = base.with_adapter(extract, "", _no_templates())
        words = [each.content for each in extract.added_tokens]
        assert len(words) <= MAX_ADDED_TOKENS
        ids = text.backend.encode(" a ".join(words)).ids
        text.decode(ids)
        for each in (*ids, *(token.id for token in extract.added_tokens)):
            text.pieces.of(each)


def _no_templates() -> TemplateProcesses:
    """Returns None, because no template is rendered."""
    nothing: Any = None
    return nothing


@cache
def _base() -> BaseTokenizer:
    """Returns a byte-level tokenizer, as models have, with two special tokens."""
    folder = base_folder(Path(tempfile.mkdtemp(prefix="loadout-fuzz-")))
    return BaseTokenizer(Tokenizer(folder), folder)


def base_folder(folder: Path) -> Path:
    """Writes a tokenizer's files into a folder and returns it."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.save_pretrained(folder)
    return folder
