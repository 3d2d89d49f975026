"""The embeddings of pictures that a backend holds, the tower that makes them, and their way to
other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from inference_svc.adapters.targets import AppliedTargets
from inference_svc.backends.arena import Arena
from inference_svc.backends.lora_step import launch_tile, plan_tile
from inference_svc.core import BASE_SLOT, BatchRow
from inference_svc.model.checkpoint.weights import ModelWeights, Projections
from inference_svc.model.description import Decoder, Pictures
from inference_svc.model.inputs import PlacedRows
from inference_svc.model.layers import TorchLinear, TorchProjections
from inference_svc.model.sharding.exchange import Exchange, StagedExchange
from inference_svc.model.sharding.pictures import reaches_stages, takes_pictures
from inference_svc.model.tower import Encoding, TorchTower, Tower
from inference_svc.pictures.prompt import PictureKey, PictureWork, PromptPicture
from inference_svc.pictures.sizes import MAX_SLICE
from kernels.lora.plan import LoraContents
from kernels.streams import Stream

MakeTower: TypeAlias = Callable[[Pictures, ModelWeights[Any], Arena, AppliedTargets], Tower[Any]]
"""Makes a tower, whose weights adapters in the arena change."""


class TowerMaker(NamedTuple):
    """Makes a tower of weights whose parameters `projections` makes."""

    projections: Callable[[], Projections[Any]]
    make: MakeTower


def _make_torch_tower(
    pictures: Pictures, weights: ModelWeights[TorchLinear], arena: Arena, targets: AppliedTargets
) -> TorchTower:
    """See `MakeTower`."""
    lora_at = partial(plan_tile, arena=arena, targets=targets)
    every = LoraContents.everything(arena.table)
    # Kernels differ by whether an adapter has vectors, and whether it is a sum.
    kinds = product((False, True), sorted({False, every.has_mixes}))
    any_loras = (
        launch_tile(every._replace(has_vectors=has_vectors, has_mixes=is_mix), arena, targets)
        for has_vectors, is_mix in kinds
    )
    return TorchTower(pictures, weights, lora_at, arena.device, (None, *any_loras))


IN_TORCH = TowerMaker(TorchProjections, _make_torch_tower)


class PictureRows:
    """Embeddings by picture, finished or begun, as the scheduler decides. `read_tower` reads the
    tower, which may be freed and read again; `stream` has its work."""

    def __init__(
        self, pictures: Pictures, read_tower: Callable[[], Tower[Any]], stream: Stream
    ) -> None:
        self._pictures = pictures
        self._watch = stream.stopwatch()
        self._read_tower = read_tower
        self._tower: Tower[Any] | None = read_tower()
        self.units = self.tower.order
        """The units that works count."""
        self._encodings: dict[PictureKey, Encoding] = {}

    @property
    def tower(self) -> Tower[Any]:
        assert self._tower is not None, "the weights are freed"
        return self._tower

    @property
    def weights(self) -> ModelWeights[Any]:
        """The tower's and its connector's."""
        return self.tower.weights

    @property
    def weights_bytes(self) -> int:
        return 0 if self._tower is None else self._tower.weights.num_bytes

    def warm_up(self) -> None:
        """Compiles the kernels of a tower in torch, for pictures of the base and of any adapter."""
        assert isinstance(self.tower, TorchTower)
        self.tower.warm_up()

    @property
    def workspace_bytes(self) -> int:
        """The memory that the tower computes in."""
        return 0 if self._tower is None else self._tower.workspace_bytes

    @property
    def num_bytes(self) -> int:
        """The memory of all embeddings."""
        return sum(each.rows.nbytes for each in self._encodings.values())

    def apply(self, work: PictureWork) -> None:
        """Does a step's work, or launches it on a device."""
        self._watch.start()
        try:
            tower = self.tower
            for key in work.dropped:
                self._encodings.pop(key, None)
            for key, picture, num_units, slot in work.encodes:
                encoding = self._encoding(key, picture)
                tower.go_on(encoding, picture.pixels.view, num_units, slot)
        finally:
            self._watch.stop()

    def seconds(self) -> float:
        """Waits for the work of the last `apply`; returns the seconds that it took."""
        return self._watch.seconds()

    def _encoding(self, key: PictureKey, picture: PromptPicture) -> Encoding:
        """Returns a picture's embeddings as they are, and begins them if they are not there."""
        if key not in self._encodings:
            self._encodings[key] = self.tower.begin(picture.tile, picture.num_tiles)
        return self._encodings[key]

    def _finished(self, key: PictureKey, picture: PromptPicture, slot: int) -> Tensor:
        """Returns all of a picture's embeddings, which are there unless their work has failed."""
        encoding = self._encoding(key, picture)
        while not encoding.is_done:
            self.tower.go_on(encoding, picture.pixels.view, MAX_SLICE, slot)
        return encoding.rows

    def placed(self, rows: Sequence[BatchRow]) -> tuple[PlacedRows, ...]:
        """Returns the embeddings of the tokens of these rows that stand for pictures."""
        found: list[PlacedRows] = []
        first = 0
        for row in rows:
            if row.sequence.request.pictures:
                found += self._of_row(row, first - row.start)
            first += row.num_tokens
        return tuple(found)

    def _of_row(self, row: BatchRow, offset: int) -> Iterator[PlacedRows]:
        """Yields a row's; the position p of its sequence is the step's token `offset` + p."""
        sequence = row.sequence
        for index, picture in enumerate(sequence.request.pictures):
            # Most rows of a conversation are behind all its pictures.
            if picture.end <= row.start:
                continue
            place = 0
            for run in picture.runs:
                start = max(run.start, row.start)
                end = min(run.end, row.start + row.num_tokens)
                if start < end:
                    assert end == run.end or not self._pictures.are_mutual, "a picture is cut"
                    key = sequence.held_pictures[index]
                    rows = self._finished(key, picture, row.slot if key.adapter else BASE_SLOT)
                    first = place + start - run.start
                    yield PlacedRows(offset + start, rows[first : first + end - start])
                place += run.end - run.start

    def free(self, *, weights: bool) -> None:
        """Frees all embeddings, and, if asked, the tower."""
        self._encodings.clear()
        if weights:
            self._tower = None

    def restore(self) -> None:
        """Reads the tower again. Raises as `read_tower` does."""
        if self._tower is None:
            self._tower = self._read_tower()
            assert self._tower.order == self.units, "works count as before"


def mutual_of(
    pictures: Pictures | None, tokens: Iterable[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Returns the step's tokens [start, end) that see each other: these, each of which are a
    picture's, if the model's do."""
    return tuple(tokens) if pictures is not None and pictures.are_mutual else ()


def hand_out(placed: Iterable[PlacedRows], decoder: Decoder, exchange: Exchange) -> None:
    """Hands a step's embeddings to the other ranks that compute with them, all at once, because
    each broadcast has its own delay. The first rank of all calls it, and others call `take_in`."""
    parts = [each.rows for each in placed]
    broadcast = _broadcast_of(decoder, exchange) if parts else None
    if broadcast is not None:
        broadcast(parts[0] if len(parts) == 1 else torch.cat(parts))


def take_in(
    tokens: Sequence[tuple[int, int]],
    decoder: Decoder,
    exchange: Exchange | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[PlacedRows, ...]:
    """Returns the embeddings that the first rank hands out, of the step's tokens [start, end); none
    on a rank that computes with none."""
    if not tokens:
        return ()
    broadcast = None if exchange is None else _broadcast_of(decoder, exchange)
    if broadcast is None or decoder.pictures is None:
        return ()
    counts = [end - start for start, end in tokens]
    rows = torch.empty(sum(counts), decoder.pictures.row_size, dtype=dtype, device=device)
    broadcast(rows)
    parts = zip(tokens, rows.split(counts), strict=True)
    return tuple(PlacedRows(start, part) for (start, _), part in parts)


def _broadcast_of(decoder: Decoder, exchange: Exchange) -> Callable[[Tensor], None] | None:
    """Returns the broadcast of a step's embeddings in which this rank takes part: of the ranks of
    the first stage, or of all, if another stage takes in the ones of taps."""
    if reaches_stages(decoder):
        assert isinstance(exchange, StagedExchange)
        return exchange.broadcast_stages
    return exchange.broadcast if takes_pictures(decoder) and decoder.rank is not None else None


def handed_bytes(decoder: Decoder, max_tokens: int, dtype: torch.dtype) -> int:
    """Returns the memory of the embeddings that go from rank to rank, of a step of so many tokens:
    `take_in` returns them, and `hand_out` lays them side by side."""
    is_shared = takes_pictures(decoder) and decoder.rank is not None
    if decoder.pictures is None or not (is_shared or reaches_stages(decoder)):
        return 0
    return max_tokens * decoder.pictures.row_size * dtype.itemsize
