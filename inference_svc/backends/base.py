"""The interface of backends to the engine, and the allocations common to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.memory.extents import Extent
from inference_svc.adapters.memory.tiers import ResidencyChange
from inference_svc.adapters.pulls.registration import HostRegistrar
from inference_svc.adapters.targets import applied_to_pictures
from inference_svc.backends.arena import Arena
from inference_svc.backends.exchange import Meeting
from inference_svc.backends.magnitudes import Divided
from inference_svc.backends.pictures import IN_TORCH, PictureRows, TowerMaker
from inference_svc.backends.prompt_runs import ScoredRun
from inference_svc.backends.step_data import StepData
from inference_svc.core import Batch, BatchRow, EngineConfig, padding_pages
from inference_svc.errors import UnsupportedModel
from inference_svc.model.checkpoint.classifier import ClassifierHead
from inference_svc.model.checkpoint.files import weight_stamps
from inference_svc.model.checkpoint.weights import ModelWeights, Projections, load_weights
from inference_svc.model.description import Decoder
from inference_svc.model.inputs import PlacedRows
from inference_svc.model.kv_caches import KVCaches, kv_page_bytes, stored_dtype
from inference_svc.model.recurrent_states import RecurrentStates, num_slots, slot_bytes
from inference_svc.model.sharding.exchange import Exchange, StagedExchange
from inference_svc.model.sharding.pictures import has_tower
from inference_svc.results.routed_experts import ExpertsOption
from kernels.lora.plan import LoraContents
from kernels.quantised import WeightFormat

Inputs = TypeVar("Inputs")


class Backend(Protocol[Inputs]):
    """Computes steps on one kind of device, and owns its memory: the weights, the pages of keys and
    values, and the adapters. Others decide what lies where in it, and say so in a batch; they hold
    none of it but `pull_memory`. One thread calls it.

    Several processes, ranks, can stand behind the same calls. Rank 0 then

    - sends `apply` with the `prepare`, `forward` and `score` that follow it, in one message for
      each step, or with `divide_magnitudes`, which sums the squares of norms over ranks; and, when
      they come, `free_memory` and `restore`;
    - returns its own logits and experts, its own bytes, and the bytes that all ranks have freed;
    - returns a digest from `divide_magnitudes` when each rank does, with an error if any has one;
    - has only its own `pull_memory`: each rank pulls its own part of an image, to the extents that
      rank 0 has chosen, because images of all ranks lie alike. Slots of the table are equal.

    A rank that fails raises in rank 0, and ends the engine, unless it fails in `restore` before
    others wait for it.
    `place_threads`, `lora_launches` and the counters are each rank's own; rank 0 answers for all.

    `pictures` are embeddings of pictures, whose work of a step is done before its `prepare`; None:
    the model reads none, or this is another rank than the first, which alone computes them.
    """

    pictures: PictureRows | None

    @property
    def kernels(self) -> str:
        """Names the code that computes, for status: "native" and the instruction set; "torch";
        "triton", or "triton, captured" where steps are recorded and replayed."""

    @property
    def pull_memory(self) -> memoryview:
        """The memory that pull threads write into: the host tier's, or, without a host tier, the
        arena's."""

    def land(self, extents: Sequence[Extent]) -> None:
        """Without a host tier, brings an image from these extents of `pull_memory` to the same ones
        of the arena, unless that is the same memory, and waits. Called by pull threads."""

    @property
    def num_pages(self) -> int:
        """The pages that sequences may own: [0, num_pages)."""

    @property
    def num_states(self) -> int:
        """The slots of recurrent states that sequences may own: [1, num_states]; 0 if the model has
        none."""

    @property
    def kv_bytes(self) -> int:
        """The memory of all pages."""

    @property
    def recurrent_bytes(self) -> int:
        """The memory of all recurrent states."""

    @property
    def weights_bytes(self) -> int:
        """The memory of the model's weights."""

    @property
    def workspace_bytes(self) -> int:
        """The memory that steps are computed in and that is held between them."""

    @property
    def num_lora_steps(self) -> int:
        """The number of steps so far in which a row used an adapter."""

    @property
    def num_eager_steps(self) -> int:
        """The number of steps so far that were computed operation by operation on a device that can
        replay recorded ones: because none had their size, or because they are scored."""

    def lora_launches(self, contents: LoraContents) -> Mapping[str, int]:
        """Returns the operations that a decode step launches if all of its rows use one adapter
        with this content: by group of targets, and by the name of each weight of the base that is
        replaced. Kernels on a device, operations on a CPU. Operations that the adapter does not
        need are included if the step launches them all the same."""

    def apply(self, changes: Sequence[ResidencyChange]) -> None:
        """Makes a batch's residency changes, in order, before its step: rows of the table, and
        copies and divisions that it starts. Raises as `prepare` does, if freeing unused memory
        does not help."""

    def pop_completed_copies(self) -> list[str]:
        """Returns the adapters whose copies into the arena have completed since the last call,
        without blocking."""

    def divide_magnitudes(self) -> list[Divided]:
        """Goes on with images whose magnitudes are being divided, as far as a step may wait;
        returns the finished ones."""

    def place_threads(self, processors: Sequence[Sequence[int]]) -> None:
        """Binds each thread that computes to one of these sets of processors. Called once, in the
        thread that will call `forward`."""

    def prepare(self, batch: Batch) -> Inputs:
        """Returns the step's inputs for `forward`; at most one step is prepared at a time. `batch`
        has rows."""

    def forward(self, inputs: Inputs) -> Logits:
        """Returns the logits of each row's last token, in the order of the rows, and the experts
        that tokens have chosen. The caller may change them, and the next step may overwrite them.

        `prepare` and `forward` may raise torch.OutOfMemoryError, or another error that
        `device_faults.is_out_of_memory` knows, with any part of the step computed: then some of its
        rows are prepared anew.
        """

    def score(self, inputs: Inputs) -> Iterator[Scored]:
        """Yields the hidden states and logits of the scored prompts' tokens in the step that
        `forward` has just computed, in the order of the batch: as many tokens at once as a step may
        have rows, so that their logits take no more than a step's own, which they overwrite. Raises
        as `forward` does."""

    def pool(self, inputs: Inputs) -> Iterator[Hidden]:
        """Yields the final hidden states of the tokens that the step returns to be pooled, after
        `score`: in the order of the batch, as many tokens at once as a step may have rows. Other
        ranks have no part in it. Raises as `forward` does."""

    def keep_part(self, row: BatchRow) -> None:
        """Called when a part of a row is computed, before the next part of it in the same batch,
        which may be computed more than once."""

    def use_idle_time(self) -> bool:
        """Called while there is nothing to compute: does a piece of work that makes later steps
        faster, and takes as long as a few of the largest steps. Returns False if there is none."""

    def free_unused(self) -> None:
        """Gives memory back to the device that is reserved and not in use, after it has run out."""

    def free_memory(self, *, weights: bool) -> int:
        """Frees the state of sequences, and, if asked, the weights; returns the bytes.
        Memory that is free already does not count. Nothing is computed until `restore` returns."""

    def restore(self) -> None:
        """Allocates the memory that `free_memory` has freed, and reads the weights again; called in
        any thread. No state is kept. Raises UnsupportedModel, OSError, and MemoryError or
        torch.OutOfMemoryError where others have taken the memory: its allocations by then stay, and
        it may be called again."""


class RankBackend(Backend[Inputs], Protocol):
    """A backend that computes a rank's part of a step, too."""

    @property
    def is_dividing(self) -> bool:
        """Whether magnitudes are left to be divided."""

    @property
    def wants_idle_time(self) -> bool:
        """Whether `use_idle_time` has anything to do, which all ranks then do at the same time."""

    def plan(self, inputs: Inputs) -> Sequence[int]:
        """Returns how the first rank is about to compute a step, for others, which do the same;
        none, where there is one way."""

    def placed(self, inputs: Inputs) -> Sequence[PlacedRows]:
        """Returns the embeddings of pictures that the first rank's step reads."""

    def follow(self, data: StepData) -> None:
        """Computes this rank's part of a step that rank 0 prepares, computes and scores, and that
        has the logits. First come the embeddings of pictures, which rank 0 hands out before
        `forward`; see `pictures.take_in`. Raises as `forward` does, and ExchangeFailed."""


class Reload(NamedTuple):
    """Makes what a backend has freed, as at first. Pictures' embeddings read their tower again."""

    pages: Callable[[], KVCaches]
    weights: Callable[[], ModelWeights[Any]]
    states: Callable[[], RecurrentStates | None]
    pictures: Callable[[Arena], PictureRows | None]


def make_reload(
    config: EngineConfig,
    decoder: Decoder,
    projections: Callable[[], Projections[Any]],
    tower: TowerMaker = IN_TORCH,
    *,
    prefers_tiles: bool = False,
) -> Reload:
    """Returns functions that read the model as it is now, and refuse it if its files have changed:
    a server must not answer with two models. `projections` makes the parameters that they fill."""
    stamps = weight_stamps(config.model_dir)

    def read(described: Decoder, made: Callable[[], Projections[Any]]) -> ModelWeights[Any]:
        for path, stamp in weight_stamps(config.model_dir).items():
            if stamps.get(path) != stamp:
                changed = f"{path} has changed since the server started: restart the server"
                raise UnsupportedModel(changed)
        dtype = getattr(torch, config.dtype)
        return load_weights(config.model_dir, described, dtype, config.device, made())

    def pictures(arena: Arena) -> PictureRows | None:
        found = decoder.pictures
        if found is None or not has_tower(decoder):
            return None
        targets = applied_to_pictures(arena.layout, config.lora_targets)
        weights = partial(read, found.tower, tower.projections)
        stream = arena.streams.compute
        return PictureRows(found, lambda: tower.make(found, weights(), arena, targets), stream)

    pages = partial(allocate_kv_caches, config, decoder, prefers_tiles=prefers_tiles)
    states = partial(allocate_states, config, decoder)
    return Reload(pages, partial(read, decoder, projections), states, pictures)


class Scored(NamedTuple):
    """Runs of tokens that are scored together, and the logits that score them: fp32 [N,
    vocab_size]. The caller may change these, and the next ones may overwrite them."""

    runs: list[ScoredRun]
    logits: Tensor


class Hidden(NamedTuple):
    """Runs of tokens, and their final hidden states in the model's dtype: [N, hidden_size]. The
    next ones may overwrite them. Positions of runs are those behind the tokens. `heads` are of the
    runs' adapters: a classifier's own, in the layout's dtype, or None."""

    runs: list[ScoredRun]
    states: Tensor
    heads: Sequence[ClassifierHead | None]


class Logits(NamedTuple):
    """The outputs of a step. `values`: fp32 [N, vocab_size]. `argmax`: int64 [N], the first largest
    of each row, where the step computes it along; None: it does not. `experts`: int32 [layers that
    have experts, T, num_chosen], which each of the step's tokens has chosen, if a row returns
    them."""

    values: Tensor
    argmax: Tensor | None = None
    experts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The bytes that a backend takes on its device in addition to pages and arena; reading the
    weights takes no more. `graphs_bytes` is the memory of recorded steps, `libraries_bytes` of
    libraries and kernels once they have been used, `recurrent_bytes` of recurrent states."""

    weights_bytes: int
    workspace_bytes: int
    graphs_bytes: int = 0
    libraries_bytes: int = 0
    recurrent_bytes: int = 0

    @property
    def step_bytes(self) -> int:
        """The memory that depends on how many tokens and sequences a step has."""
        return self.workspace_bytes + self.graphs_bytes

    def plus(self, other: MemoryNeeds) -> MemoryNeeds:
        """Returns the needs of both."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return MemoryNeeds(*(one + two for one, two in pairs))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's own memory."""

    free_bytes: int
    total_bytes: int


class BackendFactory(Protocol):
    """Describes a backend before anything is allocated, and makes it."""

    @property
    def name(self) -> str:
        """The backend's name in error messages."""

    @property
    def features(self) -> frozenset[str]:
        """The features of decoders that it computes, as `model.features` names them."""

    @property
    def disabled_by(self) -> str:
        """The setting that disables the backend; empty: none does."""

    @property
    def has_device_memory(self) -> bool:
        """Whether the device's memory is not the host's: then images are pulled into a pinned host
        tier first."""

    def host_registrar(self, config: EngineConfig) -> HostRegistrar | None:
        """Returns the part that registers memory of others, from which a backend's `apply` then
        copies beside steps, as it does from the host tier; None, if copies delay steps in any
        case."""

    @property
    def profiler_device(self) -> str | None:
        """The device's name in torch's profiler; None: it is the CPU."""

    def supports(self, config: EngineConfig) -> bool:
        """Returns whether the backend computes on `config.device` with these settings, on this
        machine. If the settings would have it, the notes of the backend that takes its place say
        why not."""

    def speed_notes(self, config: EngineConfig, num_threads: int) -> list[str]:
        """Returns sentences for operators: why it computes more slowly on this machine than it
        could, and which setting helps; see `backends.speed_notes`. `num_threads` compute on a
        CPU."""

    def weight_kernels(self, form: WeightFormat) -> str:
        """Names the code that multiplies by weights of a format: "native"; a kernel of a device; or
        "dequantised", where torch multiplies by weights that it dequantises in each step."""

    def memory_needs(self, config: EngineConfig, decoder: Decoder) -> MemoryNeeds:
        """Computes the needs, an upper bound, of sizes that are decided but `kv_bytes`,
        `arena_bytes` and `host_bytes`; needs no device."""

    def device_memory(self, config: EngineConfig) -> DeviceMemory | None:
        """Asks the device; None where its memory is the host's."""

    def build(self, config: EngineConfig, decoder: Decoder, layout: ModelLayout) -> Backend[Any]:
        """Allocates all memory, reads the weights, and compiles and records all that steps need, so
        that no request waits for it.

        Raises UnsupportedModel for a fault of the checkpoint; ValueError when the memory given does
        not suffice.
        """


@runtime_checkable
class RankFactory(BackendFactory, Protocol):
    """Makes backends of ranks, each of which computes a part of a model."""

    @property
    def instructions(self) -> str:
        """Names the processor's instructions that it computes with. Ranks must have the same: what
        each computes for itself, such as the experts of a token, is equal then."""

    def open_meeting(
        self, count: int, num_threads: int, timeout_s: float, num_stages: int = 1, address: str = ""
    ) -> Meeting:
        """Opens the place where so many ranks meet, of so many stages, each of which computes with
        so many threads: of this machine, or of several, which reach this one at its `address`. A
        rank that keeps another waiting for `timeout_s` fails both. Raises OSError."""

    def build_rank(
        self, config: EngineConfig, decoder: Decoder, layout: ModelLayout, exchange: Exchange
    ) -> RankBackend[Any]:
        """Makes the backend of a rank, which computes this part of a model; see `build`."""


def num_kv_pages(config: EngineConfig, decoder: Decoder) -> int:
    """Returns how many pages `kv_bytes` hold. Pages of an encoder hold nothing and only count the
    tokens of a step: as many as all of its sequences may have."""
    if decoder.encoder is not None:
        return config.max_sequences * -(-config.max_model_len // config.page_size)
    return config.kv_bytes // _page_bytes(config, decoder)


def _page_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the size of a page, in the stage where it is largest: all have the same pages."""
    stored = stored_dtype(config.kv_dtype, getattr(torch, config.dtype))
    return max(kv_page_bytes(each, config.page_size, stored) for each in decoder.every_stage)


def allocate_kv_caches(
    config: EngineConfig, decoder: Decoder, *, prefers_tiles: bool = False
) -> KVCaches:
    """Allocates as many pages as `kv_bytes` hold. Raises ValueError if the pages that sequences may
    own do not hold one of `max_model_len`."""
    dtype = getattr(torch, config.dtype)
    stored = stored_dtype(config.kv_dtype, dtype)
    num_bytes, num_pages = _page_bytes(config, decoder), num_kv_pages(config, decoder)
    num_padding = padding_pages(config.device)
    num_tokens = max(0, num_pages - num_padding) * config.page_size
    if num_tokens < config.max_model_len:
        needed = (-(-config.max_model_len // config.page_size) + num_padding) * num_bytes
        raise ValueError(
            f"--kv-memory of {config.kv_bytes} bytes holds {num_tokens} tokens of sequences, "
            f"less than --max-model-len {config.max_model_len}: give it at least {needed} bytes"
        )
    return KVCaches.allocate(
        decoder,
        num_pages=num_pages,
        page_size=config.page_size,
        dtype=dtype,
        stored=stored,
        device=torch.device(config.device),
        prefers_tiles=prefers_tiles,
    )


def num_states(config: EngineConfig, decoder: Decoder) -> int:
    """Returns how many recurrent states sequences may own, in every stage: two each, and the stored
    ones; 0 for a decoder without recurrent layers."""
    if not decoder.of_all_stages.recurrences:
        return 0
    return 2 * config.max_sequences + (config.num_stored_states if config.prefix_cache else 0)


def states_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Returns the memory of `allocate_states`."""
    count = num_states(config, decoder)
    return num_slots(count) * slot_bytes(decoder) if count else 0


def allocate_states(config: EngineConfig, decoder: Decoder) -> RecurrentStates | None:
    """Returns None for a decoder without recurrent layers."""
    count = num_states(config, decoder)
    return RecurrentStates.allocate(decoder, count, config.device) if count else None


def returns_experts(batch: Batch, decoder: Decoder) -> bool:
    """Whether a row of the batch returns the experts that its tokens choose."""
    return decoder.expert_layers is not None and any(
        row.sequence.request.wanted.get(ExpertsOption) for row in batch.rows
    )


def empty_choices(decoder: Decoder, max_tokens: int, device: torch.device) -> Tensor | None:
    """Allocates the place of the experts that so many tokens choose: int32 [layers that have
    experts, T, num_chosen]; None for a model without experts."""
    shape = decoder.expert_layers
    if shape is None:
        return None
    sizes = len(shape.layers), max_tokens, shape.num_chosen
    return torch.zeros(sizes, dtype=torch.int32, device=device)


def gather_choices(choices: Tensor | None, decoder: Decoder, exchange: Exchange | None) -> None:
    """Hands the experts that tokens choose in a stage's layers to the first rank of all, whose
    `choices`, int32 [layers, T, num_chosen] (see `empty_choices`), have all layers then."""
    stage, shape = decoder.stage, decoder.expert_layers
    if choices is None or stage is None or not decoder.is_first_rank:
        return
    assert isinstance(exchange, StagedExchange)
    assert shape is not None
    for each in decoder.every_stage[1:] if stage.is_first else (decoder,):
        own = [place for place, layer in enumerate(shape.layers) if layer in each.layers]
        assert each.stage is not None
        if not own:
            continue
        rows = choices[own[0] : own[-1] + 1].contiguous()
        if stage.is_first:
            exchange.receive(rows, each.stage.index)
            choices[own[0] : own[-1] + 1] = rows
        else:
            exchange.send(rows, 0)


def choices_bytes(decoder: Decoder, max_tokens: int) -> int:
    """Returns the bytes of `empty_choices`."""
    shape = decoder.expert_layers
    return 0 if shape is None else 4 * len(shape.layers) * max_tokens * shape.num_chosen


def max_pages(config: EngineConfig) -> int:
    """Returns the number of pages of the longest sequence."""
    return -(-config.max_model_len // config.page_size)
