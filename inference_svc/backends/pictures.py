"""The embeddings of pictures that a backend holds, and the tower that makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from inference_svc.adapters.targets import AppliedTargets
from inference_svc.backends.arena import Arena
from inference_svc.backends.lora_step import launch_tile, plan_tile
from inference_svc.core import BASE_SLOT, BatchRow
from inference_svc.model.checkpoint.weights import ModelWeights, Projections
from inference_svc.model.description import Pictures
from inference_svc.model.inputs import PlacedRows
from inference_svc.model.layers import TorchLinear, TorchProjections
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

    def mutual(self, placed: Sequence[PlacedRows]) -> tuple[tuple[int, int], ...]:
        """Returns the step's tokens [start, end) that see each other: those of each picture, where
        the model's do."""
        if not self._pictures.are_mutual:
            return ()
        return tuple((each.start, each.start + len(each.rows)) for each in placed)

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
