"""Pictures of a prompt, and the work for them in a step: plain data. All but pixels pickles."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from inference_svc.pictures.sizes import Size
from servicekit.shared_memory import SharedBytes


class PictureKey(NamedTuple):
    """Says whose embeddings are equal: the seed that separates prefix caches, the key of the
    adapter that changes them, "" for none, and the picture's digest."""

    cache_seed: str
    adapter: Hashable
    digest: bytes


class Frame(NamedTuple):
    """The marks before and behind a picture's tokens in a prompt, and the text `around` these. A
    chat template writes the first mark alone, which stands for the picture, if it
    `replaces_begin`; else the token of pictures alone."""

    begin_id: int
    end_id: int
    around: str = ""
    replaces_begin: bool = True


class Run(NamedTuple):
    """Neighbouring tokens of a prompt that stand for a part of a picture: [start, end)."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PromptPicture:
    """A picture of a prompt: uint8 [num_tiles, height, width, 3], which requests of one prompt
    share, of tiles of the size `tile`. Its embeddings are of the tokens of its `runs`, in order.
    Pictures that are computed alike have the same `digest`, a sha256."""

    digest: bytes
    pixels: SharedBytes = field(repr=False)
    tile: Size
    num_tiles: int
    runs: tuple[Run, ...]

    @property
    def start(self) -> int:
        return self.runs[0].start

    @property
    def end(self) -> int:
        return self.runs[-1].end

    @property
    def num_tokens(self) -> int:
        return sum(run.end - run.start for run in self.runs)


class Encode(NamedTuple):
    """Computes so many more units of a picture, see `TowerUnits`, with the adapter at `slot`; -1:
    none."""

    key: PictureKey
    picture: PromptPicture
    num_units: int
    slot: int


class PictureWork(NamedTuple):
    """The work of a step, before its rows: embeddings that are `dropped`, and `encodes`, whose cost
    is in tokens of a prompt."""

    dropped: tuple[PictureKey, ...] = ()
    encodes: tuple[Encode, ...] = ()
    cost: float = 0.0


NO_WORK = PictureWork()
