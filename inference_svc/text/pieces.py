"""The text of single tokens within a text, and its bytes."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple, Protocol

MAX_CACHED = 1 << 16


class Vocabulary(Protocol):
    """The part of a tokenizer that this needs."""

    @property
    def visible_ids(self) -> Container[int]: ...
    @property
    def byte_ids(self) -> Container[int]: ...
    @property
    def is_byte_level(self) -> bool: ...
    def name_of(self, token_id: int) -> str: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class Piece(NamedTuple):
    """One token; `text` has U+FFFD where `data` is a part of a character. `shown` are the bytes
    that it adds to a text: none for a special token, whose `text` is its name."""

    text: str
    data: bytes
    shown: bytes


def _byte_of_characters() -> dict[str, int]:
    """Returns the byte-level vocabularies' alphabet: bytes of printable Latin-1 are written as
    themselves, the others as the characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    written = {chr(byte): byte for byte in plain}
    return written | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_of_characters()


class AnyPieces(Protocol):
    def of(self, token_id: int) -> Piece: ...


class IdPieces:
    """Names tokens by their ids, as vLLM does where a request asks for that."""

    def __init__(self, pieces: AnyPieces) -> None:
        self._pieces = pieces

    def of(self, token_id: int) -> Piece:
        text = f"token_id:{token_id}"
        return Piece(text, text.encode(), self._pieces.of(token_id).shown)


class Pieces:
    """Finds pieces, and caches them. A vocabulary that differs from another in `changed_ids` only
    has the other one's pieces else."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        others: Pieces | None = None,
        changed_ids: Container[int] = frozenset(),
    ) -> None:
        self._vocabulary = vocabulary
        self._others = others
        self._changed_ids = changed_ids
        self._known: dict[int, Piece] = {}

    def of(self, token_id: int) -> Piece:
        """Returns the piece of a token; a special token's text is its name."""
        if self._others is not None and token_id not in self._changed_ids:
            return self._others.of(token_id)
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._find(token_id)
            if len(self._known) < MAX_CACHED:
                self._known[token_id] = piece
        return piece

    def _find(self, token_id: int) -> Piece:
        vocabulary = self._vocabulary
        name = vocabulary.name_of(token_id)
        if token_id not in vocabulary.visible_ids:
            return Piece(name, name.encode(), b"")
        data = self._bytes(token_id, name)
        if data is not None:
            return Piece(data.decode(errors="replace"), data, data)
        # Alone, or as the first, a token may lose its space; behind another, here itself, it has
        # its text within a text.
        alone = vocabulary.decode((token_id,))
        twice = vocabulary.decode((token_id, token_id))
        text = twice[len(alone) :] if twice.startswith(alone) else alone
        data = text.encode()
        return Piece(text, data, data)

    def _bytes(self, token_id: int, name: str) -> bytes | None:
        """Returns the bytes that the name spells; None if it spells none."""
        if token_id in self._vocabulary.byte_ids:
            return bytes([int(name[3:5], 16)])
        if self._vocabulary.is_byte_level and all(char in _BYTE_OF for char in name):
            return bytes(map(_BYTE_OF.__getitem__, name))
        return None
