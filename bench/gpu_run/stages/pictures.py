"""Times pictures: the tower alone, the first token behind one, and decode steps beside others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from bench.gpu_run.context import Context, Found
from bench.gpu_run.model import BenchModel
from bench.results import median, percentile
from inference_svc import core
from inference_svc.adapters.targets import applied_to_pictures
from inference_svc.backends.cuda.backend import CudaBackend
from inference_svc.backends.pictures import IN_TORCH, PictureRows
from inference_svc.engine.policy.pictures.memory import Pace
from inference_svc.pictures.prompt import Encode, PictureKey, PictureWork, PromptPicture, Run
from inference_svc.pictures.sizes import Size
from servicekit.shared_memory import SharedBytes

NUM_BEFORE = NUM_BEHIND = 2
"""The tokens of a prompt around a picture's."""
PART_TOKENS = (256, 512, 1024, 2048, 4096)
"""The tokens of strips that are computed at once, of which servers choose MAX_SLICE."""
NUM_FIRST = 4
"""Prompts of one size: the fourth is recorded, and the last is replayed."""


def run(context: Context) -> Found:
    sizes = context.sizes
    model = BenchModel(
        context,
        num_adapters=1,
        max_rows=sizes.load_rows,
        max_context=max(sizes.contexts[0], sizes.max_tokens),
        num_pages=2 * sizes.load_rows * -(-sizes.contexts[0] // sizes.page_size)
        + sizes.max_tokens // sizes.page_size,
        config=sizes.reader,
        processor=sizes.reader_processor,
    )
    backend = model.backend(is_warm=False)
    backend.pictures = _rows(model)
    reader = _Reader(model, backend, Size(*sizes.picture))
    found: Found = {"alone": alone(reader)}
    context.save(found)
    found |= {"parts": parts(reader)}
    context.save(found)
    return found | {"decode": beside(reader)}


def _rows(model: BenchModel) -> PictureRows:
    pictures, arena = model.decoder.pictures, model.arena
    assert pictures is not None
    weights, targets = model.tower_weights(), applied_to_pictures(model.layout)
    tower = IN_TORCH.make(pictures, weights, arena, targets)
    return PictureRows(pictures, lambda: tower, arena.streams.compute)


class _Reader:
    """A model that reads pictures of one size, of which each is new."""

    def __init__(self, model: BenchModel, backend: CudaBackend, tile: Size) -> None:
        pictures = model.decoder.pictures
        assert pictures is not None
        self.model, self.backend, self.tile = model, backend, tile
        self.num_tokens = pictures.tiles.tokens(tile)
        self.num_patches = pictures.tiles.inner_tokens(tile)
        self.num_units = self.rows.units.count(tile)
        values = torch.randint(256, (tile.height * tile.width * 3,), dtype=torch.uint8)
        self._pixels = SharedBytes.of("loadout-pixels", values.numpy().tobytes())
        self._num_made = 0
        self._key: PictureKey | None = None
        self._num_left = 0

    @property
    def rows(self) -> PictureRows:
        assert self.backend.pictures is not None
        return self.backend.pictures

    def compute(self, num_units: int) -> int:
        """Computes so many units, or as many as the picture has left, of a new one when it has
        none. Returns how many."""
        dropped: tuple[PictureKey, ...] = ()
        if not self._num_left:
            dropped = () if self._key is None else (self._key,)
            self._num_made, self._num_left = self._num_made + 1, self.num_units
            self._key = PictureKey("", "", b"%d" % self._num_made)
        assert self._key is not None
        count = min(num_units, self._num_left)
        self._num_left -= count
        encode = Encode(self._key, self.picture, count, core.BASE_SLOT)
        self.rows.apply(PictureWork(dropped, (encode,)))
        return count

    @property
    def picture(self) -> PromptPicture:
        run = Run(NUM_BEFORE, NUM_BEFORE + self.num_tokens)
        return PromptPicture(b"%d" % self._num_made, self._pixels, self.tile, 1, (run,))

    def prompt(self) -> core.Sequence:
        """Returns a prompt with the picture that is computed."""
        length = NUM_BEFORE + self.num_tokens + NUM_BEHIND
        [made] = self.model.sequences([length], 0)
        made.request = replace(made.request, pictures=(self.picture,))
        assert self._key is not None
        made.held_pictures[0] = self._key
        return made


def alone(reader: _Reader) -> Found:
    """Computes pictures whole, each with its prompt; returns medians of the last ones. In the first
    ones libraries and kernels are loaded, and the prompt's step is recorded."""
    timer, towers, firsts, hosts = reader.model.context.timer, [], [], []
    replays = reader.backend.num_replays
    for _ in range(1 if reader.model.context.is_emulated else 2 * NUM_FIRST):
        timer.synchronize()
        begin_s = timer.now_s()
        reader.compute(reader.num_units)
        hosts.append(timer.now_s() - begin_s)
        reader.model.prompt_times(reader.backend, reader.prompt())
        firsts.append(timer.now_s() - begin_s)
        towers.append(reader.rows.seconds())
    kept = slice(NUM_FIRST if len(firsts) > NUM_FIRST else 0, None)
    return {
        "patches": reader.num_patches,
        "tokens": reader.num_tokens,
        "tower_ms": 1e3 * median(towers[kept]),
        "tower_host_ms": 1e3 * median(hosts[kept]),
        "first_token_ms": 1e3 * median(firsts[kept]),
        "replayed": reader.backend.num_replays - replays,
    }


def parts(reader: _Reader) -> list[Found]:
    """Computes pictures in parts of each size; returns the medians of their times. MAX_SLICE should
    be the smallest one after which the time hardly shrinks: memory and the largest prompt's step
    grow with it."""
    timer, tower = reader.model.context.timer, reader.rows.tower
    found: list[Found] = []
    chosen = tower.most_tokens
    try:
        for count in PART_TOKENS:
            tower.most_tokens = count
            seconds: list[float] = []
            for _ in range(1 if reader.model.context.is_emulated else NUM_FIRST):
                timer.synchronize()
                reader.compute(reader.num_units)
                seconds.append(reader.rows.seconds())
            found.append({"tokens": count, "tower_ms": 1e3 * median(seconds)})
    finally:
        tower.most_tokens = chosen
    return found


def beside(reader: _Reader) -> Found:
    """Times decode steps alone, and beside pictures, which take the share of the time of steps that
    a server gives them."""
    model, sizes = reader.model, reader.model.sizes
    rows = model.sequences([sizes.contexts[0]] * sizes.load_rows, 0)

    def times(before_step: Callable[[], None] = lambda: None) -> list[float]:
        found = model.decode_times(reader.backend, rows, sizes.picture_steps, before_step)
        return [each.whole for each in found]

    plain, pace = times(), Pace()
    pace.note_step(median(plain))
    counts: list[int] = []

    def some_units() -> None:
        if counts:  # of the step before, which has been waited for
            pace.note_pictures(counts[-1], reader.rows.seconds())
        counts.append(reader.compute(max(1, int(pace.beside))))

    with_pictures = times(some_units)
    p99 = percentile(with_pictures, 99) / percentile(plain, 99)
    return {
        "rows": sizes.load_rows,
        "alone_ms": _percentiles(plain),
        "beside_ms": _percentiles(with_pictures),
        "p99_ratio": p99,
        "units_per_step": sum(counts) / len(counts),
        "steps_per_picture": len(counts) * reader.num_units / sum(counts),
    }


def _percentiles(seconds: list[float]) -> Found:
    return {"p50": 1e3 * median(seconds), "p99": 1e3 * percentile(seconds, 99)}
