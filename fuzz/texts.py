"""Tokenizers that strangers have made: the files that a store reads, and the extracts that a server
gets of them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from adapter_store.checkpoint.text_files.__main__ import read_files
from adapter_store.errors import InvalidAdapter
from fuzz.refusals import refused
from inference_svc.errors import TokenizerChanged
from inference_svc.text.adapter_tokenizer import BaseTokenizer
from inference_svc.text.template_process import TemplateProcesses
from inference_svc.text.tokenizer import Tokenizer
from servicekit.tokenizer_extract import (
    MAX_ADDED_TOKENS,
    MAX_EXTRACT_BYTES,
    InvalidTokenizer,
    TokenizerExtract,
)

SEPARATOR = b"\xff\xff\xff\xff"
NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
MAX_NEW_TOKENS = 64
"""How many tokens are added to a backend in an execution: each takes memory of the library."""


class _Files:
    """Files by name, in the place of a folder."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self._contents = contents
        self._name = ""

    def __truediv__(self, name: str) -> _Files:
        found = _Files(self._contents)
        found._name = name
        return found

    def read_bytes(self) -> bytes:
        return self._contents[self._name]


def fuzz_tokenizer(data: bytes) -> None:
    """tokenizer.json, tokenizer_config.json and special_tokens_map.json, separated, the last ones
    may be missing: they are refused, or have an extract, which reads as it was written."""
    files: dict[str, bytes] = dict(zip(NAMES, data.split(SEPARATOR), strict=False))
    folder: Any = _Files(files)
    with refused(InvalidTokenizer, InvalidAdapter):
        extract, template = read_files(folder, files)
        assert len(extract) <= MAX_EXTRACT_BYTES
        assert len(template) <= len(data)
        if extract:
            assert TokenizerExtract.from_bytes(extract).to_bytes() == extract


def fuzz_extract(data: bytes) -> None:
    """An extract as a store sends it: it is refused, or is of the model's own tokenizer and more
    tokens. These are found in texts, and texts are made of them."""
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
    """Returns nothing: no template is rendered."""
    nothing: Any = None
    return nothing


@cache
def _base() -> BaseTokenizer:
    """Returns a tokenizer of bytes, as models have, with two special tokens."""
    folder = base_folder(Path(tempfile.mkdtemp(prefix="loadout-fuzz-")))
    return BaseTokenizer(Tokenizer(folder), folder)


def base_folder(folder: Path) -> Path:
    """Writes the tokenizer's files."""
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
