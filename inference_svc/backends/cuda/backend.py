"""A step on a CUDA device: inputs at fixed addresses, decode steps replayed."""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch

from inference_svc.adapters.layout import EMBEDDING, ModelLayout
from inference_svc.adapters.targets import AppliedTargets, applied_targets
from inference_svc.backends.adapter_memory import AdapterMemory, allocate_arena
from inference_svc.backends.arena import Arena
from inference_svc.backends.base import (
    Backend,
    DeviceMemory,
    Logits,
    MemoryNeeds,
    Reload,
    Scored,
    make_reload,
    max_pages,
    returns_experts,
)
from inference_svc.backends.cuda.graphs import CudaRecorder, Record, RecordedSteps
from inference_svc.backends.cuda.needs import max_prompt_recordings, memory_needs
from inference_svc.backends.cuda.padded_sizes import StepKind, StepShape
from inference_svc.backends.cuda.steps import FixedStep, FixedSteps, StepLimits, StepResults
from inference_svc.backends.magnitudes import Magnitudes
from inference_svc.backends.speed_notes import device_notes
from inference_svc.backends.torch import LoraStep, score_slices
from inference_svc.core import (
    Batch,
    BatchColumns,
    BatchRow,
    EngineConfig,
    ScoredRun,
    scored_runs,
)
from inference_svc.errors import DeviceFull
from inference_svc.host.device_faults import is_out_of_memory
from inference_svc.model.checkpoint.parameters import weight_formats
from inference_svc.model.config.keys import names
from inference_svc.model.description import Decoder
from inference_svc.model.inputs import StepInputs
from inference_svc.model.kv_caches import KVCaches
from inference_svc.model.layers import TorchProjections
from inference_svc.model.recurrent_states import RecurrentStates
from inference_svc.model.step import Step
from inference_svc.model.transformer import COMPUTED, Transformer
from kernels import quantised, tuning
from kernels.experts import sizes_to_warm_up
from kernels.lora.plan import LoraContents
from kernels.quantised import WeightFormat, implementation

logger = logging.getLogger(__name__)

SHORT_TOKENS = 16
"""The length of a short prompt: too few for the kernels of many tokens, and not a single one."""


GROUP_LAUNCHES, EMBEDDING_LAUNCHES = 2, 1
"""The kernels that `kernels.lora.triton_ops` launches for a group: it shrinks and expands. An
embedding's rows are shrunk already."""


class PreparedStep(NamedTuple):
    """A step of `num_rows` rows that was filled and sent. `shape` is of the recorded step that is
    replayed for it; None: it is computed operation by operation. `num_routed` tokens have chosen
    experts that a row returns; 0: no row does. `runs` are scored, never of decode steps."""

    step: FixedStep
    num_rows: int
    kind: StepKind
    shape: StepShape | None
    num_routed: int = 0
    runs: tuple[ScoredRun, ...] = ()


class CudaBackend(AdapterMemory):
    """A `Backend` whose inputs lie at fixed addresses: the small ones of decode steps, and the ones
    of steps with prompts. The cache's last page is padding's: no sequence may own it.

    `record` records steps for replay; None: every step is computed operation by operation.
    """

    def __init__(
        self,
        transformer: Transformer,
        kv_caches: KVCaches,
        arena: Arena,
        targets: AppliedTargets,
        limits: StepLimits,
        record: Record | None,
        reload: Reload | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        super().__init__(arena)
        self.num_states = 0 if states is None else states.num_states
        self.num_pages, self._page_size = kv_caches.num_pages - 1, kv_caches.page_size
        self.num_lora_steps = 0
        self.num_replays = 0
        self.num_eager_steps = 0
        self._decoder = transformer.description
        self.transformer: Transformer | None = transformer
        self.kv_caches: KVCaches | None = kv_caches
        self._reload = reload
        self._targets = targets
        self._limits = limits
        self.states = states
        self.steps = FixedSteps(arena, targets, limits, self.num_pages, self._page_size, states)
        self.results = StepResults.allocate(self._decoder, targets, limits, arena.device)
        self._last: Step | None = None
        self._record = record
        self._recorded = self._unrecorded()
        # Memory left by reading the weights goes back when steps are recorded.
        self._reserved_bytes = _trimmed_bytes(self)

    def _unrecorded(self) -> RecordedSteps | None:
        if self._record is None:
            return None
        adds_tokens, num_groups = self._targets.max_added_tokens > 0, len(self._targets.groups)
        most = max_prompt_recordings(self._decoder, num_groups, adds_tokens=adds_tokens)
        return RecordedSteps(self.compute, self._record, most)

    @property
    def kernels(self) -> str:
        return "triton" if self._recorded is None else "triton, captured"

    @property
    def weights_bytes(self) -> int:
        return 0 if self.transformer is None else self.transformer.weights.num_bytes

    @property
    def kv_bytes(self) -> int:
        return 0 if self.kv_caches is None else self.kv_caches.num_bytes

    @property
    def recurrent_bytes(self) -> int:
        return 0 if self.states is None else self.states.num_bytes

    def lora_launches(self, contents: LoraContents) -> Mapping[str, int]:
        """A recorded step of a kind launches every group, for any adapters of its rows; and for
        adapters with more than A and B the replacement of every weight."""
        is_recorded = self._recorded is not None
        launches = {
            name: EMBEDDING_LAUNCHES if name == EMBEDDING else GROUP_LAUNCHES
            for name, group in self._targets.groups.items()
            if is_recorded or not contents.targets.isdisjoint(group.targets)
        }
        weights: Collection[int] = contents.weights
        if is_recorded and (contents.has_vectors or weights):
            weights = self._targets.weights.values()
        return launches | dict.fromkeys(self._targets.names_of(weights), 1)

    @property
    def workspace_bytes(self) -> int:
        """The inputs, the logits, and the memory that torch has reserved on the device since the
        backend was made: it reuses memory that a step has freed, and recorded steps hold their
        workspace."""
        fixed_bytes = self.steps.num_bytes + self.results.num_bytes
        return fixed_bytes + _reserved_bytes(self.arena.device) - self._reserved_bytes

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles all kernels that steps need, and records decode steps and the steps of short
        prompts. Writes to nothing but padding's page.

        Kernels differ between few tokens and many, between tiles and single tokens, and in how many
        decode rows they look for a segment's among: the sizes to record have all of them.
        """
        max_tokens, item_bytes = self._limits.max_tokens, self.arena.flat.itemsize
        sizes = {min(SHORT_TOKENS, max_tokens), max_tokens}
        mixtures = self._decoder.mixtures
        for shape in {(each.num_experts, each.num_chosen) for each in mixtures}:
            sizes.update(sizes_to_warm_up(max_tokens, *shape, item_bytes))
            for form in weight_formats(self._decoder):
                sizes.update(quantised.sizes_to_warm_up(max_tokens, *shape, item_bytes, form))
        for num_tokens in sorted(sizes):
            self._warm_up_prompts(num_tokens)
        self._record_steps()

    def _record_steps(self) -> None:
        """Records steps over padding. Without recordings, computes them once."""
        shapes = [*self.steps.shapes.decodes(), *self.steps.shapes.usual_prompts()]
        if self._recorded is not None:
            self._recorded.record_all(shapes, self.steps.fill_padding)
            return
        for shape in reversed(self.steps.shapes.decodes()):
            self.steps.fill_padding(shape)
            self.compute(shape)

    def _warm_up_prompts(self, num_tokens: int) -> None:
        """Runs a step of so many tokens, or as many as fit its rows."""
        batch = self.steps.padding_batch(num_tokens, self._limits.max_rows)
        num_rows = len(batch.rows)
        step = self._send(self.steps.prompts, batch.columns(), may_replay=False)[0]
        inputs = step.step_inputs(self.states, None)
        # Without tiles, too: in a step with prompts of others an adapter may have single tokens
        # only.
        steps = (
            step.lora.any_step(kind, len(inputs.token_ids), num_rows, tiles)
            for kind in (StepKind.LORA, StepKind.ANY)
            for tiles in (True, False)
        )
        for lora in (None, *steps):
            self._compute(step, inputs, lora)

    def _make_magnitudes(self) -> Magnitudes:
        assert self.transformer is not None, "the weights are freed"
        return Magnitudes(self.transformer.weights, self.arena)

    def place_threads(self, processors: abc.Sequence[abc.Sequence[int]]) -> None:
        """Leaves the threads to the system: the device computes."""

    def prepare(self, batch: Batch) -> PreparedStep:
        """Sends the step's inputs. Waits for nothing but an earlier step's copy."""
        columns = batch.columns()
        if columns.is_decode:
            prepared = self._send(self.steps.decodes, columns)
        else:
            # Recorded steps do not keep the hidden states, which are to be scored.
            runs = tuple(scored_runs(batch.rows))
            prepared = self._send(self.steps.prompts, columns, may_replay=not runs)._replace(
                runs=runs
            )
        if returns_experts(batch, self._decoder):
            return prepared._replace(num_routed=sum(row.num_tokens for row in batch.rows))
        return prepared

    def _send(
        self, step: FixedStep, batch: BatchColumns, *, may_replay: bool = True
    ) -> PreparedStep:
        step.inputs.block.wait()
        step.inputs.fill(batch)
        kind = step.lora.fill(batch)
        self.num_lora_steps += kind is not StepKind.BASE
        shape = self._shape_for(kind, batch) if may_replay else None
        if shape is not None:
            step.inputs.pad(shape)
        step.fill_segments(batch, shape)
        step.inputs.send()
        return PreparedStep(step, len(batch.sequences), kind, shape)

    def _shape_for(self, kind: StepKind, batch: BatchColumns) -> StepShape | None:
        """Returns the shape of the recorded step to replay for `batch`, if there is to be one."""
        if self._recorded is None:
            return None
        num_rows = len(batch.sequences)
        if batch.is_decode:
            shape = self.steps.shapes.of_decodes(kind, num_rows)
        else:
            shape = self.steps.shapes.of_prompts(kind, sum(batch.counts), num_rows)
        return shape if shape is not None and self._recorded.takes(shape) else None

    @torch.inference_mode()
    def forward(self, inputs: PreparedStep) -> Logits:
        step, num_rows, kind, shape, num_routed, runs = inputs
        if shape is not None:
            assert self._recorded is not None
            is_replayed = self._recorded.run(shape)
            lora = step.lora.padded_step(shape)
        else:
            is_replayed = False
            lora = step.lora.step() if kind is not StepKind.BASE else None
            filled = step.step_inputs(self.states, None)
            self._compute(step, filled, lora, is_scored=bool(runs))
        self.steps.table.close()
        self.num_replays += is_replayed
        self.num_eager_steps += not is_replayed
        experts = self.results.choices_of(num_routed) if num_routed else None
        return Logits(
            self.results.logits_of(num_rows, lora), self.results.argmax[:num_rows], experts
        )

    @torch.inference_mode()
    def score(self, inputs: PreparedStep) -> Iterator[Scored]:
        last, self._last = self._last, None
        if not inputs.runs:
            return
        assert last is not None, "the step is computed"
        assert self.transformer is not None
        lora = inputs.step.lora.step() if inputs.kind is not StepKind.BASE else None
        yield from score_slices(self.transformer, last, lora, inputs.runs, self._limits.max_rows)

    def keep_part(self, row: BatchRow) -> None:
        if self.states is not None:
            self.states.keep_part(row)

    @torch.inference_mode()
    def use_idle_time(self) -> bool:
        """Records a step whose size has occurred."""
        if self._recorded is None or not self._recorded.record_wanted(self.steps.fill_padding):
            return False
        self.steps.table.close()
        return True

    def free_unused(self) -> None:
        """Lets go of torch's cache: its pieces may be too small for an allocation that failed."""
        if self.arena.device.type == "cuda":
            torch.cuda.empty_cache()

    def free_memory(self, *, weights: bool) -> int:
        """Lets go of recorded steps, too: they have addresses in the freed memory."""
        held_bytes = self.kv_bytes + self.recurrent_bytes + self.weights_bytes
        self._last = None  # which has all of it
        self.kv_caches = self.states = self._recorded = None
        if weights:
            self._magnitudes = None
            self.transformer = None
        self._reserved_bytes = _trimmed_bytes(self)
        return held_bytes - self.kv_bytes - self.recurrent_bytes - self.weights_bytes

    @torch.inference_mode()
    def restore(self) -> None:
        """Records steps anew: kernels are compiled already."""
        assert self._reload is not None
        if self.transformer is None:
            self.transformer = Transformer(self._decoder, self._reload.weights())
        self.kv_caches = self.kv_caches or self._reload.pages()
        self.states = self.states or self._reload.states()
        self._reserved_bytes = _trimmed_bytes(self)
        if self._recorded is None:
            self._recorded = self._unrecorded()
            try:
                self._record_steps()
            except BaseException:
                self._recorded = None  # half of it recorded: anew the next time
                raise

    def compute(self, shape: StepShape) -> None:
        """Computes the step of this shape that lies at the fixed addresses, operation by
        operation."""
        step, is_recorded = self.steps.of(shape), self._recorded is not None
        lora = step.lora.padded_step(shape, is_recorded=is_recorded)
        self._compute(step, step.step_inputs(self.states, shape), lora)

    def _compute(
        self,
        step: FixedStep,
        inputs: StepInputs,
        lora: LoraStep | None,
        *,
        is_scored: bool = False,
    ) -> None:
        """Writes the step's logits, the largest of each row, and the experts of each token to their
        places."""
        assert self.transformer is not None, "the weights are freed"
        assert self.kv_caches is not None, "the pages are freed"
        step.inputs.write_pages()
        logits = self.results.logits_of(len(inputs.logit_rows), lora)
        choices = self.results.choices_of(len(inputs.token_ids))
        if is_scored:
            self._last = self.transformer.layers(inputs, self.kv_caches, lora, choices)
            logits.copy_(self.transformer.logits(self._last, inputs.logit_rows, lora))
        else:
            logits.copy_(self.transformer.forward(inputs, self.kv_caches, lora, choices))
        torch.argmax(logits, dim=-1, out=self.results.argmax[: len(logits)])


FLOAT8_CAPABILITY = (8, 9)
"""The first compute capability whose processors convert float8."""
LACKING = names("attention.head_dim>512 weight_format.odd_groups")


class CudaFactory:
    """A `BackendFactory` for one CUDA device."""

    name = "CUDA"
    features = COMPUTED - LACKING
    disabled_by = "--device cpu"
    has_device_memory = True
    profiler_device = "cuda"

    def supports(self, config: EngineConfig) -> bool:
        is_ours = torch.device(config.device).type == "cuda"
        if is_ours and config.adapter_dtype == "fp8":
            device = config.device
            check_float8(
                torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
            )
        return is_ours

    def speed_notes(self, config: EngineConfig, num_threads: int) -> list[str]:
        name = torch.cuda.get_device_name(config.device)
        capability = torch.cuda.get_device_capability(config.device)
        return device_notes(name, capability, tuning.measured_devices())

    def weight_kernels(self, form: WeightFormat) -> str:
        return implementation(form, "cuda")

    def memory_needs(self, config: EngineConfig, decoder: Decoder) -> MemoryNeeds:
        return memory_needs(config, decoder)

    def device_memory(self, config: EngineConfig) -> DeviceMemory | None:
        return DeviceMemory(*torch.cuda.mem_get_info(torch.device(config.device)))

    def build(
        self,
        config: EngineConfig,
        decoder: Decoder,
        layout: ModelLayout,
    ) -> Backend[PreparedStep]:
        """See BackendFactory.build. Raises also DeviceFull."""
        device_name = torch.cuda.get_device_name(torch.device(config.device))
        table = "its own" if tuning.use_device(device_name) else "the default"
        logger.info("kernels on %s: %s constants", device_name, table)
        try:
            return self._build(config, decoder, layout)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceFull(
                "the device has too little memory for the planned use: lower --kv-memory, or set "
                f"memory-limit ({error})"
            ) from error

    def _build(
        self,
        config: EngineConfig,
        decoder: Decoder,
        layout: ModelLayout,
    ) -> CudaBackend:
        reload = make_reload(config, decoder, TorchProjections)
        kv_caches = reload.pages()
        arena = allocate_arena(config, layout)
        weights = reload.weights()
        limits = StepLimits(config.max_batch_tokens, config.max_sequences, max_pages(config))
        record = CudaRecorder() if config.record_steps else None
        transformer = Transformer(decoder, weights)
        targets = applied_targets(layout, config.lora_targets, config.max_added_tokens)
        backend = CudaBackend(
            transformer, kv_caches, arena, targets, limits, record, reload, reload.states()
        )
        backend.warm_up()
        return backend


def check_float8(name: str, capability: tuple[int, int]) -> None:
    """Raises ValueError if a device of this name and compute capability does not convert float8."""
    if capability < FLOAT8_CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (FLOAT8_CAPABILITY, capability))
        raise ValueError(
            f"--adapter-dtype fp8 needs compute capability {needed} or later, and {name} has "
            f"{found}: leave it out"
        )


def _trimmed_bytes(backend: CudaBackend) -> int:
    """Gives back memory that torch has reserved and does not use; returns the bytes in use."""
    backend.free_unused()
    return _reserved_bytes(backend.arena.device)


def _reserved_bytes(device: torch.device) -> int:
    """Returns the bytes that torch has reserved on the device; 0 on a CPU, where tests run this."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
