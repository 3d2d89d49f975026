"""Tiny decoders with random weights, adapters for them, and batches of their steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contract.images.targets import TargetKind
from inference_svc import core
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.targets import applied_targets, build_layout
from inference_svc.backends.arena import Arena
from inference_svc.backends.base import Logits
from inference_svc.backends.cuda.backend import CudaBackend
from inference_svc.backends.cuda.steps import StepLimits
from inference_svc.backends.torch import TorchBackend
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.weights import ModelWeights, P, Projections, ones
from inference_svc.model.description import (
    EMBED_TOKENS,
    LM_HEAD,
    Decoder,
    ExpertsProjection,
    Norm,
    NormKind,
    Projection,
)
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import TorchProjections
from inference_svc.model.operations import Scalar, Table, WeightSpec
from inference_svc.model.recurrent_states import RecurrentStates
from inference_svc.model.transformer import Transformer
from inference_svc.results.base import Wanted
from inference_svc.results.pooling import PoolingOption
from kernels.elementwise import NormWeight
from kernels.lora import OutputVectors, ReplacedWeight, TableEntry, TableRow
from kernels.lora.rows import ABSENT, GRANULE_BYTES
from kernels.lora.table import MixPart
from kernels.quantised import WeightFormat
from tests.support.gpu.features import FEATURES, SHAPE
from tests.support.inference.results import wanted_of

PAGE_SIZE, NUM_PAGES, MAX_PAGES, MAX_TOKENS, MAX_ROWS = 4, 60, 20, 70, 6
NUM_SLOTS, MAX_RANK, MAX_ADDED = 3, 4, 2
NUM_STATES, BORDERS = 12, ((12, 11), (40, 12))
"""States of five sequences, of which each has two, and the borders, with their slots, at which the
longest one leaves its state."""
SUM = NUM_SLOTS
"""The slot of a sum: of all three, or of the first two, if they have more than A and B."""
FIRST_OF_EXPERTS = 2048
"""The granule from which on adapters of experts lie."""
FULL_PRECISION = 1e-3
"""The tolerance up to which values are of fp32."""
MOST_TIMES = 4
"""The largest error in bf16, in units of the tolerance for all errors together."""
OWN_ROWS, ROWS_SLOT = (0, 7, 21, 63), 1
"""Tokens of which this adapter has rows of its own, if they have more than A and B."""


def make_decoder(name: str, folder: Path, **changes: Any) -> Decoder:
    (folder / "config.json").write_text(json.dumps(SHAPE | FEATURES[name] | changes))
    return load_description(folder)


def random_weights(
    decoder: Decoder,
    dtype: torch.dtype,
    generator: torch.Generator,
    projections: Projections[P],
) -> ModelWeights[P]:
    """The same values in any backend's `projections`."""

    def random(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return values.to(dtype)

    def norm(each: Norm) -> NormWeight:
        if not each.module:
            return ones(each, dtype, torch.device("cpu"))
        weight = torch.rand(each.size, generator=generator) + 0.5
        is_centred = each.kind is NormKind.LAYER
        bias = torch.randn(each.size, generator=generator) if each.has_bias else None
        weight = weight if each.is_wide else weight.to(dtype)
        return NormWeight(weight, each.eps, is_centred, bias=bias)

    def projection(spec: Projection | ExpertsProjection) -> P:
        made = projections.empty(
            spec.parts,
            spec.in_features,
            has_bias=spec.has_bias,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        weight, first = random(spec.num_rows, spec.in_features), 0
        bias = random(spec.num_rows) if spec.has_bias else None
        for part in spec.parts:  # each is put by itself: they have several formats
            end = first + part.num_rows
            made.put_rows(first, weight[first:end])
            if bias is not None:
                made.put_bias(first, bias[first:end])
            first = end
        return made

    def make(spec: WeightSpec) -> Tensor | P | NormWeight | float:
        if isinstance(spec, Norm):
            return norm(spec)
        if isinstance(spec, Projection | ExpertsProjection):
            return projection(spec)
        if isinstance(spec, Table):
            return random(spec.num_rows, spec.size)
        return 0.75 if isinstance(spec, Scalar) else torch.randn(spec.size, generator=generator)

    return ModelWeights.made(decoder, make, dtype)


def moved(weights: Any, device: torch.device) -> Any:
    """Returns weights, or a part of them, on `device`."""
    if isinstance(weights, Tensor):
        return weights.to(device)
    if isinstance(weights, NormWeight):
        return weights._replace(weight=weights.weight.to(device), bias=moved(weights.bias, device))
    if isinstance(weights, dict):
        return {key: moved(each, device) for key, each in weights.items()}
    if isinstance(weights, tuple):
        return tuple(moved(each, device) for each in weights)
    if is_dataclass(weights) and not isinstance(weights, WeightFormat):
        parts = {f.name: moved(getattr(weights, f.name), device) for f in fields(weights)}
        return replace(weights, **parts)
    return weights


@dataclass(frozen=True)
class Model:
    """A decoder on one device, with an arena of NUM_SLOTS adapters, and a sum of them."""

    transformer: Transformer
    arena: Arena
    exchange: Any = None

    @classmethod
    def make(
        cls,
        decoder: Decoder,
        dtype: torch.dtype,
        device: torch.device,
        arena_bytes: int = 1 << 20,
        exchange: Any = None,
        *,
        is_fully_sharded: bool = False,
    ) -> Model:
        """The same values on every device. With an `exchange`, the decoder is a rank's part."""
        generator = torch.Generator().manual_seed(0)
        weights = random_weights(decoder, dtype, generator, TorchProjections())
        layout = build_layout(decoder, "model", dtype, is_fully_sharded=is_fully_sharded)
        arena = Arena(layout, arena_bytes, NUM_SLOTS, MAX_RANK, device, num_mixes=MAX_ROWS)
        values = torch.randn(arena.flat.shape, generator=generator) * 0.1
        arena.flat.copy_(values.to(dtype))
        placing = Placing(arena, FIRST_OF_EXPERTS)
        for slot in range(NUM_SLOTS):
            arena.table.set_row(slot, entries_of(layout, slot, placing))
        arena.table.set_mix(SUM, [MixPart(2, 0.5), MixPart(0, -1.0), MixPart(1, 0.25)])
        return cls(Transformer(decoder, moved(weights, device), exchange), arena, exchange)

    def with_kinds(self, num_added: int) -> Model:
        """Gives the adapters more than A and B: slot 0 vectors of every target, with A and B or
        without; 1 rows of the embedding and the head, of `num_added` tokens behind the vocabulary,
        too; 2 whole weights; both have norms."""
        placing, table, layout = Placing(self.arena), self.arena.table, self.arena.layout
        sizes = {index: (each.num_in, each.num_out) for index, each in enumerate(layout.targets)}
        vectors = {
            index: OutputVectors(
                placing.random(num_out, dtype=torch.float32),
                placing.random(num_out, dtype=torch.float32),
                # Without A and B a target has nothing but a bias in the place of the base's.
                placing.random(num_out) if layout.targets[index].layer is not None else ABSENT,
            )
            for index, (_, num_out) in sizes.items()
            if index in table.adapters[0].target_set
            and layout.targets[index].kind is not TargetKind.EXPERTS
        }
        bare = next(
            index
            for index, each in enumerate(layout.targets)
            if index % 2 and each.kind is TargetKind.LINEAR and each.layer is not None
        )
        vectors[bare] = OutputVectors(base_bias=placing.random(sizes[bare][1]))
        table.set_row(0, table.adapters[0].with_others(vectors, sizes, ()))
        vocab, hidden = sizes[0]
        ids = [*OWN_ROWS, *range(vocab, vocab + num_added)]
        rows, whole = [], []
        for name, weight in layout.weight_indices.items():
            if name in (EMBED_TOKENS, LM_HEAD):
                places = (placing.ids(ids), placing.random(len(ids), hidden))
                rows.append(ReplacedWeight(weight, ABSENT, *places, len(ids)))
                whole.append(ReplacedWeight(weight, placing.random(vocab, hidden)))
            else:
                size = layout.all_targets[layout.weights[weight]].out_features
                whole.append(ReplacedWeight(weight, placing.random(size)))
                rows.append(ReplacedWeight(weight, placing.random(size)))
        # What adds tokens has no A of the embedding.
        bare_row = TableRow.of(entries_of(layout, ROWS_SLOT, Placing(self.arena, 3072))[1:])
        table.set_row(ROWS_SLOT, bare_row.with_others({}, sizes, tuple(rows)))
        table.set_row(2, table.adapters[2].with_others({}, sizes, tuple(whole)))
        table.set_mix(SUM, [MixPart(1, 1.0), MixPart(0, 1.0)])
        return self

    def caches(self) -> KVCaches:
        return KVCaches.allocate(
            self.transformer.description,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            dtype=self.arena.flat.dtype,
            device=self.arena.device,
        )

    def states(self) -> RecurrentStates | None:
        """Returns None for a decoder without recurrent layers."""
        decoder = self.transformer.description
        if not decoder.recurrences:
            return None
        return RecurrentStates.allocate(decoder, NUM_STATES, self.arena.device)

    def plain(self, max_added_tokens: int = 0) -> TorchBackend:
        targets = applied_targets(self.arena.layout, (), max_added_tokens)
        return TorchBackend(
            self.transformer,
            self.caches(),
            self.arena,
            targets,
            MAX_ROWS,
            states=self.states(),
        )

    def fixed(
        self,
        record: Callable[..., Any] | None,
        *,
        is_warm: bool = True,
        max_tokens: int = MAX_TOKENS,
        caches: KVCaches | None = None,
        transformer: Any = None,
        lora_targets: tuple[str, ...] = (),
        max_added_tokens: int = 0,
    ) -> CudaBackend:
        """`is_warm`: kernels are compiled, and steps recorded, before the first one."""
        backend = CudaBackend(
            transformer or self.transformer,
            caches or self.caches(),
            self.arena,
            applied_targets(self.arena.layout, lora_targets, max_added_tokens),
            StepLimits(max_tokens, MAX_ROWS, MAX_PAGES),
            record,
            states=self.states(),
            exchange=self.exchange,
        )
        if is_warm:
            backend.warm_up()
        return backend


def entries_of(layout: ModelLayout, slot: int, placing: Placing) -> list[TableEntry]:
    """Returns A and B of the embedding and every other target; matrices may lie anywhere, one over
    another, but for those of experts, of which some have none."""
    entries = []
    rank = slot + 2 if slot + 2 <= MAX_RANK else 1
    for index, target in list(enumerate(layout.targets))[::2]:
        places, num_experts = (slot + index, slot + 2 * index), 0
        if target.kind is TargetKind.EXPERTS:
            num_experts = target.experts
            ranks = [rank - (expert + slot) % 3 for expert in range(num_experts)]
            ranks[slot] = 0
            of_a, of_b = (placing.segment(ranks, size) for size in (target.num_in, target.num_out))
            places = (of_a, of_b)
        entry = TableEntry(
            *(index, *places, rank, target.num_in, target.num_out),
            is_embedding=target.kind is TargetKind.EMBEDDING,
            num_experts=num_experts,
        )
        entries.append(entry)
    return entries


class Placing:
    """Puts values behind those that A and B lie among."""

    def __init__(self, arena: Arena, first: int = 1024) -> None:
        self._arena, self._granule = arena, first
        self._generator = torch.Generator().manual_seed(1)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        """Puts values from 0.5 to 1.5; returns their granule."""
        values = torch.rand(shape, generator=self._generator) + 0.5
        return self._put(values.to(dtype or self._arena.flat.dtype))

    def ids(self, ids: list[int]) -> int:
        return self._put(torch.tensor(ids, dtype=torch.int32))

    def segment(self, ranks: list[int], num_features: int) -> int:
        """Puts a matrix of each expert, behind the index that says where; returns its granule."""
        index = torch.zeros(len(ranks), 4, dtype=torch.int32)
        index[:, 2] = torch.tensor([1.0]).view(torch.int32)
        first = self._put(index)
        for row, rank in zip(index, ranks, strict=True):
            if rank > 0:
                values = torch.randn(rank, num_features, generator=self._generator) * 0.1
                row[0] = self._put(values.to(self._arena.flat.dtype)) - first
                row[1] = rank
        self._put(index, first)
        return first

    def _put(self, values: Tensor, place: int | None = None) -> int:
        found = self._granule if place is None else place
        if place is None:
            self._granule += -(-values.nbytes // GRANULE_BYTES)
        there = self._arena.flat.view(torch.uint8)[found * GRANULE_BYTES :][: values.nbytes]
        there.copy_(values.contiguous().view(-1).view(torch.uint8))
        return found


class Alone:
    """The exchange of the first of two ranks, whose other has terms of 0, and the same columns."""

    name = "nobody"
    seconds = 0.0

    def sum(self, x: Tensor) -> None:
        """Adds 0."""

    def side_by_side(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], dim=1)

    def broadcast(self, x: Tensor) -> None:
        """The other has it."""

    def agree(self, is_done: bool, /) -> bool:
        return is_done


class Eager:
    """Computes once, and anew at every replay: what a recording must equal."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute
        compute()

    def replay(self) -> None:
        self._compute()


def _sequence(
    length: int, first_page: int, slot: int, first_token: int, prompt_logprobs: int | None = None
) -> core.Sequence:
    tokens = tuple((7 * index + 3 * first_page) % 64 for index in range(length))
    if slot == ROWS_SLOT and first_token:
        tokens = (first_token, *tokens[1:])
    wanted = wanted_of(prompt_logprobs=prompt_logprobs, return_routed_experts=True)
    request = core.Request(f"{first_page}", tokens, core.SamplingParams(), wanted=wanted)
    made = core.Sequence(request)
    made.page_ids = [first_page + page for page in range(-(-length // PAGE_SIZE))]
    made.slot = slot
    return made


def steps(
    slots: list[int], first_token: int = 0, prompt_logprobs: int | None = None
) -> list[core.Batch]:
    """A prompt in two parts beside others, then decodes of all, of some, and of one. Prompts for
    the adapter that may add tokens begin with `first_token`, if there is one."""
    lengths = [50, 9, 1, 22, 5]
    sequences = [
        _sequence(length, 15 * bool(index) + 8 * index, slot, first_token, prompt_logprobs)
        for index, (length, slot) in enumerate(zip(lengths, slots, strict=True))
    ]
    for index, sequence in enumerate(sequences):
        sequence.state_written = 2 * index + 1
    long, *others = sequences
    long.state_borders = list(BORDERS)
    first = [core.BatchRow(long, 0, 30, samples=False)]
    first += [core.BatchRow(s, 0, len(s.token_ids), samples=True) for s in others]
    batches = [first, [core.BatchRow(long, 30, 20, samples=True)]]
    for chosen in (sequences, sequences[1:4], sequences[:1], sequences):
        rows = []
        for s in chosen:
            s.token_ids.append(len(s.token_ids) % 64)
            if len(s.token_ids) > PAGE_SIZE * len(s.page_ids):
                s.page_ids.append(s.page_ids[-1] + 1)
            rows.append(core.BatchRow(s, len(s.token_ids) - 1, 1, samples=True))
        batches.append(rows)
    return [core.Batch(tuple(rows)) for rows in batches]


def settle(batch: core.Batch) -> None:
    """Notes that a step is computed: the next one reads the states that it has written."""
    for sequence, start, num_tokens, _ in batch.rows:
        sequence.num_computed = start + num_tokens
        before, sequence.state_read = sequence.state_read, sequence.state_written
        sequence.state_written = before or sequence.state_read + 1


@torch.inference_mode()
def run(backend: CudaBackend | TorchBackend, batches: list[core.Batch]) -> list[Logits]:
    """What each batch gives, where it lies; waits for nothing."""
    found = []
    for batch in batches:
        made = backend.forward(backend.prepare(batch))
        settle(batch)
        found.append(Logits(*(None if each is None else each.clone() for each in made)))
    return found


@torch.inference_mode()
def run_scored(backend: CudaBackend | TorchBackend, batches: list[core.Batch]) -> list[Logits]:
    """What scores the prompts of each batch."""
    found = []
    for batch in batches:
        inputs = backend.prepare(batch)
        backend.forward(inputs)
        slices = [made.logits.clone() for made in backend.score(inputs)]
        settle(batch)
        assert all(len(made) <= MAX_ROWS for made in slices)
        found.append(Logits(torch.cat(slices)))
    return found


@torch.inference_mode()
def run_pooled(backend: CudaBackend | TorchBackend, batches: list[core.Batch]) -> list[Logits]:
    """Returns the final hidden states of all tokens of each batch, as if they were logits."""
    found = []
    for batch in batches:
        for sequence, *_ in batch.rows:
            sequence.request = replace(sequence.request, wanted=Wanted((PoolingOption(),)))
            sequence.end_pooled = sequence.num_prompt
        rows = tuple(row._replace(samples=False) for row in batch.rows)
        inputs = backend.prepare(core.Batch(rows))
        backend.forward(inputs)
        assert not list(backend.score(inputs))
        slices = [made.states.clone() for made in backend.pool(inputs)]
        settle(batch)
        assert all(len(made) <= MAX_ROWS for made in slices)
        found.append(Logits(torch.cat(slices)))
    return found


def assert_close(
    wanted: list[Logits], got: list[Logits], tolerance: float, *, is_bfloat16: bool = False
) -> None:
    """Experts are the same where what is chosen by is not rounded. In bf16 errors grow with the
    largest numbers, and a few grow further: all of them together must be small."""
    for one, other in zip(wanted, got, strict=True):
        ours, theirs = other.values.cpu().float(), one.values.float()
        if not is_bfloat16:
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        elif theirs.numel():
            assert torch.equal(ours.isfinite(), theirs.isfinite())
            ours, theirs = ours[theirs.isfinite()], theirs[theirs.isfinite()]
            error, size = (float(x.square().mean().sqrt()) for x in (ours - theirs, theirs))
            assert error <= tolerance * max(1.0, size), (error, size)
            assert (ours - theirs).abs().max() <= MOST_TIMES * tolerance * max(1.0, size)
        if other.argmax is not None:
            assert torch.equal(other.argmax, other.values.argmax(dim=-1))
        assert (one.experts is None) == (other.experts is None)
        if one.experts is not None and other.experts is not None:
            assert one.experts.shape == other.experts.shape
            if tolerance <= FULL_PRECISION:
                assert torch.equal(one.experts.cpu(), other.experts.cpu())
