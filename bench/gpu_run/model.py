"""The model under measurement, with random weights and adapters, and its steps."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu_run.context import Context
from contract.images.header import ImageHeader, Segment
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Target, TargetKind
from inference_svc import core
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.adapters.memory.resident import Resident
from inference_svc.adapters.memory.tiers import HostTier, TableWrite
from inference_svc.adapters.targets import applied_targets, build_layout
from inference_svc.backends.arena import Arena
from inference_svc.backends.base import Logits
from inference_svc.backends.cuda.backend import CudaBackend
from inference_svc.backends.cuda.graphs import CudaRecorder
from inference_svc.backends.cuda.steps import StepLimits
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.weights import ModelWeights, ones
from inference_svc.model.description import Decoder, ExpertsProjection, Norm, Projection
from inference_svc.model.kv_caches import KVCaches, kv_page_bytes
from inference_svc.model.layers import Linear, TorchLinear
from inference_svc.model.operations import Scalar, Table, WeightSpec
from inference_svc.model.sharding.exchange import Exchange
from inference_svc.model.transformer import Transformer
from kernels.elementwise import NormWeight
from kernels.lora import TableEntry

MAX_RANK = 64
"""The default of the service, which sets the size of the kernels' workspace."""
NEW_TOKENS = 64
"""Minimum room of a sequence for decoded tokens."""
KV_SHARE = 0.6
"""Maximum share of the device's free memory for pages."""
STD = 0.02
SCALAR = 0.75
"""Factor of the residual stream, for layers with their own scalar."""


def read_description(config: dict[str, Any], processor: dict[str, Any] | None = None) -> Decoder:
    """Returns the description of a model of this config, which reads pictures if there is the
    config of a `processor`."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        if processor is not None:
            Path(folder, "preprocessor_config.json").write_text(json.dumps(processor))
        return load_description(Path(folder), with_pictures=processor is not None)


def random_transformer(
    decoder: Decoder,
    dtype: torch.dtype,
    device: torch.device,
    *,
    shares_layers: bool,
    exchange: Exchange | None = None,
) -> Transformer:
    """Makes a model with random weights; see `random_weights`. The decoder is a rank's part if
    there is an `exchange`."""
    weights = random_weights(decoder, dtype, device, shares_layers=shares_layers)
    return Transformer(decoder, weights, exchange)


def random_weights(
    decoder: Decoder, dtype: torch.dtype, device: torch.device, *, shares_layers: bool
) -> ModelWeights[TorchLinear]:
    """Makes random weights. With `shares_layers`, layers of the same shape share theirs, so that
    many processes have room. A tied head has its own memory, because a step reads as much."""
    num_bytes = 0

    def random(num_rows: int, size: int) -> Tensor:
        nonlocal num_bytes
        made = torch.empty(num_rows, size, dtype=dtype, device=device)
        num_bytes += made.nbytes
        return made.normal_(std=size**-0.5)

    def linear(each: Projection | ExpertsProjection) -> Linear:
        bias = random(1, each.num_rows)[0] if each.has_bias else None
        return Linear(random(each.num_rows, each.in_features), bias)

    def make(spec: WeightSpec) -> Tensor | Linear | NormWeight | float:
        if isinstance(spec, Norm):
            made = ones(spec, dtype, device)
            return made._replace(bias=torch.zeros_like(made.weight)) if spec.has_bias else made
        if isinstance(spec, Projection | ExpertsProjection):
            return linear(spec)
        if isinstance(spec, Table):
            return random(spec.num_rows, spec.size)
        return SCALAR if isinstance(spec, Scalar) else torch.randn(spec.size, device=device)

    weights: ModelWeights[TorchLinear] = ModelWeights.made(
        decoder, functools.cache(make) if shares_layers else make, dtype
    )
    return replace(weights, num_bytes=num_bytes)


def tables(weights: ModelWeights[TorchLinear]) -> list[Tensor]:
    """Returns the tables by token, from which a step reads only rows."""
    return list(weights.tables.values())


def read_weights_bytes(weights: ModelWeights[TorchLinear]) -> int:
    """Returns the bytes of the weights that a step reads completely."""
    return weights.num_bytes - sum(table.nbytes for table in tables(weights))


def context_bytes(decoder: Decoder, num_tokens: int, item_bytes: int) -> int:
    """Returns the bytes of keys and values that a row with `num_tokens` tokens of context reads, in
    all layers, within their windows."""
    return item_bytes * sum(
        2 * each.kv_size * min(num_tokens, each.window or num_tokens) for each in decoder.attentions
    )


def make_arena(
    layout: ModelLayout, num_bytes: int, num_adapters: int, rank: int, device: torch.device
) -> Arena:
    """Returns an arena whose table has adapters of `rank` on every dense projection of the layers;
    all of them point to its first bytes."""
    arena = Arena(layout, num_bytes, max(1, num_adapters), rank, device)
    entries = [
        TableEntry(index, 0, 0, rank, target.in_features, target.out_features)
        for index, target in enumerate(layout.targets)
        if is_adapted(target)
    ]
    for slot in range(num_adapters):
        arena.table.set_row(slot, entries)
    return arena


def is_adapted(target: Target) -> bool:
    """Returns whether these adapters change a target."""
    return target.layer is not None and target.kind is not TargetKind.EXPERTS


def image_header(layout: ModelLayout, digest: str, rank: int) -> ImageHeader:
    """Returns the header of an adapter of `rank` on every dense projection of the layers."""
    segments, end = [], 0
    for index, target in enumerate(layout.targets):
        if not is_adapted(target):
            continue
        for kind, features in (
            (SegmentKind.A, target.in_features),
            (SegmentKind.B, target.out_features),
        ):
            length = rank * features * layout.dtype.itemsize
            segments.append(Segment(index, kind, rank, end, length))
            end += -(-length // 256) * 256
    return ImageHeader(digest, digest, "", 1, end, tuple(segments))


@dataclass(frozen=True)
class Loadable:
    """An adapter in host memory, and its place on the device."""

    host: Resident
    resident: Resident


class StepTimes(NamedTuple):
    """Seconds of the whole step up to its tokens, and of the host's part until all of it is
    queued."""

    whole: float
    host: float


class BenchModel:
    """The model of `sizes.config`, with `num_adapters` resident adapters of `sizes.rank`.

    All values are random. The model has pages for `max_rows` rows of `max_context` tokens, or
    `num_pages`, as far as they fit. `host_images` of the adapters are also in host memory. With
    the config of a `processor` the model reads pictures.
    """

    def __init__(
        self,
        context: Context,
        *,
        num_adapters: int,
        max_rows: int,
        max_context: int,
        host_images: int = 0,
        config: dict[str, Any] | None = None,
        processor: dict[str, Any] | None = None,
        shares_layers: bool = False,
        num_pages: int | None = None,
    ) -> None:
        sizes, device = context.sizes, context.device
        self.context, self.sizes, self.device = context, sizes, device
        self.decoder = read_description(config or sizes.config, processor)
        self.transformer = random_transformer(
            self.decoder, sizes.dtype, device, shares_layers=shares_layers
        )
        self.layout = build_layout(self.decoder, "bench", sizes.dtype)
        headers = [
            image_header(self.layout, str(index), sizes.rank)
            for index in range(max(1, num_adapters))
        ]
        self.image_bytes = headers[0].total_bytes
        host_bytes, num_bytes = host_images * self.image_bytes, len(headers) * self.image_bytes
        self.host = HostTier(host_bytes) if host_bytes else None
        self.arena = Arena(self.layout, num_bytes, len(headers), MAX_RANK, device, host_bytes)
        self.arena.flat.normal_(std=STD)
        slots = Slots(num_bytes, len(headers))
        self.residents = [self._reserve(slots, header) for header in headers]
        if self.arena.slab is not None:
            # The device makes random values much faster.
            self.arena.slab.copy_(self.arena.flat.view(torch.uint8)[:host_bytes])
        self.arena.apply([TableWrite(resident) for resident in self.residents])
        self.loadable = [
            Loadable(self._reserve(self.host.slots, header), resident)
            for header, resident in zip(headers[:host_images], self.residents, strict=False)
            if self.host is not None
        ]
        pages = -(-(max_context + NEW_TOKENS) // sizes.page_size)
        self.limits = StepLimits(sizes.max_tokens, max_rows, pages)
        self.caches = self._allocate_caches(num_pages or max_rows * pages)

    def tower_weights(self) -> ModelWeights[TorchLinear]:
        """Makes random weights of the tower and its connector."""
        assert self.decoder.pictures is not None
        tower = self.decoder.pictures.tower
        return random_weights(tower, self.sizes.dtype, self.device, shares_layers=False)

    @staticmethod
    def _reserve(slots: Slots, header: ImageHeader) -> Resident:
        reserved = slots.reserve(header)
        assert reserved is not None
        return reserved.resident

    def _allocate_caches(self, num_pages: int) -> KVCaches:
        """Allocates as many pages as fit, up to `num_pages`, and one for padding."""
        g, shape = self.decoder, self.sizes
        page_bytes = kv_page_bytes(g, shape.page_size, shape.dtype)
        if self.device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self.device)
            num_pages = min(num_pages, int(free_bytes * KV_SHARE) // page_bytes)
        caches = KVCaches.allocate(
            g,
            num_pages=num_pages + 1,
            page_size=shape.page_size,
            dtype=shape.dtype,
            device=self.device,
        )
        for cache in caches.caches:
            cache.data.normal_()
        return caches

    def backend(self, *, is_captured: bool = True, is_warm: bool = True) -> CudaBackend:
        """Returns a backend that records its decode steps if `is_captured` and there is a device.
        With `is_warm` it compiles and records everything before the first step."""
        is_captured = is_captured and not self.context.is_emulated
        record = CudaRecorder() if is_captured else None
        targets = applied_targets(self.layout)
        backend = CudaBackend(
            self.transformer, self.caches, self.arena, targets, self.limits, record
        )
        if is_warm:
            backend.warm_up()
        return backend

    def sequences(self, contexts: Sequence[int], num_adapters: int) -> list[core.Sequence]:
        """Returns sequences of these numbers of tokens, with the first `num_adapters` adapters in
        turn, in the order of their slots. Each has its own pages as long as there are enough."""
        made, next_page, num_pages = [], 0, self.caches.num_pages - 1
        for row, length in enumerate(contexts):
            tokens = tuple((row + 7 * index) % 50 for index in range(length))
            sequence = core.Sequence(core.Request(str(row), tokens, core.SamplingParams()))
            needed = -(-(length + NEW_TOKENS) // self.sizes.page_size)
            sequence.page_ids = [(next_page + page) % num_pages for page in range(needed)]
            next_page += needed
            sequence.slot = row % num_adapters if num_adapters else core.BASE_SLOT
            made.append(sequence)
        return sorted(made, key=lambda sequence: sequence.slot)

    @torch.inference_mode()
    def decode_times(
        self,
        backend: CudaBackend,
        rows: Sequence[core.Sequence],
        num_steps: int,
        before_step: Callable[[], None] = lambda: None,
        warm_up_steps: int | None = None,
    ) -> list[StepTimes]:
        """Decodes `num_steps` steps of `rows` after a warm-up, and times each. When a sequence has
        no more room, its last token is decoded again."""
        if warm_up_steps is None:
            warm_up_steps = self.sizes.warm_up_steps
        found = []
        for index in range(warm_up_steps + num_steps):
            batch = core.Batch(
                tuple(core.BatchRow(s, len(s.token_ids) - 1, 1, samples=True) for s in rows)
            )
            tokens, times = self._step(backend, batch, before_step)
            if index < NEW_TOKENS - 1:
                for sequence, token in zip(rows, tokens, strict=True):
                    sequence.token_ids.append(token)
            if index >= warm_up_steps:
                found.append(times)
        return found

    @torch.inference_mode()
    def prompt_times(
        self, backend: CudaBackend, sequence: core.Sequence, others: Sequence[core.Sequence] = ()
    ) -> StepTimes:
        """Times a step of a whole prompt, together with `others`, which decode."""
        rows = [core.BatchRow(s, len(s.token_ids) - 1, 1, samples=True) for s in others]
        rows.append(core.BatchRow(sequence, 0, len(sequence.token_ids), samples=True))
        return self._step(backend, core.Batch(tuple(rows)), lambda: None)[1]

    def _step(
        self, backend: CudaBackend, batch: core.Batch, before_step: Callable[[], None]
    ) -> tuple[list[int], StepTimes]:
        timer = self.context.timer
        begin_s = timer.now_s()
        before_step()
        logits: Logits = backend.forward(backend.prepare(batch))
        queued_s = timer.now_s()
        assert logits.argmax is not None
        tokens = logits.argmax.tolist()
        end_s = timer.now_s()
        return tokens, StepTimes(end_s - begin_s, queued_s - begin_s)

    def read_bytes(self, contexts: Sequence[int], num_adapters: int) -> int:
        """Returns the bytes that a decode step of such rows must read: weights without the tables
        by token, keys and values, each adapter once."""
        item_bytes = self.sizes.dtype.itemsize
        read = sum(context_bytes(self.decoder, each, item_bytes) for each in contexts)
        read += read_weights_bytes(self.transformer.weights)
        return read + num_adapters * self.image_bytes

    def floor_us(self, contexts: Sequence[int], num_adapters: int) -> float:
        """Returns the minimum microseconds of a decode step of such rows: the larger of its bytes
        at the rate of reading, and its operations at the rate of a large product."""
        num_rows = len(contexts)
        flops = self.product_flops(num_rows, num_logits=num_rows)
        if num_adapters:
            flops += 2 * num_rows * self.image_bytes // self.sizes.dtype.itemsize
        return max(
            self.read_bytes(contexts, num_adapters) / self.context.bytes_per_us,
            flops / self.context.flops_per_us,
        )

    def product_flops(self, num_tokens: int, num_logits: int = 1) -> int:
        """Returns the operations of a step's products, without attention."""
        head = self.decoder.vocab_size * self.decoder.hidden_size
        item_bytes = self.sizes.dtype.itemsize
        elements = read_weights_bytes(self.transformer.weights) // item_bytes - head
        return 2 * (elements * num_tokens + head * num_logits)
