"""Runs one decode step as on a GPU, of Llama-3-8B's or another shape: its launches on `meta`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu_model.launches import META, Launch, launches
from bench.gpu_run.model import is_adapted, make_arena, random_transformer, read_description, tables
from bench.gpu_run.sizes import LLAMA_8B
from inference_svc import core
from inference_svc.adapters.targets import applied_targets, build_layout
from inference_svc.backends.cuda.backend import CudaBackend
from inference_svc.backends.cuda.steps import StepLimits
from inference_svc.model.description import Decoder, Rank
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.recurrent_states import RecurrentStates
from inference_svc.model.sharding.description import of_rank
from inference_svc.model.transformer import Transformer

DTYPE, PAGE_SIZE, MAX_LEN = torch.bfloat16, 16, 8192
ARENA_BYTES = 16 << 20


class Workload(NamedTuple):
    """A decode step whose rows are divided equally between adapters; with 0 adapters, all rows are
    the base model's."""

    rows: int
    adapters: int
    context: int = 512
    rank: int = 16


class Computed:
    """Replaces a recorded step: computes it once, and again."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute
        compute()

    def replay(self) -> None:
        self._compute()


def tensors_of(part: Any) -> Iterator[Tensor]:
    """Yields the tensors of weights, or of a part of them."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from tensors_of(each)
    elif isinstance(part, dict):
        yield from tensors_of(tuple(part.values()))
    elif is_dataclass(part):
        for field in fields(part):
            yield from tensors_of(getattr(part, field.name))


class Exchanged:
    """The `Exchange` of a rank that is alone: notes the bytes of each exchange, whose results have
    a shape, and no content."""

    name = "meta"
    seconds = 0.0

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.sums: list[int] = []
        """The bytes of each sum."""
        self.columns: list[int] = []
        """The bytes of all ranks' columns, by exchange."""

    def clear(self) -> None:
        self.sums.clear()
        self.columns.clear()

    def sum(self, x: Tensor) -> None:
        self.sums.append(x.nbytes)

    def side_by_side(self, x: Tensor) -> Tensor:
        found = x.new_empty(len(x), self._num_ranks * x.shape[1])
        self.columns.append(found.nbytes)
        return found

    def broadcast(self, x: Tensor) -> None:
        """Does nothing: workloads have no images."""


class Step(NamedTuple):
    """A step, and its launches in order. `adapter_targets` are the targets that adapters have;
    `sums` and `columns` the bytes that a rank exchanges with others, by exchange."""

    work: Workload
    decoder: Decoder
    launches: list[Launch]
    weights: list[Tensor]
    tables: list[Tensor]
    """Weights by token, from which a step reads only rows."""
    groups: list[str]
    """The group of each target, without its layer."""
    adapter_targets: frozenset[int]
    adapter_bytes: int
    item_bytes: int = DTYPE.itemsize
    sums: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()

    @property
    def num_adapter_rows(self) -> int:
        return self.work.rows if self.work.adapters else 0


@lru_cache(maxsize=1)
def _model(config: str, num_ranks: int) -> tuple[Transformer, Exchanged]:
    """Returns the first rank's part of the model of the text of a config.json. Steps do not change
    it."""
    decoder = of_rank(read_description(json.loads(config)), Rank(0, num_ranks))
    exchanged = Exchanged(num_ranks)
    exchange = exchanged if num_ranks > 1 else None
    made = random_transformer(decoder, DTYPE, META, shares_layers=False, exchange=exchange)
    return made, exchanged


def trace(work: Workload, config: Mapping[str, Any] = LLAMA_8B, num_ranks: int = 1) -> Step:
    """Launches the step of a config.json's model on `meta`, or of the first of several ranks."""
    transformer, exchanged = _model(json.dumps(dict(config)), num_ranks)
    decoder = transformer.description
    weights, layout = transformer.weights, build_layout(decoder, "bench", DTYPE)
    arena = make_arena(layout, ARENA_BYTES, work.adapters, work.rank, META)
    max_pages = MAX_LEN // PAGE_SIZE
    caches = KVCaches.allocate(
        decoder,
        num_pages=work.rows * max_pages + 1,
        page_size=PAGE_SIZE,
        dtype=DTYPE,
        device=META,
    )
    states = None
    if decoder.recurrences:
        states = RecurrentStates.allocate(decoder, 2 * work.rows, META)
    backend = CudaBackend(
        transformer,
        caches,
        arena,
        applied_targets(arena.layout),
        StepLimits(work.rows, work.rows, max_pages),
        Computed,
        states=states,
    )
    prepared = backend.prepare(_batch(work))
    exchanged.clear()  # which the step has been recorded with
    with launches() as noted:
        backend.forward(prepared)
    targets = [target for target in layout.targets if is_adapted(target)]
    features = sum(target.num_in + target.num_out for target in targets)
    return Step(
        work,
        decoder,
        noted.launches,
        list(tensors_of(weights)),
        tables(weights),
        [target.group.rpartition(".")[2] for target in layout.targets],
        frozenset(index for index, t in enumerate(layout.targets) if is_adapted(t)),
        work.rank * features * DTYPE.itemsize,
        sums=tuple(exchanged.sums),
        columns=tuple(exchanged.columns),
    )


def _batch(work: Workload) -> core.Batch:
    rows, num_pages = [], -(-work.context // PAGE_SIZE)
    for row in range(work.rows):
        request = core.Request(str(row), (0,) * work.context, core.SamplingParams())
        sequence = core.Sequence(request)
        sequence.page_ids = list(range(row * num_pages, (row + 1) * num_pages))
        sequence.num_computed = work.context - 1
        sequence.state_read, sequence.state_written = 2 * row + 1, 2 * row + 2
        sequence.slot = row * work.adapters // work.rows if work.adapters else core.BASE_SLOT
        rows.append(core.BatchRow(sequence, work.context - 1, 1, samples=True))
    return core.Batch(tuple(rows))
